// The launches as a layered graph. The layers and the order in them come with the data (Sugiyama layout);
// here the boxes get their sizes, open or closed, and lines are drawn between what is visible.

const NODE = { width: 176, least: 30, most: 84, gapX: 18, gapY: 34 };
const BOX = { width: 216, height: 46, head: 30, pad: 14, gapX: 26, gapY: 44 };
const opened = new Map();

function foldAll(name, open) {
  opened.set(name, new Set(open ? strategies.get(name).graph.clusters.keys() : []));
  showGraph(name);
}

function toggle(name, cluster) {
  const set = opened.get(name);
  if (!set.delete(cluster)) set.add(cluster);
  showGraph(name);
  document.querySelector(`#graph-view [data-cluster="${cluster}"]`)?.focus();
}

/** Places of the launches inside an open cluster, relative to its corner, and its size. */
function inside(cluster, launches, longest) {
  const layers = new Map();
  cluster.places.forEach(([x, y], place) => layers.set(y, [...(layers.get(y) ?? []), { x, place }]));
  const spots = [];
  let top = BOX.head + 6;
  let widest = BOX.width;
  for (const y of [...layers.keys()].sort((a, b) => a - b)) {
    const row = layers.get(y).sort((a, b) => a.x - b.x);
    const width = row.length * NODE.width + (row.length - 1) * NODE.gapX;
    widest = Math.max(widest, width + 2 * BOX.pad);
    const heights = row.map(({ place }) => {
      const launch = launches[cluster.launches[place]];
      return NODE.least + (NODE.most - NODE.least) * Math.sqrt((launch.roofline * launch.repeat) / longest);
    });
    row.forEach(({ place }, number) => { spots[place] = { x: number * (NODE.width + NODE.gapX) - width / 2, y: top, width: NODE.width, height: heights[number] }; });
    top += Math.max(...heights) + NODE.gapY;
  }
  for (const spot of spots) spot.x += widest / 2;
  return { width: widest, height: top - NODE.gapY + BOX.pad, spots };
}

/** Boxes of the clusters and points of the bends, in one drawing's coordinates. */
function arrange(graph, launches, open) {
  const longest = Math.max(...launches.map((launch) => launch.roofline * launch.repeat), 1e-9);
  const sizes = graph.clusters.map((cluster, number) =>
    open.has(number) ? inside(cluster, launches, longest) : { width: BOX.width, height: BOX.height, spots: null });
  const boxes = [];
  const bends = [];
  let top = 8;
  graph.layers.forEach((layer, depth) => {
    const widths = layer.map(([cluster]) => (cluster === null ? 14 : sizes[cluster].width));
    const height = Math.max(...layer.map(([cluster]) => (cluster === null ? 0 : sizes[cluster].height)));
    // Wanted places, pushed right where they would touch, then moved back by the mean push.
    const lefts = [];
    layer.forEach(([, x], slot) => {
      const wanted = x * (BOX.width + BOX.gapX) - widths[slot] / 2;
      lefts.push(slot ? Math.max(wanted, lefts[slot - 1] + widths[slot - 1] + BOX.gapX) : wanted);
    });
    const push = layer.reduce((sum, [, x], slot) => sum + lefts[slot] + widths[slot] / 2 - x * (BOX.width + BOX.gapX), 0) / layer.length;
    bends[depth] = [];
    layer.forEach(([cluster], slot) => {
      const left = lefts[slot] - push;
      if (cluster !== null) boxes[cluster] = { x: left, y: top + (height - sizes[cluster].height) / 2, ...sizes[cluster] };
      bends[depth][slot] = { x: left + widths[slot] / 2, top, bottom: top + height };
    });
    top += height + BOX.gapY;
  });
  const left = Math.min(...boxes.map((box) => box.x), ...bends.flat().map((bend) => bend.x)) - 12;
  for (const box of boxes) box.x -= left;
  for (const bend of bends.flat()) bend.x -= left;
  const right = Math.max(...boxes.map((box) => box.x + box.width), ...bends.flat().map((bend) => bend.x)) + 12;
  return { boxes, bends, width: right, height: top - BOX.gapY + 10 };
}

