// Missed fusions of the strategy in view.

function showMissed(name) {
  const { missed } = strategies.get(name);
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
        el("p", { className: "what" }, el("b", { textContent: lastScope(item.scope) || "no scope" }), " ", el("span", { className: "m", textContent: item.shape })),
        el("p", { className: "way" }, launchLink(name, item.from), " → ", ...item.to.flatMap((to, place) => [place ? ", " : "", launchLink(name, to)])),
        el("p", { className: "why" }, el("span", { className: "tag", textContent: "why" }), item.reason),
        el("p", { className: "remedy" }, el("span", { className: `tag ${item.remedyKind}`, textContent: item.remedyKind }), item.remedy)));
  });
  const list = document.getElementById("missed-list");
  list.replaceChildren(...(items.length ? items.slice(0, 8) : [el("li", { className: "empty", textContent: "None: no value goes through HBM between launches." })]));
  if (items.length > 8) {
    const more = el("button", { type: "button", textContent: `Show ${items.length - 8} more`, onclick: () => { more.parentElement.remove(); list.append(...items.slice(8)); } });
    list.append(el("li", { className: "more" }, more));
  }
}
