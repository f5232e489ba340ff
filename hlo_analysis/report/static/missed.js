// Missed fusions of the strategy in view.

function showMissed(name) {
  const { launches, missed, totals } = strategies.get(name);
  // Of a value that no launch wrote, the first reader stands for the producer; alone, a loop's launch reads its own.
  const source = (item) => item.to.length > 1 && item.to.includes(item.from)
    ? `${item.value.startsWith("constant") ? "constant" : "argument"} ${item.value}` : launchLink(name, item.from);
  const none = totals.between
    ? "None: what goes through HBM between launches is little beside their own traffic, or must be written anyway."
    : "None: no value goes through HBM between launches.";
  const most = Math.max(...missed.map((item) => item.bytes), 1);
  const items = missed.map((item) => {
    const bar = el("span", { className: "stake" });
    bar.style.setProperty("--part", item.bytes / most);
    return el("li", {},
      el("div", { className: "cost" },
        el("strong", { textContent: formatBytes(item.bytes) }), bar,
        el("small", {}, formatUs(item.time), el("span", { className: "how estimated", textContent: "estimated" }), el("br"),
          `share ${Math.round(item.share * 100)}%`)),
      el("div", {},
        el("p", { className: "what" }, el("b", { textContent: lastScope(item.scope) || launches[item.from].source || "no scope" }), " ", el("span", { className: "m", textContent: item.shape })),
        el("p", { className: "way" }, source(item), " → ", ...item.to.flatMap((to, place) => [place ? ", " : "", launchLink(name, to)])),
        el("p", { className: "why" }, el("span", { className: "tag", textContent: "why" }), item.reason),
        el("p", { className: "remedy" }, el("span", { className: `tag ${item.remedyKind}`, textContent: item.remedyKind }), item.remedy)));
  });
  const list = document.getElementById("missed-list");
  list.replaceChildren(...(items.length ? items.slice(0, 8) : [el("li", { className: "empty", textContent: none })]));
  if (items.length > 8) {
    const more = el("button", { type: "button", textContent: `Show ${items.length - 8} more`, onclick: () => { more.parentElement.remove(); list.append(...items.slice(8)); } });
    list.append(el("li", { className: "more" }, more));
  }
}