/** What is drawn for a launch: its own node in an open cluster, or the closed cluster's box. */
function visible(graph, boxes, home, index) {
  const cluster = home.get(index);
  const box = boxes[cluster];
  if (!box.spots) return { id: `c${cluster}`, cluster, ...box };
  const spot = box.spots[graph.clusters[cluster].launches.indexOf(index)];
  return { id: `l${index}`, cluster, x: box.x + spot.x, y: box.y + spot.y, width: spot.width, height: spot.height };
}

function curve(points) {
  let path = `M${points[0].x.toFixed(1)},${points[0].y.toFixed(1)}`;
  for (let place = 1; place < points.length; place += 1) {
    const [from, to] = [points[place - 1], points[place]];
    if (from.x === to.x) { path += `V${to.y.toFixed(1)}`; continue; }
    const bow = Math.max(18, Math.abs(to.y - from.y) / 2) * (to.y >= from.y ? 1 : 2.2);
    path += `C${from.x.toFixed(1)},${(from.y + bow).toFixed(1)} ${to.x.toFixed(1)},${(to.y - bow).toFixed(1)} ${to.x.toFixed(1)},${to.y.toFixed(1)}`;
  }
  return path;
}

function lines(graph, launches, { boxes, bends }) {
  const home = new Map(graph.clusters.flatMap((cluster, number) => cluster.launches.map((index) => [index, number])));
  const routes = new Map(graph.routes.map(([source, target, via]) => [`${source}>${target}`, via]));
  const drawn = new Map();
  for (const [source, target, bytes] of graph.edges) {
    const [from, to] = [visible(graph, boxes, home, source), visible(graph, boxes, home, target)];
    if (from.id === to.id) continue;
    const key = `${from.id}>${to.id}`;
    const line = drawn.get(key) ?? { from, to, bytes: 0 };
    line.bytes += bytes;
    drawn.set(key, line);
  }
  const most = Math.max(...graph.edges.map(([, , bytes]) => bytes), 1);
  return [...drawn.values()].sort((a, b) => b.bytes - a.bytes).map(({ from, to, bytes }) => {
    const via = from.cluster === to.cluster ? [] : (routes.get(`${from.cluster}>${to.cluster}`) ?? []);
    const points = [{ x: from.x + from.width / 2, y: from.y + from.height },
      ...via.flatMap(([depth, slot]) => { const bend = bends[depth][slot]; return [{ x: bend.x, y: bend.top }, { x: bend.x, y: bend.bottom }]; }),
      { x: to.x + to.width / 2, y: to.y }];
    const path = svg("path", { class: "line", d: curve(points), "stroke-width": (1 + 9 * Math.sqrt(bytes / most)).toFixed(1), "data-from": from.id, "data-to": to.id });
    path.append(svg("title", {}, `${formatBytes(bytes)} through HBM`));
    path.dataset.words = `${formatBytes(bytes)} through HBM`;
    return path;
  });
}

