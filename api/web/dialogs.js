/**
 * The page's dialogs: one asks for a token, the other for a confirmation. Each is a modal <dialog> and returns a promise.
 *
 * The browser keeps the focus inside, closes the dialog on Escape and restores the focus; this module does none of that.
 */

import { fill, h } from "./dom.js";

const tokenDialog = document.getElementById("token");
const confirmDialog = document.getElementById("confirm");

/** The token that was typed, or null if there was none. `why` says why the page asks. */
export async function askToken(why) {
  fill(
    tokenDialog,
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "token-title" }, "Sign in"),
      h("p", {}, why),
      h("label", { for: "token-field" }, "Token"),
      h("input", { id: "token-field", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "token-hint" }),
      h(
        "p",
        { id: "token-hint", class: "soft" },
        "The administrator's token is in the file ",
        h("code", {}, "token"),
        " of the service's home folder. ",
        h("code", {}, "atoll token create"),
        " creates others. The token is kept in this tab only.",
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

/** Whether the operator confirmed, whether the box was ticked, and the number, or all numbers by name: `{go, ticked, number, numbers}`. */
export async function confirm({ title, text, box, field, fields = [], verb, danger, dismiss }) {
  fill(
    confirmDialog,
    h(
      "form",
      { method: "dialog", "data-key": "question" },
      h("h2", { id: "confirm-title" }, title),
      h("p", {}, text),
      box && h("label", { class: "tick" }, h("input", { type: "checkbox" }), box),
      field && h("label", {}, field.label, h("input", { type: "number", min: field.min, max: field.max, required: true, "aria-describedby": field.hint && "field-hint" })),
      fields.map(({ name, label, value, step }) => h("label", {}, label, h("input", { type: "number", name, value, step, required: value !== null }))),
      field?.hint && h("p", { id: "field-hint", class: "soft" }, field.hint),
      buttons(verb, danger ? "danger" : "primary", !field && !fields.length, dismiss),
    ),
  );
  const tick = confirmDialog.querySelector("[type=checkbox]");
  const number = confirmDialog.querySelector("[type=number]");
  if (tick) tick.checked = false;
  if (field) number.value = field.value;
  const input = (name) => confirmDialog.querySelector(`[name=${name}]`);
  for (const { name, value } of fields) input(name).value = value ?? "";
  const answer = await ask(confirmDialog);
  const numbers = Object.fromEntries(fields.map(({ name }) => [name, input(name).value === "" ? null : Number(input(name).value)]));
  return { go: answer === "go", ticked: Boolean(tick?.checked), number: Number(number?.value), numbers };
}

/** The plan that was chosen, or null. The dialog shows `consequences(plan)`, what the plan would do, before it is confirmed. */
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

/** Only one of the buttons submits, so Enter in a field presses that one. */
function buttons(verb, kind, careful, dismiss = "Cancel") {
  return h(
    "div",
    { class: "buttons end" },
    h("button", { type: "button", "data-action": "close", autofocus: careful }, dismiss),
    h("button", { type: "submit", value: "go", class: kind }, verb),
  );
}

function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}
