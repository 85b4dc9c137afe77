/**
 * Chaos: the state of the newest plan that runs against the job, and the buttons that start and end one. Views, like those
 * of `views.js`. The service runs the plan, whether or not the page is open.
 */

import { badge, h } from "./dom.js";
import { plural, seconds, sentence } from "./words.js";

const SHOWN = 8;
const STATES = {
  waiting: ["busy", "dots"],
  running: ["warn", "play"],
  passed: ["good", "tick"],
  failed: ["bad", "cross"],
  aborted: ["bad", "cross"],
  stopped: ["calm", "pause"],
};

/** `run` is the newest run of a plan against the job, or null. */
export function chaos(run, job, mayChange) {
  const injects = run?.state === "waiting" || run?.state === "running";
  return [
    h("h2", { id: "chaos-title" }, "Chaos"),
    h("p", { class: "sub" }, "The service injects planned faults. Does the job survive them?"),
    run ? shown(run, job) : h("p", { class: "nothing" }, "No plan has run against this job."),
    h(
      "div",
      { class: "buttons" },
      mayChange && !injects && button("chaos", "Start a plan", ""),
      mayChange && injects && button("end", "End the plan", run.plan, "danger"),
      run?.ended_at && run.state !== "stopped" && !run.reason.includes("no report") && button("verdict", "Download the verdict", run.plan),
    ),
  ];
}

const button = (action, words, target, kind = "") =>
  h("button", { type: "button", class: kind, "data-key": action, "data-action": action, "data-target": target }, words);

function shown(run, job) {
  const done = `${run.struck_count} of ${plural(run.fault_count, "fault")} injected, ${run.spared_count} skipped. Started by ${run.caller}.`;
  const newest = run.decisions.map(line).reverse().slice(0, SHOWN);
  return h(
    "div",
    { "data-key": run.run },
    h("p", { class: "chaos-run" }, h("b", {}, run.plan), badge(...(STATES[run.state] ?? ["calm", "question"]), run.state)),
    h("p", {}, done, run.reason ? ` ${sentence(run.reason)}` : ""),
    h("p", { class: "soft" }, coming(run, job)),
    newest.length > 0 &&
      h(
        "table",
        {},
        h("caption", {}, "Faults and their outcomes, newest first"),
        h("thead", {}, h("tr", {}, ["Fault", "Job time", ""].map((name, n) => h("th", { scope: "col" }, name || h("span", { class: "hidden" }, "Outcome"))))),
        h("tbody", {}, newest),
      ),
  );
}

function coming(run, job) {
  const { next } = run;
  if (!next) return run.ended_at ? "" : "All faults have been handled. The verdict follows when the job ends.";
  if (next.after_s === null) return "The plan starts when enough islands are training.";
  const wait = Math.max(0, next.after_s - (job.after_s ?? 0));
  return `Next: ${next.told} in ${wait < 120 ? `${Math.round(wait)} s` : seconds(wait)}.`;
}

function line(fault, n) {
  const injected = fault.outcome === null ? badge("busy", "dots", "injected") : badge("warn", "cross", "injected");
  return h(
    "tr",
    { "data-key": `fault-${n}` },
    h("th", { scope: "row" }, fault.told),
    h("td", {}, seconds(fault.after_s)),
    h("td", {}, fault.spared ? [badge("calm", "pause", "skipped"), h("span", { class: "soft" }, ` ${fault.spared}`)] : injected),
  );
}

/** What a shipped plan will do, for the operator who has to confirm it. */
export function consequences(plan) {
  return [
    plan.about && h("p", {}, sentence(plan.about)),
    h("h3", {}, "Faults"),
    plan.faults.length ? h("ul", {}, plan.faults.map((fault) => h("li", {}, fault))) : h("p", {}, "None: a reference run without faults."),
    h("h3", {}, "Blast radius"),
    h("p", {}, `At least ${plural(plan.keeps, "island")} of the job always continue${plan.keeps === 1 ? "s" : ""} to train.`),
    h("h3", {}, "Objectives"),
    h("ul", {}, plan.objectives.map((objective) => h("li", {}, h("code", {}, objective)))),
  ];
}
