// Decodes the comparison, formats numbers, and creates elements in a way that cannot inject markup.

if (!("DecompressionStream" in globalThis)) {
  const old = "This browser cannot unpack the page's data: graph, decisions and launches need Chrome 80, Firefox 113 or Safari 16.4.";
  document.querySelector("main").prepend(el("p", { className: "noscript", textContent: old }));
}
/** Returns the JSON in an element, which holds it compressed (gzip) in base64. */
async function unpack(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (byte) => byte.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
const data = await unpack("data");

/** Converts the rows of a {columns, pooled, rows} table to objects, with pooled numbers replaced by their texts. */
function decode(table) {
  const pooled = new Set(table.pooled);
  return table.rows.map((row) => {
    const made = {};
    table.columns.forEach((name, place) => {
      const value = row[place];
      made[name] = pooled.has(name) && value !== null ? data.texts[value] : value;
    });
    return made;
  });
}

const strategies = new Map();
for (const raw of data.strategies) {
  if (!raw.launches) continue;
  let launches;
  let decisions;
  strategies.set(raw.name, {
    ...raw,
    get launches() {
      return (launches ??= decode(raw.launches).map((launch) => ({ ...launch, run: (launch.measured ?? launch.estimate) * launch.repeat })));
    },
    /** The time of all launches of one run, measured where known. */
    get whole() {
      return this.launches.reduce((sum, launch) => sum + launch.run, 0) || 1;
    },
    get decisions() {
      return (decisions ??= decode(raw.decisions).map((edge, number) => ({ ...edge, number })));
    },
    missed: decode(raw.missed),
    hotspots: decode(raw.hotspots),
    lines: new Map(raw.lines),
  });
}

const family = (kind) => data.families[kind] ?? "other";

/** Creates an element. `props` are properties (className, ...), `data-` and `aria-` attributes, or listeners (onclick). */
function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.includes("-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function scaled(value, steps, digits) {
  for (const [unit, size] of steps) {
    if (Math.abs(value) >= size) {
      const shown = value / size;
      return `${shown.toFixed(Math.abs(shown) >= 100 ? 0 : digits)} ${unit}`;
    }
  }
  return null;
}
const formatBytes = (count) =>
  scaled(count, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]], 1) ?? `${Math.round(count)} B`;
const formatFlops = (count) =>
  count ? (scaled(count, [["PFLOP", 1e15], ["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6], ["kFLOP", 1e3]], 1) ?? `${count} FLOP`) : "–";
const formatUs = (time) =>
  scaled(time, [["s", 1e6], ["ms", 1e3]], 2) ?? `${Math.abs(time) >= 10 ? Math.round(time) : time.toFixed(1)} µs`;
const formatCount = (count) => count.toLocaleString("en-US");

/** Formats the change from `base` to `value`: '−12%', '+3%', '=' or ''. */
function formatChange(value, base) {
  if (value === base) return "=";
  if (!base) return "";
  const percent = (value / base - 1) * 100;
  const text = Math.abs(percent).toFixed(Math.abs(percent) >= 10 ? 0 : 1);
  return Number(text) === 0 ? "≈" : `${percent < 0 ? "−" : "+"}${text}%`;
}

const shareText = (part) => `${(100 * part).toFixed(part >= 0.0995 ? 0 : 1)} %`;
const plural = (count, word) => `${formatCount(count)} ${word}${count === 1 ? "" : /(ch|s|sh)$/.test(word) ? "es" : "s"}`;
/** Returns the last part of a scope, or more as long as it has no letter: 'layers/3', 'scope 3'. */
function lastScope(scope, least = 1) {
  const parts = scope.split("/");
  let named = parts.length - 1;
  while (named >= 0 && !/\p{L}/u.test(parts[named])) named -= 1;
  return named < 0 ? scope && `scope ${scope}` : parts.slice(Math.min(named, parts.length - least)).join("/");
}
const scopeLabel = (scope, phase, parts = 1) => (lastScope(scope, parts) || "no scope") + (phase === "backward" ? " · backward" : "");
/** Lets a line break after each underscore of the text. */
const breakable = (text) => text.split(/(?<=_)/).flatMap((part, place) => (place ? [document.createElement("wbr"), part] : [part]));
const swatch = (kind) => el("i", { className: `k k-${family(kind)}` });
