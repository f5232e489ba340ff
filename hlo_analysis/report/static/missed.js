// Missed fusions of the strategy in view.

function showMissed(name) {
  const { launches, missed, totals } = strategies.get(name);
  // A value that no launch wrote has its first consumer as producer; with one consumer, a loop's launch reads its own value.
  const source = (item) => item.to.length > 1 && item.to.includes(item.from)
    ? `${item.value.startsWith("constant") ? "constant" : "argument"} ${item.value}` : launchLink(name, item.from);
  const none = totals.between
    ? "None: values between launches are small beside the launches' other traffic, or must be written anyway."
    : "None: no value goes through HBM between launches.";
  // Similar layers are one entry, named by the first; their costs add up.
  const groups = [...missed.reduce((found, item) => found.set(item.group, [...(found.get(item.group) ?? []), item]), new Map()).values()];
  const sum = (group, what) => group.reduce((total, item) => total + item[what], 0);
  const most = groups.reduce((largest, group) => Math.max(largest, sum(group, "bytes")), 1);
  const path = (item) => [source(item), " → ", ...item.to.flatMap((to, place) => [place ? ", " : "", launchLink(name, to)])];
  // Instructions that XLA inserts have no source line; their consumer's is shown.
  const place = (item) => lastScope(item.scope) || [item.from, ...item.to].map((at) => launches[at].source).find(Boolean) || "no scope";
  const others = (group) => {
    if (group.length < 2) return null;
    const box = el("details", { className: "alike" }, el("summary", { textContent: `and ${formatCount(group.length - 1)} similar` }));
    box.addEventListener("toggle", () => {
      if (box.open && !box.querySelector("p")) box.append(...group.slice(1).map((item) => el("p", { className: "way" }, ...path(item))));
    });
    return box;
  };
  const items = groups.map((group) => {
    const item = group[0];
    const bytes = sum(group, "bytes");
    const bar = el("span", { className: "stake" });
    bar.style.setProperty("--part", bytes / most);
    return el("li", {},
      el("div", { className: "cost" },
        el("strong", { textContent: formatBytes(bytes) }), bar,
        el("small", {}, formatUs(sum(group, "time")), el("span", { className: "how estimated", textContent: "estimated" }), el("br"),
          `share ${Math.round(item.share * 100)}%`)),
      el("div", {},
        el("p", { className: "what" }, el("b", { textContent: place(item) }), " ", el("span", { className: "m", textContent: item.shape })),
        el("p", { className: "way" }, ...path(item)), others(group),
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
