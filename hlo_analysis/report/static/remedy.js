// Shows why a value goes through memory, the remedy, and its effect, on the cards of hotspots, missed fusions and launches.

/** Returns the reason in plain words, with the compiler's own words folded. A text in brackets is this tool's own. */
function reasonOf(item) {
  const own = /^\[(.*)\]$/s.exec(item.reason)?.[1];
  const plain = item.category === "other rule" ? null : item.plain;
  return [
    el("p", { className: "why" }, plain ?? own ?? item.reason),
    plain && item.reason && own !== plain
      ? el("details", { className: "words" }, el("summary", { textContent: own ? "In detail" : "XLA's words" }), el("p", { className: "m", textContent: own ?? item.reason }))
      : null];
}

/** Whether the remedy was tried and did not help. */
const isInVain = ({ trial }) => trial && !trial.helps && !trial.error;

const REMEDY_KINDS = { option: "Set an option:", rewrite: "Change the code:", kernel: "Use a kernel:" };

function remedyOf({ remedy, remedyKind, code, trial }) {
  if (isInVain({ trial })) {
    return [el("p", { className: "effect none" }, el("b", { textContent: "Tried: no gain" }), ` (${trial.change})`)];
  }
  return [
    el("p", { className: "remedy" }, el("span", { className: `tag ${remedyKind}`, textContent: REMEDY_KINDS[remedyKind] ?? remedyKind }), " ", remedy),
    code ? codeBox(code) : null,
    trial ? effectOf(trial) : null];
}

function effectOf(trial) {
  if (trial.error) return el("p", { className: "effect none" }, el("b", { textContent: "Not verified" }), `: ${trial.error}`);
  // These numbers are savings, so a positive one is shown with a minus.
  const less = (value, text) => (value ? `${value > 0 ? "−" : "+"}${text(Math.abs(value))}` : null);
  const changes = [less(trial.launches, (count) => plural(count, "launch")), less(trial.bytes, formatBytes), less(trial.time, formatUs)];
  return el("p", { className: "effect" }, el("b", { textContent: "Verified" }), ` by compiling again with ${trial.change}: `,
    el("b", { className: "n", textContent: changes.filter(Boolean).join(", ") }), trial.time ? el("span", { className: "how estimated", textContent: "time estimated" }) : null);
}

function codeBox(code) {
  const button = el("button", { type: "button", className: "copy", textContent: "Copy", onclick: async () => {
    button.textContent = (await copied(code)) ? "Copied" : "Select and copy by hand";
  } });
  return el("div", { className: "code" }, el("pre", { tabIndex: 0 }, el("code", { textContent: code })), button);
}

/** Copies a text to the clipboard, through a selected field if the page may not use the clipboard. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = el("textarea", { value: text, className: "hidden" });
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    return isDone;
  }
}
