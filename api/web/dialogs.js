/**
 * The page's two questions: who are you, and are you sure. Each is a modal <dialog> and answers with a promise.
 *
 * The browser keeps the focus inside, closes it on Escape and gives the focus back; nothing of that is done here.
 */

import { fill, h } from "./dom.js";

const tokenDialog = document.getElementById("token");
const confirmDialog = document.getElementById("confirm");

/** The token that was typed, or null if none was given. `why` says why it is asked for. */
export async function askToken(why) {
  fill(
    tokenDialog,
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "token-title" }, "Who is looking?"),
      h("p", {}, why),
      h("label", { for: "token-field" }, "Token"),
      h("input", { id: "token-field", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "token-hint" }),
      h(
        "p",
        { id: "token-hint", class: "soft" },
        "The administrator's lies in the file ",
        h("code", {}, "token"),
        " of the service's home folder; ",
        h("code", {}, "atoll token create"),
        " makes others. It is kept in this tab only.",
      ),
      buttons("Continue", "primary", false),
    ),
  );
  const field = tokenDialog.querySelector("input");
  field.value = "";
  const answer = await ask(tokenDialog);
  const given = field.value.trim();
  field.value = "";
  return answer === "go" && given ? given : null;
}

/** Whether to go on, whether the box was ticked, and the number that was given: `{go, ticked, number}`. */
export async function confirm({ title, text, box, field, verb, danger }) {
  fill(
    confirmDialog,
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "confirm-title" }, title),
      h("p", {}, text),
      box && h("label", { class: "tick" }, h("input", { type: "checkbox" }), box),
      field && h("label", {}, field.label, h("input", { type: "number", min: field.min, max: field.max, required: true })),
      buttons(verb, danger ? "danger" : "primary", !field),
    ),
  );
  const tick = confirmDialog.querySelector("[type=checkbox]");
  const number = confirmDialog.querySelector("[type=number]");
  if (tick) tick.checked = false;
  if (number) number.value = field.value;
  const answer = await ask(confirmDialog);
  return { go: answer === "go", ticked: Boolean(tick?.checked), number: Number(number?.value) };
}

/** Only one of them submits: it is what Enter in a field presses. */
function buttons(verb, kind, careful) {
  return h(
    "div",
    { class: "buttons end" },
    h("button", { type: "button", "data-action": "close", autofocus: careful }, "Cancel"),
    h("button", { type: "submit", value: "go", class: kind }, verb),
  );
}

function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}
