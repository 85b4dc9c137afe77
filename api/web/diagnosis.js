/**
 * What costs a job most, with its remedy, and what its autopilot advises.
 *
 * Both are computed from the tape and change slowly, so they are fetched now and then, and not with every event.
 */

import { badge, h, row, table } from "./dom.js";
import { get } from "./session.js";
import { FINAL, count, percent, seconds, sentence, significant } from "./words.js";

const EVERY_MS = 10_000;
const OTHERS_SHOWN = 3;
const SETTINGS = { interval_steps: "H, steps between merges", quorum: "quorum", grace: "grace window, steps", standbys: "standbys" };

export class Diagnosis {
  #diagnosis = null;
  #advice = null;
  #fetchedAt = -Infinity;

  forget() {
    this.#diagnosis = this.#advice = null;
    this.#fetchedAt = -Infinity;
  }

  /** Fetch both if that is due. A job that has trained nothing has nothing to diagnose. */
  async look(jobPath, job) {
    if (!job?.tokens_trained || performance.now() - this.#fetchedAt < EVERY_MS) return;
    this.#fetchedAt = performance.now();
    [this.#diagnosis, this.#advice] = await Promise.all([get(`${jobPath}/diagnosis`), get(`${jobPath}/advice`)]);
  }

  view(job) {
    if (!this.#diagnosis) return null;
    const { cause, others } = this.#diagnosis;
    const ended = FINAL.has(job.state);
    if (ended && !cause && !this.#advice?.looks.length) return null;
    return [
      h("h2", { id: "diagnosis-title" }, ended ? "What cost most" : "What costs most"),
      cause ? causeView(cause) : h("p", { class: "nothing" }, "No cause takes 2 % of the island time."),
      others.length > 0 && h("p", { class: "sub further" }, "Then: ", others.slice(0, OTHERS_SHOWN).map(brief).join(", "), "."),
      this.#advice && adviceView(this.#advice, ended),
    ];
  }
}

const named = ({ cause, subject }) => (subject ? `${cause}: ${subject}` : cause);
const brief = (finding) => `${named(finding)} (${percent(finding.share)})`;

function causeView(cause) {
  return [
    h("p", { class: "cause" }, badge("warn", "question", named(cause))),
    h("p", {}, sentence(cause.statement)),
    h("p", { class: "sub" }, `To do: ${sentence(cause.remedy)}`),
  ];
}

function adviceView({ kind, looks }, ended) {
  if (kind === "off" && !looks.length) return null;
  const [look] = looks;
  const title = h("h3", {}, `Autopilot (${kind})`);
  if (!look) return [title, h("p", { class: "nothing" }, ended ? "The job ended before its first look." : "It has not looked at this job yet.")];
  const { advice } = look;
  if (!advice) return [title, h("p", {}, sentence(look.outcome)), lookedAt(look)];
  const done = look.command ? "The change was made." : advice.held_by ? `Not changed: ${advice.held_by}.` : "Not changed: it only observes.";
  const figures = (effect) => [`${count(effect.tokens_per_second)} ± ${count(effect.spread)} a second`, percent(effect.goodput_ratio), significant(effect.contributors)];
  return [
    title,
    h("p", {}, h("b", {}, `${SETTINGS[advice.setting] ?? advice.setting}: ${advice.before ?? "no limit"} → ${significant(advice.after)}`)),
    h("p", {}, `${advice.reason}.`),
    table("Simulated before and after the change", ["Settings", "Merged tokens", "Goodput", "Islands in a merge"], [row("now", figures(advice.now)), row("then", figures(advice.then))]),
    h("p", { class: "sub" }, done),
    lookedAt(look),
  ];
}

const lookedAt = (look) => h("p", { class: "note" }, `Looked at the tape when the job was ${seconds(look.at)} old.`);
