// Handles the reader's choices: the strategy in view, and the one that it is compared with.

const focus = document.getElementById("focus");
const other = document.getElementById("other");

function showFocus() {
  const name = focus.value;
  for (const node of document.querySelectorAll(".focus-name")) node.textContent = name;
  searchIndex = null;
  showOther();
  showDifferences(name);
  showAdvice(name);
  showTimes(name);
  showRoofline(name);
  showGraph(name);
  showDecisions(name);
  showLaunches(name);
}

function showOther() {
  for (const node of document.querySelectorAll(".other-name")) node.textContent = other.value;
  showColumns([focus.value, other.value]);
}

const winning = document.getElementById("winning-code");
winning?.replaceChildren(codeBox(winning.textContent.trim()));

if (strategies.size) {
  focus.addEventListener("change", showFocus);
  other.addEventListener("change", showOther);
  document.getElementById("all-scopes")?.addEventListener("change", showOther);
  for (const [id, show] of [["decision-filter", showDecisions], ["launch-filter", showLaunches]]) {
    const filter = document.getElementById(id);
    filter.addEventListener("input", () => show(focus.value));
    filter.addEventListener("submit", (event) => event.preventDefault());
  }
  document.getElementById("all-values").addEventListener("change", () => showGraph(focus.value));
  document.getElementById("unfold-all").addEventListener("click", () => foldAll(focus.value, true));
  document.getElementById("fold-all").addEventListener("click", () => foldAll(focus.value, false));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width === innerWidth) return;
    width = innerWidth;
    showRoofline(focus.value);
    fit(ZOOM.legible);
  });
  showFocus();
  follow(location.hash);
}
document.documentElement.dataset.ready = "yes";
