// Updates the views of the two compared strategies: differences in the table, and columns of the scope table.

function showDifferences(name) {
  const base = strategies.get(name);
  for (const row of document.querySelectorAll("table.strategies tbody tr")) {
    row.classList.toggle("base", row.dataset.strategy === name);
    for (const cell of row.querySelectorAll("[data-metric]")) {
      const metric = cell.dataset.metric;
      const value = Number(cell.dataset.value);
      const from = base.totals[metric];
      const isKnown = cell.dataset.value !== "None" && from !== null;
      const change = !isKnown ? "" : row.dataset.strategy === name ? "baseline"
        : "partial" in cell.dataset ? "lower bound"
        : metric === "launches" ? (value === from ? "=" : `${value < from ? "−" : "+"}${Math.abs(value - from)}`)
        : formatChange(value, from);
      const note = cell.querySelector(".d");
      note.textContent = change;
      note.className = `d ${change.startsWith("−") ? "less" : change.startsWith("+") ? "more" : ""}`;
    }
  }
}

function showColumns(names) {
  const all = document.getElementById("all-scopes")?.checked;
  for (const cell of document.querySelectorAll("table.scopes [data-column]")) cell.hidden = !all && !names.includes(cell.dataset.column);
  const [from, to] = names;
  for (const cell of document.querySelectorAll("table.scopes .diff")) {
    cell.hidden = from === to;
    if (cell.matches("td")) cell.replaceChildren(...scopeDifference(cell.parentElement, from, to));
  }
}

/** Returns what the second strategy has more or less than the first in a row's scope: time, bytes, launches. */
function scopeDifference(row, from, to) {
  const [before, after] = [from, to].map((name) => [...row.querySelectorAll("td[data-column]")].find((cell) => cell.dataset.column === name)?.dataset);
  if (!before || !after) return [];
  const parts = [["time", formatUs], ["bytes", formatBytes], ["launches", (count) => plural(count, "launch")]].map(([key, text]) => {
    const change = Number(after[key]) - Number(before[key]);
    return change && el("span", { className: `d ${change < 0 ? "less" : "more"}`, textContent: `${change < 0 ? "−" : "+"}${text(Math.abs(change))}` });
  }).filter(Boolean);
  return parts.length ? parts : [el("span", { className: "none", textContent: "=" })];
}