function clip(text, room) {
  const most = Math.floor(room / 6.6);
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function clusterBox(name, graph, launches, number, box) {
  const cluster = graph.clusters[number];
  const inner = cluster.launches.map((index) => launches[index]);
  const time = inner.reduce((sum, launch) => sum + launch.roofline * launch.repeat, 0);
  const bytes = inner.reduce((sum, launch) => sum + (launch.read + launch.written) * launch.repeat, 0);
  const label = scopeLabel(cluster.scope, cluster.phase);
  const isOpen = Boolean(box.spots);
  const words = `${cluster.scope || "no scope"} (${cluster.phase}): ${plural(inner.length, "launch")}, ${formatBytes(bytes)} of HBM traffic, ${formatUs(time)} by roofline (estimated)`;
  const head = svg("g", { class: "head", tabindex: 0, role: "button", "aria-expanded": isOpen, "aria-label": words, "data-cluster": number },
    svg("rect", { class: "hit", width: box.width, height: isOpen ? BOX.head : box.height, rx: 8 }),
    svg("text", { class: "fold", x: 12, y: 20 }, isOpen ? "▾" : "▸"),
    svg("text", { class: "name", x: 28, y: 20 }, clip(label, box.width - 40)));
  if (!isOpen) {
    head.append(svg("text", { class: "small", x: 28, y: 37 }, `${plural(inner.length, "launch")} · ${formatUs(time)} · ${formatBytes(bytes)}`));
    let at = 0;
    for (const launch of inner) {
      const part = (box.width * launch.roofline * launch.repeat) / Math.max(time, 1e-9);
      head.append(svg("rect", { class: `kf k-${family(launch.kind)}`, x: at, y: box.height - 4, width: Math.max(part, 0.5), height: 4 }));
      at += part;
    }
  }
  head.dataset.words = words;
  const act = () => toggle(name, number);
  head.addEventListener("click", act);
  head.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } });
  const group = svg("g", { class: `cluster ${isOpen ? "open" : "closed"} ${cluster.phase}`, transform: `translate(${box.x.toFixed(1)},${box.y.toFixed(1)})`, "data-id": `c${number}` },
    svg("rect", { class: "frame", width: box.width, height: box.height, rx: 8 }), head);
  if (isOpen) cluster.launches.forEach((index, place) => group.append(launchNode(name, launches[index], box.spots[place])));
  return group;
}

function launchNode(name, launch, spot) {
  const words = `#${launch.index} ${launch.name}: ${launch.kind}, reads ${formatBytes(launch.read)}, writes ${formatBytes(launch.written)}, ${formatUs(launch.roofline)} by roofline (estimated), bound by ${launch.limiter}`;
  const node = svg("g", { class: "node", transform: `translate(${spot.x.toFixed(1)},${spot.y.toFixed(1)})`, tabindex: 0, role: "button", "aria-label": words, "data-id": `l${launch.index}`, "data-strategy": name, "data-launch": launch.index },
    svg("rect", { class: "body", width: spot.width, height: spot.height, rx: 5 }),
    svg("rect", { class: `kf k-${family(launch.kind)}`, width: 6, height: spot.height, rx: 3 }),
    svg("text", { class: "name", x: 14, y: 13 }, clip(launch.name, spot.width - 18)),
    svg("text", { class: "small", x: 14, y: 25 }, `${launch.kind}${launch.repeat > 1 ? ` ×${launch.repeat}` : ""} · ${formatUs(launch.roofline)}`));
  node.append(svg("title", {}, words));
  node.dataset.words = words;
  node.addEventListener("keydown", (event) => { if (event.key === "Enter") openCard(name, launch.index); });
  return node;
}

function showGraph(name) {
  const { graph, launches } = strategies.get(name);
  const view = document.getElementById("graph-view");
  if (!launches.length) { view.replaceChildren(el("p", { className: "empty", textContent: "This program launches nothing." })); return; }
  if (!opened.has(name)) opened.set(name, new Set());
  const plan = arrange(graph, launches, opened.get(name));
  const drawing = svg("svg", { width: Math.ceil(plan.width), height: Math.ceil(plan.height), viewBox: `0 0 ${Math.ceil(plan.width)} ${Math.ceil(plan.height)}`, role: "group", "aria-label": `Launches of ${name}` },
    svg("g", {}, ...lines(graph, launches, plan)),
    svg("g", {}, ...graph.clusters.map((_, number) => clusterBox(name, graph, launches, number, plan.boxes[number]))));
  drawing.addEventListener("pointerover", (event) => hover(drawing, event.target));
  drawing.addEventListener("focusin", (event) => hover(drawing, event.target));
  drawing.addEventListener("pointerleave", () => hover(drawing, null));
  view.replaceChildren(drawing);
}

/** Says what is under the pointer, and lights its lines. */
function hover(drawing, target) {
  const said = target?.closest("[data-words]");
  document.getElementById("graph-hover").textContent = said?.dataset.words ?? "";
  const id = target?.closest("[data-id]")?.dataset.id;
  drawing.classList.toggle("lit", Boolean(id));
  for (const line of drawing.querySelectorAll(".line")) line.classList.toggle("on", id !== undefined && (line.dataset.from === id || line.dataset.to === id));
}
