// Shows decisions by category and searches them as the reader types. A group's rows are created when it is opened.

const ROWS_AT_ONCE = 200;

function showDecisions(name) {
  const all = strategies.get(name).decisions;
  const words = document.getElementById("decision-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const which = new FormData(document.getElementById("decision-filter")).get("verdict");
  const found = all.filter((edge) =>
    (which === "all" || (which === "fused") === (edge.verdict === "fused")) &&
    (!words.length || words.every((word) => (edge.text ??= searchable(edge)).includes(word))));
  const groups = Map.groupBy ? Map.groupBy(found, (edge) => edge.category) : grouped(found);
  const bytes = (edges) => edges.reduce((sum, edge) => sum + edge.bytes, 0);
  const ranked = [...groups].map(([category, edges]) => ({ category, edges, bytes: bytes(edges) })).sort((a, b) => b.bytes - a.bytes);
  document.getElementById("decision-count").textContent = `${plural(found.length, "edge")} of ${formatCount(all.length)}`;
  document.getElementById("decision-groups").replaceChildren(
    ...ranked.map((group, place) => decisionGroup(name, group, place === 0 || words.length > 0)),
    ...(ranked.length ? [] : [el("p", { className: "empty", textContent: "No edge matches." })]));
}

function grouped(edges) {
  const groups = new Map();
  for (const edge of edges) groups.set(edge.category, [...(groups.get(edge.category) ?? []), edge]);
  return groups;
}

const searchable = (edge) =>
  [edge.producer, edge.consumer, edge.verdict, edge.reason, edge.category, edge.pass, edge.shape, edge.scope].join(" ").toLowerCase();

function decisionGroup(name, { category, edges, bytes }, open) {
  const counts = [...edges.reduce((sums, edge) => sums.set(edge.verdict, (sums.get(edge.verdict) ?? 0) + 1), new Map())];
  const box = el("details", { className: "group", open },
    el("summary", {}, el("b", { textContent: category || "no category" }),
      ...counts.map(([verdict]) => el("span", { className: `verdict ${verdict}`, textContent: verdict })),
      el("span", { className: "sum" }, `${plural(edges.length, "edge")} · ${formatBytes(bytes)}`)));
  const fill = () => {
    if (box.open && !box.querySelector("table")) box.append(decisionTable(name, [...edges].sort((a, b) => b.bytes - a.bytes)));
  };
  box.addEventListener("toggle", fill);
  fill();
  return box;
}

function decisionTable(name, edges) {
  const gains = edges.some((edge) => edge.gain !== null);
  const row = (edge) => el("tr", { "data-decision": edge.number },
    el("td", { className: "m wide" }, end(name, edge.producer, edge.from), el("span", { className: "arrow" }, " → "), end(name, edge.consumer, edge.to), " ", anchorTo("decision", edge.number, name),
      el("small", { textContent: edge.scope })),
    el("td", { className: "why wide" }, edge.reason, el("small", { textContent: edge.pass })),
    el("td", { className: "m shape", "data-label": "Shape" }, edge.shape),
    el("td", { className: "n", "data-label": "Bytes" }, edge.bytes ? formatBytes(edge.bytes) : "–"),
    gains ? el("td", { className: "n", "data-label": "Gain, µs" }, edge.gain === null ? "–" : edge.gain.toFixed(1).replace("-", "−")) : null);
  const body = el("tbody", {}, ...edges.slice(0, ROWS_AT_ONCE).map(row));
  const box = el("div", { className: "scroll" }, el("table", { className: "edges stack" },
    el("thead", {}, el("tr", {}, el("th", { textContent: "Producer → consumer" }), el("th", { textContent: "Reason" }), el("th", { textContent: "Shape" }),
      el("th", { className: "n", textContent: "Bytes" }),
      gains ? el("th", { className: "n" }, "Gain, µs ", el("span", { className: "how estimated", textContent: "estimated" })) : null)),
    body));
  if (edges.length > ROWS_AT_ONCE) {
    const more = el("button", { type: "button", textContent: `Show ${edges.length - ROWS_AT_ONCE} more`, onclick: () => { body.append(...edges.slice(ROWS_AT_ONCE).map(row)); more.remove(); } });
    box.append(more);
  }
  return box;
}

/** Returns the row of one decision, after removing filters that would hide it. */
function showDecision(name, number) {
  const edge = strategies.get(name).decisions[number];
  if (!edge) return null;
  document.getElementById("decision-search").value = `${edge.producer} ${edge.consumer}`;
  document.querySelector("#decision-filter input[value=all]").checked = true;
  showDecisions(name);
  const found = () => document.querySelector(`#decision-groups [data-decision="${number}"]`);
  for (const more of document.querySelectorAll("#decision-groups .scroll > button")) if (!found()) more.click();
  return found();
}

const end = (name, label, launch) => (launch === null ? label : launchLink(name, launch, label));
