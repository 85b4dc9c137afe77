/**
 * The newest merges of a job, each with its story for whoever opens it.
 *
 * The list is asked for together with the job; a story whenever its disclosure is opened, because a contribution that comes
 * too late is added to it afterwards. Nothing moves under a reader: the list holds still while it has the pointer or the
 * focus, and what was opened stays until it is closed.
 */

import { h } from "./dom.js";
import { get } from "./session.js";
import { ago, beforeTheEnd, count, percent, plural, seconds, sentence } from "./words.js";

const SHOWN = 8;

export class Merges {
  #list = [];
  #opened = new Map();
  #held;
  #changed;

  /** `held` says whether somebody is reading the list; `changed` is called when a story has come. */
  constructor(held, changed) {
    this.#held = held;
    this.#changed = changed;
  }

  forget() {
    this.#list = [];
    this.#opened.clear();
  }

  async look(jobPath) {
    if (this.#list.length && this.#held()) return;
    this.#list = (await get(`${jobPath}/merges?limit=${SHOWN}`)).merges;
  }

  /** A disclosure was opened or closed. */
  async toggled(jobPath, name, open) {
    if (!open) {
      this.#opened.delete(name);
      return;
    }
    this.#opened.set(name, this.#shown().find((merge) => nameOf(merge) === name));
    const story = await get(`${jobPath}/merges/${name.replace(":", "/")}`);
    if (this.#opened.has(name)) this.#opened.set(name, story);
    this.#changed();
  }

  view(job) {
    const shown = this.#shown();
    const row = (merge) => disclosure(this.#opened.get(nameOf(merge)) ?? merge, job);
    return [
      h("h2", { id: "merges-title" }, "Last merges"),
      h("p", { class: "sub" }, shown.length ? "Newest first. The list holds still while you point at it." : "No fragment has merged yet."),
      h("div", {}, shown.map(row)),
    ];
  }

  /** The newest, then those that somebody keeps open. */
  #shown() {
    const names = new Set(this.#list.map(nameOf));
    return [...this.#list, ...[...this.#opened.values()].filter((merge) => !names.has(nameOf(merge)))];
  }
}

const nameOf = (merge) => `${merge.fragment}:${merge.version}`;

function disclosure(merge, job) {
  const name = nameOf(merge);
  return h(
    "details",
    { "data-key": name, "data-merge": name },
    h(
      "summary",
      {},
      h("b", {}, name),
      h("span", {}, `${merge.islands.length} of ${plural(job.island_count, "island")}`),
      h("span", { class: "soft because" }, sentence(merge.because)),
      h("span", { class: "when" }, (job.ended_at ? beforeTheEnd : ago)(Math.max(0, (job.after_s ?? 0) - merge.closed_after_s))),
    ),
    h("div", { class: "inside" }, merge.contributors ? story(merge) : h("p", { class: "soft" }, "Asking …")),
  );
}

function story(merge) {
  return [
    h("p", {}, timing(merge)),
    contributors(merge),
    merge.absent.length > 0 && h("p", {}, `Not in it: ${merge.absent.map(({ island, state }) => `${island} (${state.replaceAll("_", " ")})`).join(", ")}.`),
    merge.refusal_count > 0 && refusals(merge),
    merge.digest && h("p", { class: "soft" }, "Digest ", h("code", {}, merge.digest)),
  ];
}

function timing(merge) {
  const quorum = `Quorum of ${merge.quorum} after ${seconds(merge.quorum_after_s)} of the job`;
  const grace = merge.grace_window_s === null ? "it did not wait for more" : `it waited ${seconds(merge.grace_used_s)} of ${seconds(merge.grace_window_s)} grace`;
  const step = merge.merge_s === null ? "the outer step is being taken" : `the outer step took ${seconds(merge.merge_s)}`;
  return `${quorum}; ${grace}; ${step}.`;
}

function contributors(merge) {
  const head = ["Island", "Tokens", "Weight", "Stale", "Waited"].map((name) => h("th", { scope: "col" }, name));
  const row = (one) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, one.island),
      h("td", {}, count(one.token_count)),
      h("td", {}, percent(one.weight)),
      h("td", {}, `${one.staleness}`),
      h("td", {}, `${seconds(Math.max(0, merge.closed_after_s - one.arrived_after_s))}${one.on_time ? "" : ", early"}`),
    );
  return h(
    "table",
    { class: "shares" },
    h("caption", {}, "Contributors: versions their base was behind, and how long they waited for the round to close"),
    h("thead", {}, h("tr", {}, head)),
    h("tbody", {}, merge.contributors.map(row)),
  );
}

function refusals(merge) {
  const told = (one) => h("li", {}, h("b", {}, one.island), ` ${one.reason.replaceAll("_", " ")}: ${one.detail}`);
  return [h("p", {}, `${plural(merge.refusal_count, "contribution")} refused:`), h("ul", {}, merge.refusals.map(told))];
}
