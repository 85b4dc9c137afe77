/**
 * The newest merges of a job, each with details that can be opened.
 *
 * The list is fetched together with the job. Details are fetched whenever they are opened, because a contribution that comes
 * too late is added to them afterwards. Nothing moves under a reader: the list does not change while it has the pointer or
 * the focus, and open details stay until they are closed.
 */

import { h } from "./dom.js";
import { get } from "./session.js";
import { FINAL, ago, beforeTheEnd, count, percent, plural, seconds, sentence } from "./words.js";

const SHOWN = 8;

export class Merges {
  #list = [];
  #opened = new Map();
  #held;
  #changed;

  /** `held` says whether the list has the pointer or the focus; `changed` is called when details have arrived. */
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
    if (FINAL.has(job.state) && !shown.length) return null;
    const row = (merge) => disclosure(this.#opened.get(nameOf(merge)) ?? merge, job);
    return [
      h("h2", { id: "merges-title" }, "Last merges"),
      h("p", { class: "sub" }, shown.length ? "Newest first. The list does not change while you point at it." : "No fragment has merged yet."),
      h("div", {}, shown.map(row)),
    ];
  }

  /** The newest merges, then those that are open. */
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
    h("div", { class: "inside" }, merge.contributors ? story(merge) : h("p", { class: "soft" }, "Loading…")),
  );
}

function story(merge) {
  return [
    h("p", {}, timing(merge)),
    contributors(merge),
    merge.absent.length > 0 && h("p", {}, `Absent: ${merge.absent.map(({ island, state }) => `${island} (${state.replaceAll("_", " ")})`).join(", ")}.`),
    merge.refusal_count > 0 && refusals(merge),
    merge.digest && h("p", { class: "soft" }, "Digest ", h("code", {}, merge.digest)),
  ];
}

function timing(merge) {
  const quorum = `Quorum of ${merge.quorum} after ${seconds(merge.quorum_after_s)} of the job`;
  const grace = merge.grace_window_s === null ? "it did not wait for others" : `it waited ${seconds(merge.grace_used_s)} of ${seconds(merge.grace_window_s)} grace`;
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
    h("caption", {}, "Contributors, how many versions their base was behind, and how long they waited for the round to close"),
    h("thead", {}, h("tr", {}, head)),
    h("tbody", {}, merge.contributors.map(row)),
  );
}

function refusals(merge) {
  const told = (one) => h("li", {}, h("b", {}, one.island), ` ${one.reason.replaceAll("_", " ")}: ${one.detail}`);
  return [h("p", {}, `${plural(merge.refusal_count, "contribution")} refused:`), h("ul", {}, merge.refusals.map(told))];
}
