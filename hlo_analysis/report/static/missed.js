// Shows missed fusions of the strategy in view by time at stake.

const FIRST_SHOWN = 8;
const total = (group, what) => group.reduce((sum, item) => sum + item[what], 0);

/** Groups missed fusions of similar layers, whose costs add up. The data has them sorted by time at stake. */
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

function missedCard(name, group, most) {
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
        source ? el("a", { className: "m", href: hashOf("source", source, name), textContent: source }) : null, " ",
        el("span", { className: "m shape", textContent: item.shape }), " ", anchorTo("missed", item.rank, name)),
      missedPath(name, item), alike,
      ...reasonOf(item), ...remedyOf(item)));
}

/** Returns the cards of the first groups. */
function missedCards(name, groups, count) {
  const most = groups.length ? total(groups[0], "time") || 1 : 1;
  return groups.slice(0, count).map((group) => missedCard(name, group, most));
}

function showMissed(name, count = FIRST_SHOWN) {
  const groups = missedGroups(name);
  const { totals, device } = strategies.get(name);
  const none = !totals.between ? `None: no value goes through ${device.memory} between launches.`
    : device.isCpu ? "None is listed for a CPU: remedies are known for GPUs. Compile for one with --target."
    : "None: values between launches are small beside the launches' other traffic, or must be written anyway.";
  const list = document.getElementById("missed-list");
  list.replaceChildren(...(groups.length ? missedCards(name, groups, count) : [el("li", { className: "empty", textContent: none })]));
  if (groups.length > count) {
    const more = el("button", { type: "button", textContent: `Show ${groups.length - count} more`, onclick: () => showMissed(name, Infinity) });
    list.append(el("li", { className: "more" }, more));
  }
}

/** Returns the card of a missed fusion in the list, showing the whole list if necessary. */
function showMissedRank(name, rank) {
  const found = () => document.querySelector(`#missed-list [data-ranks~="${rank}"]`);
  if (!found()) showMissed(name, Infinity);
  return found();
}
