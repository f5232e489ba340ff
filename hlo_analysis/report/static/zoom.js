// Moves and scales the graph in its frame: buttons, drag, Ctrl and the wheel, keys.

const ZOOM = { least: 0.03, most: 3, step: 1.3, legible: 0.6 };
const graphView = document.getElementById("graph-view");
const place = { x: 0, y: 0, scale: 1 };
let stage = null; // the drawing's group, which moves, and its size
let dragged = null;

/** `start` is the horizontal middle of the topmost box. */
function setStage(group, width, height, start) {
  stage = { group, width, height, start };
  graphView.style.height = `${Math.max(160, Math.min(0.76 * innerHeight, height + 24))}px`;
  placeStage();
}

const placeStage = () => stage?.group.setAttribute("transform", `translate(${place.x.toFixed(1)},${place.y.toFixed(1)}) scale(${place.scale.toFixed(4)})`);

function zoomBy(factor, x = graphView.clientWidth / 2, y = graphView.clientHeight / 2) {
  const scale = Math.min(ZOOM.most, Math.max(ZOOM.least, place.scale * factor));
  const by = scale / place.scale;
  Object.assign(place, { x: x - (x - place.x) * by, y: y - (y - place.y) * by, scale });
  placeStage();
}

function panBy(x, y) {
  place.x += x;
  place.y += y;
  placeStage();
}

/** Fits the whole drawing into the frame, or only its top if the scale would be below `least`. */
function fit(least = ZOOM.least) {
  if (!stage) return;
  const [width, height] = [graphView.clientWidth, graphView.clientHeight];
  const scale = Math.min(1, Math.max(least, Math.min(width / stage.width, height / stage.height)));
  const middle = stage.width * scale > width ? stage.start : stage.width / 2;
  Object.assign(place, { x: width / 2 - middle * scale, y: Math.max(0, (height - stage.height * scale) / 2), scale });
  placeStage();
}

/** Moves the drawing so that one of its elements is inside the frame. */
function bringIn(node) {
  const [frame, box] = [graphView.getBoundingClientRect(), node.getBoundingClientRect()];
  const shift = (low, high, least, most) => (low < least ? least - low + 12 : high > most ? Math.max(most - high - 12, least - low + 12) : 0);
  panBy(shift(box.left, box.right, frame.left, frame.right), shift(box.top, box.bottom, frame.top, frame.bottom));
}

graphView.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
  event.preventDefault();
  const frame = graphView.getBoundingClientRect();
  zoomBy(Math.exp(-event.deltaY / 300), event.clientX - frame.left, event.clientY - frame.top);
}, { passive: false });
graphView.addEventListener("pointerdown", (event) => {
  if (event.button === 0) dragged = { x: event.clientX, y: event.clientY, far: false };
});
graphView.addEventListener("pointermove", (event) => {
  if (!dragged) return;
  const [x, y] = [event.clientX - dragged.x, event.clientY - dragged.y];
  if (!dragged.far && Math.hypot(x, y) < 5) return;
  if (!dragged.far) graphView.setPointerCapture(event.pointerId);
  dragged = { x: event.clientX, y: event.clientY, far: true };
  panBy(x, y);
});
for (const kind of ["pointerup", "pointercancel"]) {
  graphView.addEventListener(kind, () => {
    // The click that ends a drag comes before the timer, and opens nothing.
    if (dragged?.far) setTimeout(() => { dragged = null; });
    else dragged = null;
  });
}
graphView.addEventListener("click", (event) => {
  if (!dragged?.far) return;
  event.stopPropagation();
}, true);
graphView.addEventListener("focusin", (event) => event.target !== graphView && event.target.matches(":focus-visible") && bringIn(event.target));
graphView.addEventListener("keydown", (event) => {
  const act = {
    "+": () => zoomBy(ZOOM.step), "=": () => zoomBy(ZOOM.step), "-": () => zoomBy(1 / ZOOM.step), 0: () => fit(),
    ArrowLeft: () => panBy(60, 0), ArrowRight: () => panBy(-60, 0), ArrowUp: () => panBy(0, 60), ArrowDown: () => panBy(0, -60),
  }[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
});
document.getElementById("zoom-in").addEventListener("click", () => zoomBy(ZOOM.step));
document.getElementById("zoom-out").addEventListener("click", () => zoomBy(1 / ZOOM.step));
document.getElementById("fit").addEventListener("click", () => fit());
