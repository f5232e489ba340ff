// Shows what to do: a card a remedy, with what it saves, where, and the call; why, launches and values are folded.

const ADVICE_SHOWN = 8;
const LINKS_SHOWN = 4;

/** Returns links to launches, the longest first; all but the first few are folded. */
function launchLinks(name, indices) {
  const { launches } = strategies.get(name);
  const links = [...indices].sort((a, b) => launches[b].run - launches[a].run).map((index) => launchLink(name, index));
  const listed = (part) => part.flatMap((link, place) => (place ? [", ", link] : [link]));
  const rest = links.slice(LINKS_SHOWN);
  return [
    el("p", { className: "way" }, ...listed(links.slice(0, LINKS_SHOWN))),
    rest.length ? el("details", {}, el("summary", { textContent: `and ${plural(rest.length, "more launch")}` }), el("p", { className: "way" }, ...listed(rest))) : null];
}

/** Returns the left column: what the remedy saves, or the time above need, with its share of the program's time. */
function costOf(item, whole, most) {
  const { first, trial } = item;
  if (first.waits) return el("div", { className: "cost" }, el("strong", { textContent: "?" }), el("small", { textContent: "a wait that nothing here estimates" }));
  const bar = el("span", { className: "stake" });
  bar.style.setProperty("--part", item.saved / most);
  const saved = trial?.helps;
  const less = (value, text) => (value ? `${value > 0 ? "−" : "+"}${text(Math.abs(value))}` : null);
  return el("div", { className: "cost" },
    el("strong", { textContent: `${saved ? "−" : ""}${formatUs(item.saved)}` }), el("span", { className: `how ${saved ? "estimated" : first.how}`, textContent: saved ? "estimated" : first.how }), bar,
    el("small", { textContent: saved ? `${shareText(item.saved / whole)} of the time` : `${shareText(item.saved / whole)} of the time, above need` }),
    saved ? el("small", { textContent: [less(trial.bytes, formatBytes), less(trial.launches, (count) => plural(count, "launch"))].filter(Boolean).join(", ") }) : null,
    item.worst ? el("small", { textContent: `${formatUs(item.worst)} at worst` }) : null);
}

const TITLES = { option: "Set an option of XLA", rewrite: "Change the code", kernel: "Write a kernel" };

/** Returns what a remedy is called: its kernel, else its kind; without one, what the time is. */
const titleOf = ({ first }) => first.kernel || TITLES[first.remedyKind] || lastScope(first.scope) || "No remedy is known";

function adviceCard(name, item, whole, most, groups) {
  const { first } = item;
  const { lines } = strategies.get(name);
  const [cause, ...rest] = first.cause.split(/(?<=\.) /);
  const others = [...new Map(item.hotspots.slice(1).map((each) => [each.source ?? each.scope, each])).values()].filter((each) => each.source !== first.source);
  const folded = [el("p", { className: "why" }, rest.join(" "))];
  for (const each of item.hotspots.slice(1)) folded.push(el("p", { className: "why" }, sourceLink(name, each.source), " ", each.cause));
  const launches = plural(item.launches.reduce((sum, index) => sum + strategies.get(name).launches[index].repeat, 0), "launch");
  return el("li", { "data-places": item.places.join(" "), className: item.isOpen ? "" : "aside" },
    costOf(item, whole, most),
    el("div", {},
      el("p", { className: "what" }, el("b", { textContent: titleOf(item) }), " ", sourceLink(name, first.source), " ",
        ...others.flatMap((each) => [sourceLink(name, each.source), " "]),
        el("span", { className: "soft", textContent: [first.scope, item.layers].filter(Boolean).join(" · ") }), " ", anchorTo("hotspot", item.places[0], name)),
      lines.get(first.source) ? el("code", { className: "m line", textContent: lines.get(first.source) }) : null,
      el("p", { className: "why" }, cause),
      ...(first.remedy ? callOf(first) : []),
      el("details", { className: "inside words" }, el("summary", { textContent: `Why, and the ${launches}` }), ...folded, ...launchLinks(name, item.launches)),
      groups.length ? valuesFold(name, groups, `${plural(groups.flat().length, "value")} between launches, and XLA's reason`, true) : null));
}

/** Returns what to write, and whether it was tried; the card's left column has the effect. */
function callOf({ kernel, remedy, code, trial }) {
  if (isInVain({ trial })) return remedyOf({ trial });
  return [
    el("p", { className: "remedy" }, kernel ? remedy.replace(`${kernel}: `, "") : remedy),
    code ? codeBox(code) : null,
    trial?.helps ? el("p", { className: "effect" }, el("b", { textContent: "Verified" }), ` by compiling again with ${trial.change}`) : trial ? effectOf(trial) : null];
}

/** Returns the remedies of a strategy, each with its hotspots. */
function adviceOf(name) {
  const { hotspots, advice } = strategies.get(name);
  return advice.map(({ places, launches, layers, saved, isOpen }) => {
    const found = places.map((place) => hotspots[place]);
    return { places, launches, layers, saved, isOpen, hotspots: found, first: found[0], trial: found[0].trial, worst: total(found, "most") };
  });
}

function showAdvice(name, count = ADVICE_SHOWN) {
  const { whole, totals, device } = strategies.get(name);
  const all = adviceOf(name);
  const most = Math.max(...all.map((item) => item.saved)) || 1;
  let left = missedGroups(name);
  const cards = all.map((item) => {
    const ranks = new Set(item.hotspots.flatMap((each) => each.missed));
    const groups = left.filter((group) => group.some((each) => ranks.has(each.rank)));
    left = left.filter((group) => !groups.includes(group));
    return adviceCard(name, item, whole, most, groups);
  });
  const none = device.isCpu ? "None is known for a CPU: compile for a GPU with --target."
    : totals.between ? "None is known: each launch is near what it needs." : `None is known: no value goes through ${device.memory} between launches.`;
  const list = document.getElementById("advice-list");
  list.replaceChildren(...(cards.length ? cards.slice(0, count) : [el("li", { className: "empty", textContent: none })]));
  if (cards.length > count) list.append(el("li", { className: "more" }, el("button", { type: "button", textContent: `Show ${cards.length - count} more`, onclick: () => showAdvice(name, Infinity) })));
  if (left.length) list.append(el("li", { className: "more" }, valuesFold(name, left, `${plural(left.flat().length, "value")} more between launches, each with little at stake`, false)));
}

/** Returns the card of a hotspot's remedy, showing the whole list if necessary. */
function showHotspotPlace(name, place) {
  const found = () => document.querySelector(`#advice-list [data-places~="${place}"]`);
  if (!found()) showAdvice(name, Infinity);
  return found();
}
