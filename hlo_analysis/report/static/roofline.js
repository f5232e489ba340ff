// Draws the roofline chart: FLOP/s over FLOP per byte, both logarithmic; a point for each launch, a line for each roof.

const CHART = { height: 420, left: 64, right: 22, top: 16, bottom: 44, least: 3.5, most: 26 };
const DRAWN_SHARE = 0.001;
const LABELLED = 5;
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 1 });
const decades = (least, most) => Array.from({ length: Math.max(0, most - least + 1) }, (_, step) => least + step);

/** Returns the launch's measured time if there is one, else the estimate. */
const timeOf = (launch) => launch.measured ?? launch.estimate;

/** Returns the roofs that apply to these launches: [FLOP/s, the units or types with that peak]. */
function roofsOf({ device }, launches) {
  const used = new Set(launches.flatMap((launch) => launch.inputs.map(([, shape]) => shape.split("[")[0])));
  const roofs = new Map([[device.vector, ["vector units"]]]);
  for (const [type, rate] of device.matrix) if (used.has(type)) roofs.set(rate, [...(roofs.get(rate) ?? []), type === "f32" ? "f32 as TF32" : type]);
  return [...roofs].filter(([rate]) => rate > 0).sort(([a], [b]) => b - a);
}

function showRoofline(name) {
  const strategy = strategies.get(name);
  const view = document.getElementById("roofline-view");
  const computing = strategy.launches.filter((launch) => launch.flops && launch.read + launch.written && timeOf(launch));
  const drawn = computing.filter((launch) => launch.run >= strategy.whole * DRAWN_SHARE);
  const sum = (of) => of.reduce((all, launch) => all + timeOf(launch) * launch.repeat, 0);
  const [rest, whole] = [strategy.launches.length - computing.length, sum(strategy.launches)];
  const small = computing.length - drawn.length;
  const above = drawn.filter((launch) => isAbove(launch, strategy.device));
  const isMeasured = drawn.some((launch) => launch.measured !== null);
  document.getElementById("roofline-note").textContent = [
    isMeasured ? "Filled points are measured, hollow ones estimated." : drawn.length ? "All times are estimated." : "",
    above.length ? `${above.length === 1 ? "The point" : `The ${above.length} points`} with a double edge ${above.length === 1 ? "is" : "are"} above the slope: ${above.length === 1 ? "the launch found" : "these launches found"} part of what ${above.length === 1 ? "it reads" : "they read"} in the L2 cache, which the roofline does not count.` : "",
    rest ? `${plural(rest, "launch")} without counted arithmetic (${formatUs(whole - sum(computing))}, such as copies) ${rest === 1 ? "is" : "are"} not drawn.` : "",
    small ? `Nor ${small === 1 ? "is" : "are"} ${plural(small, "launch")} of less than 0.1 % of the time.` : "",
  ].filter(Boolean).join(" ");
  if (!drawn.length) { view.replaceChildren(el("p", { className: "empty", textContent: "No launch does counted arithmetic." })); return; }

  const points = drawn.map((launch) => ({
    launch, x: launch.flops / (launch.read + launch.written), y: (launch.flops / timeOf(launch)) * 1e6, part: (timeOf(launch) * launch.repeat) / whole,
  })).sort((a, b) => b.part - a.part); // small points are drawn last, so that none is hidden
  const { bandwidth } = strategy.device;
  const roofs = roofsOf(strategy, drawn);
  const [top] = roofs[0];
  const width = Math.max(300, view.clientWidth);
  const xs = [Math.min(...points.map((p) => p.x), top / bandwidth / 100), Math.max(...points.map((p) => p.x), (top / bandwidth) * 10)].map(Math.log10);
  const ys = [Math.min(...points.map((p) => p.y), top / 1e4), top * 2.5].map(Math.log10);
  const [x0, x1] = [Math.floor(xs[0]), Math.ceil(xs[1])];
  const [y0, y1] = [Math.floor(ys[0]), ys[1]];
  const px = (x) => CHART.left + ((Math.log10(x) - x0) / (x1 - x0)) * (width - CHART.left - CHART.right);
  const py = (y) => CHART.height - CHART.bottom - ((Math.log10(y) - y0) / (y1 - y0)) * (CHART.height - CHART.top - CHART.bottom);
  const line = (css, a, b, c, d) => svg("line", { class: css, x1: a.toFixed(1), y1: b.toFixed(1), x2: c.toFixed(1), y2: d.toFixed(1) });
  const text = (css, x, y, said, anchor = "middle") => svg("text", { class: css, x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor }, said);
  const [left, right, floor] = [CHART.left, width - CHART.right, CHART.height - CHART.bottom];
  const skip = Math.ceil((x1 - x0) / (width / 60));
  const grid = [
    ...decades(x0, x1).flatMap((power) => [line("grid", px(10 ** power), CHART.top, px(10 ** power), floor),
      (power - x0) % skip ? "" : text("tick", px(10 ** power), floor + 16, compact.format(10 ** power))]),
    ...decades(y0, Math.floor(y1)).flatMap((power) => [line("grid", left, py(10 ** power), right, py(10 ** power)),
      text("tick", left - 8, py(10 ** power) + 4, formatFlops(10 ** power).replace("FLOP", "").replace(".0", "").trim(), "end")]),
    text("axis", (left + right) / 2, CHART.height - 8, `FLOP per byte of ${strategy.device.memory} traffic`),
    svg("text", { class: "axis", transform: `translate(14,${(CHART.top + floor) / 2}) rotate(-90)`, "text-anchor": "middle" }, "FLOP/s"),
  ].filter(Boolean);
  const slope = [Math.max(10 ** x0, 10 ** y0 / bandwidth), top / bandwidth];
  const roofLines = [
    line("roof", px(slope[0]), py(slope[0] * bandwidth), px(slope[1]), py(top)),
    svg("text", { class: "roof-name", "text-anchor": "middle", transform: slopeLabel(px, py, slope, bandwidth) }, `${(bandwidth / 1e12).toFixed(1)} TB/s`),
    // A label whose roof is close below another goes below its own.
    ...roofs.flatMap(([rate, what], place) => [line("roof", px(rate / bandwidth), py(rate), right, py(rate)),
      text("roof-name", right - 4, py(rate) + (place && py(rate) - py(roofs[place - 1][0]) < 16 ? 14 : -5), `${what.join(", ")}: ${formatFlops(rate)}/s`, "end")]),
  ];
  view.replaceChildren(svg("svg", { width, height: CHART.height, role: "group", "aria-label": `Roofline chart of ${name}` },
    svg("g", {}, ...grid), svg("g", {}, ...roofLines.filter((node) => node.tagName === "line")),
    svg("g", {}, ...points.flatMap((point) => launchPoint(name, point, px, py, above.includes(point.launch)))), svg("g", {}, ...pointLabels(points.slice(0, LABELLED), px, py, right, roofLines.filter((node) => node.classList.contains("roof-name") && node.hasAttribute("x")))), svg("g", {}, ...roofLines.filter((node) => node.tagName === "text"))));
}

