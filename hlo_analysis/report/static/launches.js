// Shows the launch table, which the reader filters and sorts, and the raw HLO below it.

const dims = (all) => all.filter((count, place) => !place || count > 1).join("·");
const known = (value, text) => (value === null ? "–" : text(value));

// Columns of one or more parts: [label, key, text, counted/estimated/measured]. The first part is the cell's main line.
const LAUNCH_COLUMNS = [
  [["#", "index", (l) => String(l.index)]],
  [["Launch", "name", (l, name) => launchLink(name, l.index, l.name)], ["Kind", "kind", (l) => el("span", {}, swatch(l.kind), ` ${l.kind}`)],
    ["Times", "repeat", (l) => (l.repeat > 1 ? `${formatCount(l.repeat)} times` : "")]],
  [["Scope", "scope", (l) => scopeLabel(l.scope, l.phase)], ["Source", "source", (l) => l.source ?? "–"]],
  [["Reads, MB", "read", (l) => megabytes(l.read), "counted"], ["Writes, MB", "written", (l) => megabytes(l.written), "counted"]],
  [["Work, GFLOP", "flops", (l) => (l.flops ? (l.flops / 1e9).toFixed(l.flops >= 1e11 ? 0 : 2) : "–"), "counted"]],
  [["Roofline, µs", "roofline", (l) => l.roofline.toFixed(1), "estimated"], ["Bound by", "limiter", (l) => l.limiter]],
  [["Share", "run", (l, name) => shareText(l.run / strategies.get(name).whole)]],
  [["Estimate, µs", "estimate", (l) => l.estimate.toFixed(1), "estimated"]],
  [["Time, µs", "measured", timeText, "measured"]],
  [["Registers", "registers", (l) => known(l.registers, String)], ["Spills, B", "spill", (l) => known(l.spill, formatCount)]],
  [["Shared, kB", "shared", (l) => known(l.shared, (count) => (count / 1024).toFixed(count % 1024 ? 1 : 0))]],
  [["Occupancy", "occupancy", (l) => known(l.occupancy, percentText)], ["Limited by", "occupancyLimiter", (l) => l.occupancyLimiter ?? "–"]],
  [["Grid", "grid", (l) => known(l.grid, dims)], ["Threads", "block", (l) => known(l.block, dims)]],
];
// Parts that are left out if no launch has a value for them.
const OPTIONAL = new Set(["measured", "scope", "registers", "spill", "shared", "occupancy", "occupancyLimiter", "repeat", "grid", "block"]);
const TEXTS = new Set(["name", "kind", "scope", "source", "repeat"]);

// If the estimate is more than 2x off, the ratio of measured to estimated time is shown.
function timeText({ measured, estimate }) {
  if (measured === null) return "–";
  const times = measured / estimate;
  return measured.toFixed(1) + (times > 2 || times < 0.5 ? ` (${times.toFixed(1)}×)` : "");
}
const percentText = (share) => `${Math.round(share * 100)}%`;
const megabytes = (count) => (!count ? "0" : count < 500 ? "<0.001" : (count / 1e6).toFixed(count >= 1e8 ? 0 : count >= 1e5 ? 1 : 3));
let order = { key: "run", down: true };

function launchColumns(launches) {
  const isKnown = ([, key]) => !OPTIONAL.has(key) || launches.some((l) => l[key] !== null && l[key] !== "" && !(key === "repeat" && l.repeat === 1));
  return LAUNCH_COLUMNS.map((parts) => parts.filter(isKnown)).filter((parts) => parts.length);
}

function sortedLaunches(launches) {
  return [...launches].sort((a, b) => {
    const [x, y] = [a[order.key] ?? "", b[order.key] ?? ""];
    const by = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return (order.down ? -by : by) || a.index - b.index;
  });
}

function sortButton(name, [label, key, , how]) {
  return el("button", {
    type: "button", className: `sort ${order.key === key ? (order.down ? "down" : "up") : ""}`, "data-sort": key, onclick: () => {
      order = { key, down: order.key === key ? !order.down : !TEXTS.has(key) && key !== "index" };
      showLaunches(name);
      document.querySelector(`#launch-table [data-sort="${key}"]`)?.focus();
    },
  }, label, how ? el("span", { className: `how ${how}`, textContent: how }) : null);
}

function showLaunches(name) {
  const { launches, silent } = strategies.get(name);
  const quiet = silent.reduce((sum, [, count]) => sum + count, 0);
  document.getElementById("silent").textContent = quiet
    ? `${plural(quiet, "instruction")} of the program launch${quiet === 1 ? "es" : ""} nothing: ${silent.map(([reason, count]) => `${reason} (${count})`).join(", ")}.`
    : "";
  const words = document.getElementById("launch-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = sortedLaunches(launches).filter((l) => {
    const text = [l.name, l.kind, l.kernel, l.scope, l.phase, l.source].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  document.getElementById("launch-count").textContent = words.length ? `${shown.length} of ${plural(launches.length, "launch")}` : plural(launches.length, "launch");
  const columns = launchColumns(launches);
  const css = (parts) => (TEXTS.has(parts[0][1]) ? (parts[0][1] === "name" ? "m wide" : "where") : "n");
  const heads = columns.map((parts) => {
    const sorts = parts.some(([, key]) => key === order.key);
    return el("th", { className: css(parts), scope: "col", "aria-sort": sorts ? (order.down ? "descending" : "ascending") : "none" },
      ...parts.map((part) => sortButton(name, part)));
  });
  const rows = shown.map((launch) => el("tr", { "data-row": launch.index }, ...columns.map((parts) =>
    el("td", { className: css(parts), "data-label": parts.map(([label]) => label).join(" · "), title: parts[0][1] === "scope" ? launch.scope : undefined },
      ...parts.map(([, , text], place) => el(place ? "small" : "span", {}, text(launch, name)))))));
  document.getElementById("launch-table").replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
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
