// Shows the card of one launch, with everything known about it.

const card = document.getElementById("card");

function fact(name, value, how) {
  if (value === null || value === undefined || value === "") return null;
  return el("div", {}, el("dt", {}, name, how ? el("span", { className: `how ${how}`, textContent: how }) : null), el("dd", {}, value));
}

function valueTable(values, heading, strategy, column) {
  if (!values.length) return null;
  const rows = values.map(([name, shape, bytes, producer]) =>
    el("tr", {},
      el("td", { className: "m name" }, producer !== null && column ? launchLink(strategy, producer, name) : name),
      el("td", { className: "m shape" }, shape),
      el("td", { className: "n" }, formatBytes(bytes)),
      column ? el("td", {}, producer === null ? "argument or constant" : `#${producer}`) : null));
  return el("div", {}, el("h3", { textContent: heading }),
    el("div", { className: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", { textContent: "Value" }), el("th", { textContent: "Shape" }),
        el("th", { className: "n", textContent: "Bytes" }), column ? el("th", { textContent: "From" }) : null)),
      el("tbody", {}, ...rows))));
}

/** Returns a button that opens a launch's card. */
function launchLink(strategy, index, label) {
  const launch = strategies.get(strategy).launches[index];
  return el("button", {
    type: "button", className: "link", "data-strategy": strategy, "data-launch": index,
    title: launch.name,
  }, ...breakable(label ?? `#${index} ${launch.name}`));
}

function edgesOf(strategy, index) {
  const touching = strategies.get(strategy).decisions.filter(
    (edge) => edge.verdict !== "fused" && (edge.from === index || edge.to === index));
  if (!touching.length) return null;
  return el("div", {}, el("h3", { textContent: "Why it is not fused" }),
    el("ul", { className: "edges" }, ...touching.slice(0, 12).map((edge) =>
      el("li", {}, el("a", { className: "m", href: hashOf("decision", edge.number, strategy) }, `${edge.producer} → ${edge.consumer}`), " ",
        el("span", { className: `verdict ${edge.verdict}`, textContent: edge.verdict }), el("br"), edge.reason))));
}

/** Returns the missed fusions at a launch, with their remedies. */
function missedAt(strategy, index) {
  const touching = strategies.get(strategy).missed.filter((item) => item.from === index || item.to.includes(index)).sort((a, b) => b.time - a.time);
  if (!touching.length) return null;
  return el("div", { className: "cards" }, el("h3", { textContent: "Missed fusions" }), ...touching.slice(0, 6).map((item) =>
    el("div", { className: "touching" },
      el("p", { className: "what" }, el("b", { textContent: formatUs(item.time) }), " ", el("span", { className: "how estimated", textContent: "estimated" }), ` ${formatBytes(item.bytes)} `,
        el("span", { className: "m shape", textContent: item.shape }), " ", anchorTo("missed", item.rank, strategy)),
      missedPath(strategy, item), ...reasonOf(item), ...remedyOf(item))));
}

/** Returns a details element that gets its text, or what the text is a promise of, when it is first opened. */
function lazyText(title, text) {
  const box = el("details", { className: "hlo" }, el("summary", { textContent: title }));
  box.addEventListener("toggle", async () => {
    if (!box.open || box.querySelector("pre")) return;
    const code = el("code");
    box.append(el("pre", { tabIndex: 0 }, code));
    code.textContent = typeof text === "function" ? await text() : text;
  });
  return box;
}

let ptxTexts; // a promise: unpacked once, for the first reader who asks

function ptxOf(strategy, launch) {
  if (launch.ptx === null) return null;
  if (launch.ptx < 0) {
    return lazyText("PTX", `Left out to keep this page small; to print it:\nxlafuse explain ${launch.index} --ptx --capture report.json:${strategy}`);
  }
  return lazyText("PTX", async () => (await (ptxTexts ??= unpack("ptx")))[launch.ptx]);
}

function openCard(strategy, index) {
  const launch = strategies.get(strategy).launches[index];
  const moved = launch.read + launch.written;
  const size = (dims) => (dims ? dims.join(" × ") : null);
  card.replaceChildren(
    el("header", {},
      el("div", {}, el("p", { className: "over" }, `${strategy} · launch #${index} `, anchorTo("launch", index, strategy)),
        el("h2", { id: "card-title" }, swatch(launch.kind), el("span", {}, ...breakable(launch.name)))),
      el("button", { type: "button", className: "close", "aria-label": "Close", textContent: "×", onclick: () => card.close() })),
    el("dl", { className: "facts" },
      ...[
        fact("Kind", launch.kind), fact("Scope", launch.scope ? `${launch.scope} (${launch.phase})` : launch.phase),
        fact("Source", launch.source), fact("Operation", launch.opName),
        fact("Reads", formatBytes(launch.read), "counted"), fact("Writes", formatBytes(launch.written), "counted"),
        fact("In the host's memory", launch.host ? formatBytes(launch.host) : null, "counted"),
        fact("Sends", launch.link ? `${formatBytes(launch.link)}${launch.axes ? ` over ${launch.axes}` : ""}` : null, "counted"),
        fact("Beside no other work", launch.exposed === null ? null : formatUs(launch.exposed), "estimated"),
        fact("Unfused", launch.unfused ? formatBytes(launch.unfused) : null, "counted"),
        fact("Work", launch.flops ? `${formatFlops(launch.flops)}, ${(launch.flops / Math.max(moved, 1)).toFixed(1)} FLOP/B` : null, "counted"),
        fact("Roofline", `${formatUs(launch.roofline)}, bound by ${launch.limiter}`, "estimated"),
        fact("Estimate", formatUs(launch.estimate), "estimated"),
        fact("XLA's estimate", launch.xla === null ? null : `${formatUs(launch.xla)}${launch.xlaModel ? ` (${launch.xlaModel})` : ""}`, "estimated"),
        fact("Time", launch.measured === null ? null : formatUs(launch.measured), "measured"),
        fact("Kernel", launch.kernel),
        fact("Launches a run", launch.repeat > 1 ? formatCount(launch.repeat) : null, "counted"),
        fact("Grid", size(launch.grid)), fact("Threads a block", size(launch.block)),
        fact("Shared memory", launch.shared === null ? null : formatBytes(launch.shared)),
        fact("Registers", launch.registers), fact("Spills", launch.spill === null ? null : launch.spill ? formatBytes(launch.spill) : "none"),
        fact("Occupancy", launch.occupancy === null ? null : `${percentText(launch.occupancy)}${launch.occupancyLimiter ? `, limited by ${launch.occupancyLimiter}` : ""}`),
        fact("Inside", launch.opcodes.map(([name, count]) => (count > 1 ? `${count} ${name}` : name)).join(", ")),
      ].filter(Boolean)),
    ...[
      missedAt(strategy, index),
      valueTable(launch.inputs, "Inputs", strategy, true), valueTable(launch.outputs, "Outputs", strategy, false),
      edgesOf(strategy, index), launch.hlo ? lazyText("HLO", launch.hlo) : null, ptxOf(strategy, launch),
    ].filter(Boolean));
  if (!card.open) card.showModal();
  card.scrollTop = 0;
  setHash(hashOf("launch", index, strategy));
}
card.addEventListener("close", () => location.hash.startsWith("#launch-") && setHash(""));

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-launch]");
  if (button) openCard(button.dataset.strategy, Number(button.dataset.launch));
  else if (event.target === card) card.close();
});