const LETTER = 6.4; // width of a letter of a label

/** Returns the names of the largest points, without those that would lie on one before, or on the name of a roof. */
function pointLabels(points, px, py, right, roofNames) {
  const taken = roofNames.map((node) => [right - LETTER * node.textContent.length, right, Number(node.getAttribute("y"))]);
  return points.flatMap(({ launch, x, y, part }) => {
    const radius = Math.max(CHART.least, CHART.most * Math.sqrt(part));
    const isLeft = px(x) > right - 220;
    const [lx, ly] = [px(x) + (isLeft ? -1 : 1) * (radius + 4), py(y) + 4];
    const words = `${lastScope(launch.scope) || launch.name} ${shareText(part)}`;
    const [from, to] = isLeft ? [lx - LETTER * words.length, lx] : [lx, lx + LETTER * words.length];
    if (taken.some(([start, end, height]) => from < end && start < to && Math.abs(height - ly) < 13)) return [];
    taken.push([from, to, ly]);
    return [svg("text", { class: "point-name", x: lx.toFixed(1), y: ly.toFixed(1), "text-anchor": isLeft ? "end" : "start" }, words)];
  });
}

/** Returns the transform that puts a label in the middle of the slope, turned along it. */
function slopeLabel(px, py, [from, to], bandwidth) {
  const [x1, y1, x2, y2] = [px(from), py(from * bandwidth), px(to), py(to * bandwidth)];
  const turn = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI;
  return `translate(${(x1 + x2) / 2 - 6},${(y1 + y2) / 2 - 6}) rotate(${turn.toFixed(1)})`;
}

/** Whether a launch was measured to take less time than its bytes take at the full bandwidth. */
const isAbove = (launch, { bandwidth }) => launch.measured !== null && launch.measured < 0.99e6 * ((launch.read + launch.written) / bandwidth);

/** Returns a launch's point, with a second edge if it is above the roof. */
function launchPoint(name, { launch, x, y, part }, px, py, above) {
  const how = launch.measured === null ? "estimated" : "measured";
  const words = `#${launch.index} ${launch.name}: ${launch.kind}, ${formatUs(timeOf(launch) * launch.repeat)} (${how}, ${Math.round(part * 100)}% of all), ` +
    `${formatFlops(y)}/s at ${x < 10 ? x.toFixed(1) : Math.round(x)} FLOP/B, bound by ${launch.limiter}${above ? ", in part from the L2 cache" : ""}`;
  const radius = Math.max(CHART.least, CHART.most * Math.sqrt(part));
  const [cx, cy] = [px(x).toFixed(1), py(y).toFixed(1)];
  const point = svg("circle", {
    class: `point kf k-${family(launch.kind)} ${how}`, cx, cy, r: radius.toFixed(1),
    tabindex: 0, role: "button", "aria-label": words, "data-strategy": name, "data-launch": launch.index, "data-words": words,
  });
  onKey(point, () => openCard(name, launch.index));
  return above ? [point, svg("circle", { class: `above k-${family(launch.kind)}`, cx, cy, r: (radius + 3.5).toFixed(1) })] : [point];
}
