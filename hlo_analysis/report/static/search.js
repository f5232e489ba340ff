// Searches remedies, values, launches, scopes, source lines and decisions of all strategies. Each result is a link.

const FINDS_OF_A_KIND = 6;
const searchField = document.getElementById("search");
const foundBox = document.getElementById("found");
let searchIndex = null;

/** Returns all items that can be found, those of the strategy in view first: {kind, label, detail, text, hash}. */
function makeSearchIndex() {
  const made = [];
  const add = (kind, name, id, label, detail, ...more) => made.push({
    kind, label, detail: name === homeName || !name ? detail : `${name} · ${detail}`, hash: hashOf(kind, id, name ?? homeName),
    text: [label, detail, name, ...more].join(" ").toLowerCase(), more: more.filter(Boolean).join(" · "),
  });
  document.querySelectorAll("table.scopes tbody tr[data-scope]").forEach((row, place) =>
    row.dataset.scope && add("scope", null, place, row.dataset.scope, row.dataset.phase));
  for (const name of [...strategies.keys()].sort((a, b) => (b === focus.value) - (a === focus.value))) {
    const { launches, decisions, missed, lines } = strategies.get(name);
    for (const item of adviceOf(name)) add("hotspot", name, item.places[0], `${titleOf(item)} ${item.first.source ?? ""}`, formatUs(item.saved), item.first.cause, item.first.remedy, item.first.scope, lines.get(item.first.source));
    for (const item of missed) add("missed", name, item.rank, `${lastScope(item.scope) || item.value} ${item.shape}`, formatUs(item.time), item.value, item.remedy, item.reason, item.source);
    for (const each of launches) add("launch", name, each.index, `#${each.index} ${each.name}`, each.kind, each.kernel, each.scope, each.source, each.opName);
    for (const [source, count] of countBy(launches, (each) => each.source)) if (source) add("source", name, source, source, plural(count, "launch"), lines.get(source));
    decisions.forEach((edge, place) => add("decision", name, place, `${edge.producer} → ${edge.consumer}`, edge.verdict, searchable(edge)));
  }
  return made;
}

function countBy(rows, key) {
  const counts = new Map();
  for (const row of rows) counts.set(key(row), (counts.get(key(row)) ?? 0) + 1);
  return counts;
}

const KIND_NAMES = { hotspot: "Remedies", missed: "Values between launches", launch: "Launches", scope: "Scopes", source: "Source lines", decision: "Decisions" };

function search() {
  const words = searchField.value.toLowerCase().split(/\s+/).filter(Boolean);
  foundBox.hidden = !words.length;
  if (!words.length) return;
  searchIndex ??= makeSearchIndex();
  const hits = searchIndex.filter((each) => words.every((word) => each.text.includes(word)));
  const groups = Object.keys(KIND_NAMES).map((kind) => [kind, hits.filter((each) => each.kind === kind)]).filter(([, found]) => found.length);
  foundBox.replaceChildren(...groups.flatMap(([kind, found]) => [
    el("p", { className: "kind" }, el("b", { textContent: KIND_NAMES[kind] }), el("span", { textContent: formatCount(found.length) })),
    ...found.slice(0, FINDS_OF_A_KIND).map((each) => el("a", { href: each.hash }, el("span", {}, each.label, matchOf(each, words)), el("small", { textContent: each.detail }))),
  ]), ...(groups.length ? [] : [el("p", { className: "empty", textContent: "Nothing found." })]));
  foundBox.scrollTop = 0;
}

/** Returns the text around the first word that was found in what a result does not show itself. */
function matchOf({ label, detail, more }, words) {
  const shown = `${label} ${detail}`.toLowerCase();
  const word = words.find((each) => !shown.includes(each) && more.toLowerCase().includes(each));
  if (!word) return null;
  const at = more.toLowerCase().indexOf(word);
  const [start, end] = [Math.max(0, at - 24), at + word.length + 36];
  return el("small", { className: "match" }, start ? "…" : "", more.slice(start, at), el("mark", { textContent: more.slice(at, at + word.length) }), more.slice(at + word.length, end), end < more.length ? "…" : "");
}

function closeSearch() {
  foundBox.hidden = true;
}

searchField.addEventListener("input", search);
searchField.addEventListener("focus", search);
document.querySelector(".find").addEventListener("keydown", (event) => {
  const links = [...foundBox.querySelectorAll("a")];
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") { closeSearch(); searchField.focus(); closeSearch(); }
  else if (step && links.length) {
    const next = links.indexOf(document.activeElement) + step;
    (next < 0 ? searchField : links[Math.min(next, links.length - 1)]).focus();
    if (next < 0) search();
  } else if (event.key === "Enter" && event.target === searchField) links[0]?.click();
  else return;
  event.preventDefault();
});
document.addEventListener("click", (event) => {
  if (!event.target.closest(".find") || event.target.closest("#found a")) closeSearch();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input, textarea, select") || card.open) return;
  event.preventDefault();
  searchField.focus();
});
