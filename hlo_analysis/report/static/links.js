// Deep links: #launch-12, #hotspot-0, #missed-3, #decision-57, #scope-2, #source-block.py:114; with @name for other strategies.

const homeName = strategies.has(data.baseline) ? data.baseline : strategies.keys().next().value;
const hashOf = (kind, id, strategy) =>
  `#${kind}-${encodeURIComponent(id)}${strategy === homeName ? "" : `@${encodeURIComponent(strategy)}`}`;

/** Returns a small link to the item beside it, for copying. */
const anchorTo = (kind, id, strategy) =>
  el("a", { className: "anchor", href: hashOf(kind, id, strategy), "aria-label": `Link to ${kind} ${id}`, textContent: "#" });

/** Sets the address to what is shown, without a new entry in the browser's history. */
const setHash = (hash) => history.replaceState(null, "", hash || location.pathname + location.search);

/** Shows the item that an address names; returns false if the page has no such item. */
function follow(hash) {
  let parts;
  try {
    parts = /^#(launch|hotspot|missed|decision|scope|source)-(.+?)(?:@(.+))?$/.exec(hash)?.slice(1).map((part) => part && decodeURIComponent(part));
  } catch { return false; } // not our address: a lone '%'
  if (!parts) return section(hash);
  const [kind, id, strategy = homeName] = parts;
  if (!strategies.has(strategy)) return false;
  if (focus.value !== strategy && kind !== "scope") {
    focus.value = strategy;
    showFocus();
  }
  if (kind !== "launch" && card.open) card.close();
  return SHOWS[kind](strategy, id);
}

/** Scrolls to a section, at once: a smooth way there would end where the page was before its tables were drawn. */
function section(hash) {
  const node = document.getElementById(hash.slice(1));
  if (!node?.matches("section")) return false;
  if (card.open) card.close();
  node.scrollIntoView({ behavior: "instant" });
  return true;
}

const SHOWS = {
  launch: (strategy, id) => strategies.get(strategy).launches[id] && (openCard(strategy, Number(id)), true),
  hotspot: (strategy, id) => reveal(showHotspotPlace(strategy, Number(id))),
  missed: (strategy, id) => reveal(showMissedRank(strategy, Number(id))),
  decision: (strategy, id) => reveal(showDecision(strategy, Number(id))),
  scope: (_, id) => reveal(document.querySelectorAll("table.scopes tbody tr[data-scope]")[id]),
  source: (strategy, id) => {
    document.getElementById("launch-search").value = id;
    showLaunches(strategy);
    return reveal(document.getElementById("launches"));
  },
};

/** Scrolls to an element and marks it, until another element is revealed. */
function reveal(node) {
  if (!node) return false;
  for (const other of document.querySelectorAll(".target")) other.classList.remove("target");
  for (let box = node.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
  node.classList.add("target");
  node.tabIndex = -1;
  node.scrollIntoView({ block: node.offsetHeight > innerHeight / 2 ? "start" : "center", behavior: "instant" });
  node.focus({ preventScroll: true });
  return true;
}

// A click follows a link even if the address already names it.
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (!link || event.ctrlKey || event.metaKey || !follow(link.hash)) return;
  event.preventDefault();
  setHash(link.hash);
});
addEventListener("hashchange", () => follow(location.hash));
