// Draws the launches as a layered graph: sizes the open and closed boxes, and draws lines between visible boxes.

const NODE = { width: 176, least: 30, most: 84, gapX: 18, gapY: 34 };
const BOX = { width: 216, least: 216, most: 340, height: 46, head: 30, pad: 14, gapX: 26, gapY: 44 };
const DRAWN_FROM = 0.03; // lines with a smaller share of the largest line's bytes are drawn on demand
const LABEL_FROM = 0.1; // lines with at least this share of the largest line's bytes show their bytes
const opened = new Map();

function foldAll(name, open) {
  opened.set(name, new Set(open ? strategies.get(name).graph.clusters.keys() : []));
  showGraph(name);
  fit(ZOOM.legible);
}

/** Opens or closes a cluster, keeping its head in place on the screen. */
function toggle(name, cluster) {
  const set = opened.get(name);
  if (!set.delete(cluster)) set.add(cluster);
  const head = () => document.querySelector(`#graph-view [data-cluster="${cluster}"]`);
  const before = head().getBoundingClientRect();
  showGraph(name);
  const after = head().getBoundingClientRect();
  panBy(before.left - after.left, before.top - after.top);
  head().focus({ preventScroll: true });
}

/** Returns the positions of the launches in an open cluster, relative to its corner, and the cluster's size. */
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

/** Returns the boxes of the clusters and the bends of the lines, in the drawing's coordinates. */
function arrange(graph, launches, open) {
  const longest = Math.max(...launches.map((launch) => launch.roofline * launch.repeat), 1e-9);
  const sizes = graph.clusters.map((cluster, number) =>
    open.has(number) ? inside(cluster, launches, longest) : { width: BOX.width, height: BOX.height, spots: null });
  const widths = graph.layers.map((layer) => layer.map((cluster) => (cluster === null ? BEND : sizes[cluster].width)));
  const middles = columns(graph, widths);
  const boxes = [];
  const bends = [];
  let top = 8;
  graph.layers.forEach((layer, depth) => {
    const height = Math.max(...layer.map((cluster) => (cluster === null ? 0 : sizes[cluster].height)));
    bends[depth] = layer.map((cluster, slot) => {
      const x = middles[depth][slot];
      if (cluster !== null) boxes[cluster] = { x: x - widths[depth][slot] / 2, y: top + (height - sizes[cluster].height) / 2, ...sizes[cluster] };
      return { x, top, bottom: top + height };
    });
    top += height + BOX.gapY;
  });
  const left = Math.min(...boxes.map((box) => box.x), ...bends.flat().map((bend) => bend.x)) - 12;
  for (const box of boxes) box.x -= left;
  for (const bend of bends.flat()) bend.x -= left;
  const right = Math.max(...boxes.map((box) => box.x + box.width), ...bends.flat().map((bend) => bend.x)) + 36;
  return { boxes, bends, width: right, height: top - BOX.gapY + 10 };
}

/** Returns what shows a launch: its own node in an open cluster, or the closed cluster's box. */
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
    const bow = Math.max(18, (to.y - from.y) / 2);
    path += `C${from.x.toFixed(1)},${(from.y + bow).toFixed(1)} ${to.x.toFixed(1)},${(to.y - bow).toFixed(1)} ${to.x.toFixed(1)},${to.y.toFixed(1)}`;
  }
  return path;
}

/** Returns the path of an upward line (a value that a loop carries), which leaves and enters at the right sides. */
function upward(from, to) {
  const [x1, y1, x2, y2] = [from.x + from.width, from.y + from.height / 2, to.x + to.width, to.y + to.height / 2];
  const bow = Math.max(x1, x2) + 24;
  return `M${x1.toFixed(1)},${y1.toFixed(1)}C${bow.toFixed(1)},${y1.toFixed(1)} ${bow.toFixed(1)},${y2.toFixed(1)} ${x2.toFixed(1)},${y2.toFixed(1)}`;
}

