// Computes the horizontal positions of a layered graph's boxes. The data has the layers and their order (Sugiyama).

const BEND = 10; // width of a slot where a long line crosses a layer
const SWEEPS = 24;

/** Returns the middle of each slot in each layer: near its neighbours above and below, in order, without overlaps. */
function columns(graph, widths) {
  const beside = neighbours(graph);
  const middles = widths.map((layer) => {
    const ends = gaps(layer);
    return ends.map((end) => end - ends[ends.length - 1] / 2);
  });
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    const depths = [...middles.keys()];
    for (const depth of sweep % 2 ? depths.reverse() : depths) {
      const wanted = middles[depth].map((now, slot) => {
        let [sum, weight] = [0, 0];
        for (const [toDepth, toSlot, pull] of beside[depth][slot]) {
          sum += pull * middles[toDepth][toSlot];
          weight += pull;
        }
        return weight ? { x: sum / weight, weight } : { x: now, weight: 0.1 };
      });
      middles[depth] = spread(wanted, gaps(widths[depth]));
    }
  }
  return middles;
}

/** Returns, for each slot, its neighbours in the layers above and below, with the weight of each. */
function neighbours({ layers, routes }) {
  const beside = layers.map((layer) => layer.map(() => []));
  const place = new Map();
  layers.forEach((layer, depth) => layer.forEach((cluster, slot) => cluster !== null && place.set(cluster, [depth, slot])));
  for (const [source, target, via] of routes) {
    const path = [place.get(source), ...via, place.get(target)];
    for (let step = 1; step < path.length; step += 1) {
      const [[d1, s1], [d2, s2]] = [path[step - 1], path[step]];
      // Bends weigh more than boxes, which keeps long lines straight.
      const pull = 1 + 2 * (layers[d1][s1] === null) + 2 * (layers[d2][s2] === null);
      beside[d1][s1].push([d2, s2, pull]);
      beside[d2][s2].push([d1, s1, pull]);
    }
  }
  return beside;
}

/** Returns the least distance of each slot's middle from the first slot's. */
function gaps(widths) {
  const ends = [0];
  for (let slot = 1; slot < widths.length; slot += 1) {
    const room = widths[slot - 1] > BEND && widths[slot] > BEND ? BOX.gapX : 12;
    ends.push(ends[slot - 1] + (widths[slot - 1] + widths[slot]) / 2 + room);
  }
  return ends;
}

/** Returns the positions nearest to `wanted` (least squares) that keep order and gaps, by pooling adjacent violators. */
function spread(wanted, ends) {
  const pools = [];
  wanted.forEach(({ x, weight }, slot) => {
    pools.push({ sum: (x - ends[slot]) * weight, weight, count: 1 });
    while (pools.length > 1 && pools.at(-2).sum / pools.at(-2).weight > pools.at(-1).sum / pools.at(-1).weight) {
      const last = pools.pop();
      const pool = pools.at(-1);
      pool.sum += last.sum;
      pool.weight += last.weight;
      pool.count += last.count;
    }
  });
  return pools.flatMap(({ sum, weight, count }) => Array(count).fill(sum / weight)).map((x, slot) => x + ends[slot]);
}
