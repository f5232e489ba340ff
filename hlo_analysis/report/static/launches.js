// The launch table: sorted by the reader, and the raw HLO below it.

const LAUNCH_HEADS = [
  ["#", "index", (l) => String(l.index), "n"],
  ["Launch", "name", null, "m"],
  ["Kind", "kind", (l) => l.kind, ""],
  ["Scope", "scope", (l) => scopeLabel(l.scope, l.phase), ""],
  ["Source", "source", (l) => l.source ?? "–", "m"],
  ["Times", "repeat", (l) => formatCount(l.repeat), "n"],
  ["Reads, MB", "read", (l) => megabytes(l.read), "n", "counted"],
  ["Writes, MB", "written", (l) => megabytes(l.written), "n", "counted"],
  ["Work, GFLOP", "flops", (l) => (l.flops ? (l.flops / 1e9).toFixed(l.flops >= 1e11 ? 0 : 2) : "–"), "n", "counted"],
  ["Roofline, µs", "roofline", (l) => l.roofline.toFixed(1), "n", "estimated"],
  ["Bound by", "limiter", (l) => l.limiter, ""],
  ["XLA, µs", "xla", (l) => (l.xla === null ? "–" : l.xla.toFixed(1)), "n", "estimated"],
  ["Time, µs", "measured", timeText, "n", "measured"],
  ["Grid × threads", "grid", (l) => (l.grid ? `${l.grid.filter((n, i) => !i || n > 1).join("·")} × ${l.block ? l.block.filter((n, i) => !i || n > 1).join("·") : "?"}` : "–"), "n"],
];
// A roofline that is more than 2x off is marked by how many times as long the launch takes.
function timeText({ measured, roofline }) {
  if (measured === null) return "–";
  const times = measured / roofline;
  return measured.toFixed(1) + (times > 2 || times < 0.5 ? ` (${times.toFixed(1)}×)` : "");
}
const megabytes = (count) => (!count ? "0" : count < 500 ? "<0.001" : (count / 1e6).toFixed(count >= 1e8 ? 0 : count >= 1e5 ? 1 : 3));
let order = { key: "index", down: false };

function showLaunches(name) {
  const { launches, silent } = strategies.get(name);
  const quiet = silent.reduce((sum, [, count]) => sum + count, 0);
  document.getElementById("silent").textContent = quiet
    ? `${plural(quiet, "instruction")} of the program launch${quiet === 1 ? "es" : ""} nothing: ${silent.map(([reason, count]) => `${reason} (${count})`).join(", ")}.`
    : "";
  const heads = LAUNCH_HEADS.filter(([, key]) => key !== "measured" || launches.some((l) => l.measured !== null))
    .filter(([, key]) => key !== "xla" || launches.some((l) => l.xla !== null))
    .filter(([, key]) => key !== "repeat" || launches.some((l) => l.repeat > 1));
  const sorted = [...launches].sort((a, b) => {
    const [x, y] = [a[order.key] ?? "", b[order.key] ?? ""];
    const by = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return (order.down ? -by : by) || a.index - b.index;
  });
  const head = heads.map(([label, key, , css, how]) =>
    el("th", { className: css === "n" ? "n" : "", scope: "col", "aria-sort": order.key === key ? (order.down ? "descending" : "ascending") : "none" },
      el("button", {
        type: "button", className: "sort", onclick: () => {
          order = { key, down: order.key === key ? !order.down : css === "n" && key !== "index" };
          showLaunches(name);
          document.querySelector(`#launch-table th:nth-child(${heads.findIndex((h) => h[1] === key) + 1}) button`)?.focus();
        },
      }, label, how ? el("span", { className: `how ${how}`, textContent: how }) : null)));
  const body = sorted.map((launch) => el("tr", {}, ...heads.map(([, key, text, css]) => {
    if (key === "name") return el("td", { className: css }, launchLink(name, launch.index, launch.name));
    if (key === "kind") return el("td", { className: "k-cell" }, swatch(launch.kind), launch.kind);
    return el("td", { className: css, title: key === "scope" ? launch.scope : "" }, text(launch));
  })));
  document.getElementById("launch-table").replaceChildren(el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
  showRaw(name);
}

function showRaw(name) {
  const list = document.getElementById("raw-list");
  const fill = () => list.replaceChildren(...strategies.get(name).launches.map((l) => lazyText(`#${l.index} ${l.name}`, l.hlo || "(no text)")));
  list.replaceChildren();
  const box = document.getElementById("raw");
  box.ontoggle = () => box.open && !list.childElementCount && fill();
  if (box.open) fill();
}