function lines(name, graph, launches, { boxes, bends }) {
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
  const labels = [];
  const largest = Math.max(...[...drawn.values()].map((line) => line.bytes), 1);
  const all = document.getElementById("all-values").checked;
  const paths = [...drawn.values()].filter((line) => all || line.bytes >= largest * DRAWN_FROM).sort((a, b) => b.bytes - a.bytes).map(({ from, to, bytes }) => {
    const via = from.cluster === to.cluster ? [] : (routes.get(`${from.cluster}>${to.cluster}`) ?? []);
    const points = to.y < from.y + from.height ? null : [{ x: from.x + from.width / 2, y: from.y + from.height },
      ...via.flatMap(([depth, slot]) => { const bend = bends[depth][slot]; return [{ x: bend.x, y: bend.top }, { x: bend.x, y: bend.bottom }]; }),
      { x: to.x + to.width / 2, y: to.y }];
    const path = svg("path", { class: "line", d: points ? curve(points) : upward(from, to), "stroke-width": (1 + 9 * Math.sqrt(bytes / most)).toFixed(1), "data-ends": `${from.id} c${from.cluster} ${to.id} c${to.cluster}` });
    path.dataset.words = `${formatBytes(bytes)} through ${strategies.get(name).device.memory}`;
    if (points && bytes >= most * LABEL_FROM) {
      const [a, b] = points;
      labels.push(svg("text", { class: "size", x: ((a.x + b.x) / 2 + 9).toFixed(1), y: ((a.y + b.y) / 2 + 4).toFixed(1) }, formatBytes(bytes)));
    }
    return path;
  });
  return [...paths, ...labels];
}

function clip(text, room) {
  const most = Math.floor(room / 6.6);
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** Cuts a scope at its start: its end tells it from others. */
function clipStart(text, room) {
  const most = Math.floor(room / 6.6);
  return text.length > most ? `…${text.slice(text.length - most + 1)}` : text;
}

function clusterBox(name, graph, launches, number, box) {
  const cluster = graph.clusters[number];
  const inner = cluster.launches.map((index) => launches[index]);
  const time = inner.reduce((sum, launch) => sum + launch.roofline * launch.repeat, 0);
  const bytes = inner.reduce((sum, launch) => sum + (launch.read + launch.written) * launch.repeat, 0);
  const label = (cluster.scope || "no scope") + (cluster.phase === "backward" ? " ↩" : "");
  const isOpen = Boolean(box.spots);
  const words = `${cluster.scope || "no scope"} (${cluster.phase}): ${plural(inner.length, "launch")}, ${formatBytes(bytes)} of traffic, ${formatUs(time)} by roofline (estimated)`;
  const head = svg("g", { class: "head", tabindex: 0, role: "button", "aria-expanded": isOpen, "aria-label": words, "data-cluster": number },
    svg("rect", { class: "hit", width: box.width, height: isOpen ? BOX.head : box.height, rx: 8 }),
    svg("text", { class: "fold", x: 12, y: 20 }, isOpen ? "▾" : "▸"),
    svg("text", { class: "name", x: 28, y: 20 }, clipStart(label, box.width - 24)));
  if (!isOpen) {
    head.append(svg("text", { class: "small", x: 28, y: 37 }, `${plural(inner.length, "launch")} · ${formatUs(time)} · ${formatBytes(bytes)}`));
    let left = 0;
    for (const launch of inner) {
      const part = (box.width * launch.roofline * launch.repeat) / Math.max(time, 1e-9);
      head.append(svg("rect", { class: `kf k-${family(launch.kind)}`, x: left, y: box.height - 4, width: Math.max(part, 0.5), height: 4 }));
      left += part;
    }
  }
  head.dataset.words = words;
  const act = () => toggle(name, number);
  head.addEventListener("click", act);
  onKey(head, act);
  const group = svg("g", { class: `cluster ${isOpen ? "open" : "closed"}`, transform: at(box), "data-id": `c${number}` }, head);
  if (isOpen) cluster.launches.forEach((index, place) => group.append(launchNode(name, launches[index], box.spots[place])));
  return group;
}

/** Calls `act` on Enter and the space bar, as a button does. */
function onKey(node, act) {
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    act();
  });
}

