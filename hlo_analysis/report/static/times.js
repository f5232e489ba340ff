// Shows where the time goes: launches by time, in groups that the reader chooses, with bars and shares.

const GROUPS_SHOWN = 12;
const TIME_GROUPS = {
  scope: (l) => `${(l.scope || l.source || "no scope").replace(/(^|[/_])\d+(?=\/|$)/g, "$1*")}${l.phase === "backward" ? " ↩" : ""}`,
  layer: (l) => /^(.*?(?:^|[/_])\d+)(?=\/|$)/.exec(l.scope)?.[1] ?? (l.scope.split("/")[0] || l.source || "no scope"),
  pass: (l) => l.phase,
  kind: (l) => l.kind,
  source: (l) => l.source ?? "no source line",
};

function showTimes(name, count = GROUPS_SHOWN) {
  const { launches, whole, lines } = strategies.get(name);
  const by = document.getElementById("times-by").value;
  const groups = new Map();
  for (const launch of launches) groups.set(TIME_GROUPS[by](launch), [...(groups.get(TIME_GROUPS[by](launch)) ?? []), launch]);
  const sum = (found) => found.reduce((time, launch) => time + launch.run, 0);
  const rows = [...groups].map(([key, found]) => ({ key, found, time: sum(found) })).sort((a, b) => b.time - a.time);
  const passes = ["forward", "backward"].map((phase) => [phase, sum(launches.filter((launch) => launch.phase === phase))]).filter(([, time]) => time);
  const how = launches.some((launch) => launch.measured !== null) ? "measured" : "estimated";
  document.getElementById("times-sum").replaceChildren(
    `${formatUs(whole)} `, el("span", { className: `how ${how}`, textContent: how }), passes.length > 1 ? ` ${passes.map(([phase, time]) => `${phase} ${shareText(time / whole)}`).join(", ")}` : "");
  document.getElementById("times-list").replaceChildren(
    ...rows.slice(0, count).map((row) => timeRow(name, row, rows[0].time, whole, by === "source" ? lines.get(row.key) : null)),
    ...(rows.length > count ? [el("button", { type: "button", textContent: `Show ${rows.length - count} more`, onclick: () => showTimes(name, Infinity) })] : []));
}

function timeRow(name, { key, found, time }, most, whole, text) {
  const bar = el("span", { className: "kinds" });
  bar.style.width = `${(100 * time) / most}%`;
  const kinds = new Map();
  for (const launch of found) kinds.set(launch.kind, (kinds.get(launch.kind) ?? 0) + launch.run);
  for (const [kind, part] of [...kinds].sort((a, b) => b[1] - a[1])) {
    const piece = el("i", { className: `k k-${family(kind)}`, title: `${kind}: ${formatUs(part)}` });
    piece.style.flexGrow = Math.max(part, time / 1000);
    bar.append(piece);
  }
  const places = new Set(found.map((launch) => launch.scope)).size;
  const inner = el("div", { className: "inner" });
  const row = el("details", { className: "time", "data-group": key },
    el("summary", {},
      el("span", { className: "who" }, el("b", { textContent: key }), places > 1 && key.includes("*") ? el("small", { textContent: `×${places}` }) : null, text ? el("code", { className: "m", textContent: text }) : null),
      el("span", { className: "track" }, bar),
      el("span", { className: "n", textContent: formatUs(time) }), el("span", { className: "n share", textContent: shareText(time / whole) }),
      el("span", { className: "n soft", textContent: plural(found.reduce((sum, launch) => sum + launch.repeat, 0), "launch") })),
    inner);
  row.addEventListener("toggle", () => {
    if (!row.open || inner.childElementCount) return;
    inner.append(el("ol", {}, ...[...found].sort((a, b) => b.run - a.run).map((launch) =>
      el("li", {}, el("span", { className: "n", textContent: formatUs(launch.run) }), el("span", { className: "n share", textContent: shareText(launch.run / whole) }),
        swatch(launch.kind), launchLink(name, launch.index)))));
  });
  return row;
}

document.getElementById("times-by")?.addEventListener("change", () => showTimes(focus.value));
