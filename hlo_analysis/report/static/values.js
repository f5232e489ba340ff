// Shows values that one launch writes for another to read, those of similar layers as one.

const total = (group, what) => group.reduce((sum, item) => sum + item[what], 0);

/** Groups missed fusions of similar layers, whose costs add up, the most time at stake first. */
function missedGroups(name) {
  const groups = new Map();
  for (const item of strategies.get(name).missed) groups.set(item.group, [...(groups.get(item.group) ?? []), item]);
  return [...groups.values()];
}

/** Returns links to the launches on both ends. */
function missedPath(name, item) {
  // A value that no launch wrote has its first consumer as producer. With one consumer, a launch in a loop reads its own value.
  const source = item.to.length > 1 && item.to.includes(item.from)
    ? `${item.value.startsWith("constant") ? "constant" : "argument"} ${item.value}` : launchLink(name, item.from);
  return el("p", { className: "way" }, source, " → ", ...item.to.flatMap((to, place) => [place ? ", " : "", launchLink(name, to)]));
}

function valueCard(name, group, most, hasRemedy) {
  const [item, ...others] = group;
  const time = total(group, "time");
  const bar = el("span", { className: "stake" });
  bar.style.setProperty("--part", time / most);
  const alike = others.length ? el("details", { className: "alike" }, el("summary", { textContent: `and ${formatCount(others.length)} similar` })) : null;
  alike?.addEventListener("toggle", () => {
    if (alike.open && !alike.querySelector("p")) alike.append(...others.map((other) => missedPath(name, other)));
  });
  // Instructions that XLA inserts have no source line; the consumer's is shown.
  const source = item.source ?? [item.from, ...item.to].map((at) => strategies.get(name).launches[at].source).find(Boolean);
  return el("li", { "data-ranks": group.map((each) => each.rank).join(" ") },
    el("div", { className: "cost" },
      el("strong", { textContent: formatUs(time) }), el("span", { className: "how estimated", textContent: "estimated" }), bar,
      el("small", { textContent: `${formatBytes(total(group, "bytes"))}, share ${Math.round(item.share * 100)}%` })),
    el("div", {},
      el("p", { className: "what" }, el("b", { textContent: lastScope(item.scope) || (source ? "" : "no scope") }), " ",
        sourceLink(name, source), " ",
        el("span", { className: "m shape", textContent: item.shape }), " ", anchorTo("missed", item.rank, name)),
      missedPath(name, item), alike,
      ...reasonOf(item), ...(hasRemedy ? [] : remedyOf(item))));
}

const sourceLink = (name, source) => source ? el("a", { className: "m", href: hashOf("source", source, name), textContent: source }) : null;

/** Returns a list that is made when the details around it are first opened. */
function valuesFold(name, groups, title, hasRemedy) {
  const list = el("ol", { className: "cards values" });
  const box = el("details", { className: "inside", "data-ranks": groups.flat().map((each) => each.rank).join(" ") }, el("summary", { textContent: title }), list);
  box.addEventListener("toggle", () => box.open && fillValues(name, list, groups, hasRemedy));
  box.fill = () => fillValues(name, list, groups, hasRemedy);
  return box;
}

function fillValues(name, list, groups, hasRemedy) {
  if (list.childElementCount) return;
  const most = Math.max(...groups.map((group) => total(group, "time"))) || 1;
  list.append(...groups.map((group) => valueCard(name, group, most, hasRemedy)));
}

/** Returns the card of a value, making the list that it is in if necessary. */
function showMissedRank(name, rank) {
  document.querySelector(`#advice-list .inside[data-ranks~="${rank}"]`)?.fill();
  return document.querySelector(`#advice-list li[data-ranks~="${rank}"]`);
}