const at = (box) => `translate(${box.x.toFixed(1)},${box.y.toFixed(1)})`;

/** Returns the box behind a cluster, drawn below the lines so that they stay visible in an open one. */
function frame(cluster, box) {
  return svg("rect", { class: `frame ${box.spots ? "open" : ""} ${cluster.phase}`, transform: at(box), width: box.width, height: box.height, rx: 8 });
}

function launchNode(name, launch, spot) {
  const words = `#${launch.index} ${launch.name}: ${launch.kind}, reads ${formatBytes(launch.read)}, writes ${formatBytes(launch.written)}, ${formatUs(launch.roofline)} by roofline (estimated), bound by ${launch.limiter}`;
  const node = svg("g", { class: "node", transform: `translate(${spot.x.toFixed(1)},${spot.y.toFixed(1)})`, tabindex: 0, role: "button", "aria-label": words, "data-id": `l${launch.index}`, "data-strategy": name, "data-launch": launch.index },
    svg("rect", { class: "body", width: spot.width, height: spot.height, rx: 5 }),
    svg("rect", { class: `kf k-${family(launch.kind)}`, width: 6, height: spot.height, rx: 3 }),
    svg("text", { class: "name", x: 14, y: 13 }, clip(launch.name, spot.width - 18)),
    svg("text", { class: "small", x: 14, y: 25 }, `${launch.kind}${launch.repeat > 1 ? ` ×${launch.repeat}` : ""} · ${formatUs(launch.roofline)}`));
  node.dataset.words = words;
  onKey(node, () => openCard(name, launch.index));
  return node;
}

function showGraph(name) {
  const { graph, launches } = strategies.get(name);
  const view = document.getElementById("graph-view");
  if (!launches.length) { view.replaceChildren(el("p", { className: "empty", textContent: "This program launches nothing." })); return; }
  const letters = Math.max(...graph.clusters.map((cluster) => cluster.scope.length)) + (graph.clusters.some((cluster) => cluster.phase === "backward") ? 2 : 0);
  BOX.width = Math.min(BOX.most, Math.max(BOX.least, 7.4 * letters + 44));
  const isNew = view.dataset.shows !== name;
  view.dataset.shows = name;
  if (!opened.has(name)) opened.set(name, new Set(graph.clusters.length === 1 ? [0] : [])); // a single closed box shows nothing
  const plan = arrange(graph, launches, opened.get(name));
  const moved = svg("g", {},
    svg("g", {}, ...graph.clusters.map((cluster, number) => frame(cluster, plan.boxes[number]))),
    svg("g", {}, ...lines(name, graph, launches, plan)),
    svg("g", {}, ...graph.clusters.map((_, number) => clusterBox(name, graph, launches, number, plan.boxes[number]))));
  const drawing = svg("svg", { role: "group", "aria-label": `Launches of ${name}` }, moved);
  drawing.addEventListener("pointerover", (event) => hover(drawing, event.target));
  drawing.addEventListener("focusin", (event) => hover(drawing, event.target));
  drawing.addEventListener("pointerleave", () => hover(drawing, null));
  view.replaceChildren(drawing);
  const top = plan.bends[0].find((_, slot) => graph.layers[0][slot] !== null);
  setStage(moved, plan.width, plan.height, top.x);
  if (isNew) fit(ZOOM.legible);
}

/** Highlights the lines at the node under the pointer. */
function hover(drawing, target) {
  const id = target?.closest("[data-id]")?.dataset.id;
  drawing.classList.toggle("lit", Boolean(id));
  for (const line of drawing.querySelectorAll(".line")) line.classList.toggle("on", line.dataset.ends.split(" ").includes(id));
}
