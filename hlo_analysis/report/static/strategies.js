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
}
