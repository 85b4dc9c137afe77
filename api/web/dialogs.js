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
      { method: "dialog", "data-key": "question" },
      h("h2", { id: "confirm-title" }, title),
      h("p", {}, text),
      box && h("label", { class: "tick" }, h("input", { type: "checkbox" }), box),
      field && h("label", {}, field.label, h("input", { type: "number", min: field.min, max: field.max, required: true, "aria-describedby": field.hint && "field-hint" })),
      field?.hint && h("p", { id: "field-hint", class: "soft" }, field.hint),
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

/** The plan that was chosen, or null. `consequences` says in elements what a plan would do; it is shown before yes is said. */
export async function choosePlan(plans, job, consequences) {
  const told = h("div", { id: "plan-told", role: "status", "aria-live": "polite" }, consequences(plans[0]));
  fill(
    confirmDialog,
    h(
      "form",
      { method: "dialog", "data-key": "plan" },
      h("h2", { id: "confirm-title" }, `Start a plan against ${job}?`),
      h("label", { for: "plan-field" }, "Plan"),
      h("select", { id: "plan-field", "aria-describedby": "plan-told", autofocus: true }, plans.map((plan) => h("option", { value: plan.name }, plan.name))),
      told,
      buttons("Start", "danger", false),
    ),
  );
  const field = confirmDialog.querySelector("select");
  const chosen = () => plans.find((plan) => plan.name === field.value);
  field.value = plans[0].name;
  field.onchange = () => fill(confirmDialog.querySelector("#plan-told"), consequences(chosen()));
  return (await ask(confirmDialog)) === "go" ? chosen() : null;
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
