// Shows where the time goes: launches above what they need, by cause, with what to do about it.

const HOTSPOTS_SHOWN = 5;
const LINKS_SHOWN = 4;
const MISSED_SHOWN = 10;

/** Returns links to launches, the longest first; all but the first few are folded. */
function launchLinks(name, indices) {
  const { launches } = strategies.get(name);
  const time = (index) => (launches[index].measured ?? launches[index].estimate) * launches[index].repeat;
  const links = [...indices].sort((a, b) => time(b) - time(a)).map((index) => launchLink(name, index));
  const listed = (part) => part.flatMap((link, place) => (place ? [", ", link] : [link]));
  const rest = links.slice(LINKS_SHOWN);
  return [
    el("p", { className: "way" }, ...listed(links.slice(0, LINKS_SHOWN))),
    rest.length ? el("details", {}, el("summary", { textContent: `and ${plural(rest.length, "more launch")}` }), el("p", { className: "way" }, ...listed(rest))) : null];
}

function hotspotCard(name, item, place, most) {
  const bar = el("span", { className: "stake" });
  bar.style.setProperty("--part", item.excess / most);
  const ranks = new Set(item.missed);
  const missed = strategies.get(name).missed.filter((each) => ranks.has(each.rank));
  return el("li", { "data-place": place },
    item.waits ? el("div", { className: "cost" }, el("strong", { textContent: "?" }), el("small", { textContent: "a wait that nothing here estimates" }))
      : el("div", { className: "cost" },
        el("strong", { textContent: formatUs(item.excess) }), el("span", { className: `how ${item.how}`, textContent: item.how }), bar,
        el("small", { textContent: `above need, of ${formatUs(item.time)}` }),
        item.most === null ? null : el("small", { textContent: `${formatUs(item.most)} at worst` })),
    el("div", {},
      el("p", { className: "what" }, el("b", { textContent: lastScope(item.scope) || (item.source ? "" : "no scope") }), " ",
        item.source ? el("a", { className: "m", href: hashOf("source", item.source, name), textContent: item.source }) : null, " ",
        anchorTo("hotspot", place, name)),
      ...launchLinks(name, item.launches),
      el("p", { className: "why" }, item.cause),
      missed.length ? el("details", { className: "words" }, el("summary", { textContent: plural(missed.length, "missed fusion") }),
        ...missed.slice(0, MISSED_SHOWN).map((each) => el("p", {}, el("a", { href: hashOf("missed", each.rank, name), textContent: each.shape }), " ", el("span", { className: "m" }, each.reason)))) : null,
      ...(item.remedy ? remedyOf(item) : [])));
}

function showHotspots(name, count = HOTSPOTS_SHOWN) {
  const { hotspots } = strategies.get(name);
  document.getElementById("hotspots").hidden = !hotspots.length;
  const most = Math.max(...hotspots.map((item) => item.excess)) || 1;
  const list = document.getElementById("hotspot-list");
  list.replaceChildren(...hotspots.slice(0, count).map((item, place) => hotspotCard(name, item, place, most)));
  if (hotspots.length > count) {
    const more = el("button", { type: "button", textContent: `Show ${hotspots.length - count} more`, onclick: () => showHotspots(name, Infinity) });
    list.append(el("li", { className: "more" }, more));
  }
}

/** Returns the card of a hotspot, showing the whole list if necessary. */
function showHotspotPlace(name, place) {
  if (place >= HOTSPOTS_SHOWN) showHotspots(name, Infinity);
  return document.querySelector(`#hotspot-list [data-place="${place}"]`);
}
