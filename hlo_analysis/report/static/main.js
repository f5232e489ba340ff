// What the reader chooses: the strategy in view and the baseline.

const focus = document.getElementById("focus");
const baseline = document.getElementById("baseline");

function showFocus() {
  const name = focus.value;
  for (const node of document.querySelectorAll(".focus-name")) node.textContent = name;
  showMissed(name);
  showGraph(name);
  showDecisions(name);
  showLaunches(name);
}

if (strategies.size) {
  focus.addEventListener("change", showFocus);
  baseline.addEventListener("change", () => showBaseline(baseline.value));
  const filter = document.getElementById("decision-filter");
  filter.addEventListener("input", () => showDecisions(focus.value));
  filter.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("unfold-all").addEventListener("click", () => foldAll(focus.value, true));
  document.getElementById("fold-all").addEventListener("click", () => foldAll(focus.value, false));
  showBaseline(baseline.value);
  showFocus();
}
document.documentElement.dataset.ready = "yes";
