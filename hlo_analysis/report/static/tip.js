// Shows a tooltip with the data-words of the element under the pointer or with the focus.

const tip = el("div", { className: "tip", role: "status", hidden: true });
document.body.append(tip);

function tellOf(target) {
  const said = target?.closest?.("[data-words]");
  tip.hidden = !said;
  if (!said) return;
  tip.textContent = said.dataset.words;
  const place = said.getBoundingClientRect();
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const left = place.left + place.width / 2 - width / 2;
  const above = place.top - height - 8;
  tip.style.left = `${Math.max(8, Math.min(left, document.documentElement.clientWidth - width - 8))}px`;
  tip.style.top = `${above > 60 ? above : Math.min(place.bottom + 8, innerHeight - height - 8)}px`;
}

for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, (event) => tellOf(event.target));
for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"]) addEventListener(kind, () => { tip.hidden = true; }, true);
