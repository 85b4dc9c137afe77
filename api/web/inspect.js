/**
 * What a job left to read, each at an address of its own: logs, checkpoints, events and settings.
 *
 * `Inspection` fetches what its view shows. The address names the view and, for logs, the log: `#JOB/logs/SOURCE/NUMBER`.
 */

import { h } from "./dom.js";
import { get, text } from "./session.js";
import { read } from "./stream.js";
import { addressOf } from "./views.js";
import { FINAL, bytes, clock, count, day, plural, seconds } from "./words.js";

export const PARTS = { "": "Overview", logs: "Logs", checkpoints: "Checkpoints", events: "Events", settings: "Settings" };
const LINES_SHOWN = 200;
/** The most that the service reads back. */
const RECORDS_READ = 10_000;
const RECORDS_SHOWN = 100;

/** Links to the views of a job. */
export function navigation(job, part) {
  const item = ([name, words]) => h("li", {}, h("a", { href: addressOf(job, name), "aria-current": name === part ? "page" : null }, words));
  return h("nav", { class: "parts", "aria-label": "Views of the job" }, h("ul", {}, Object.entries(PARTS).map(item)));
}

export class Inspection {
  #data = {};

  forget() {
    this.#data = {};
  }

  /** Fetch what the view `part` of the job at `path` shows. `item` is what the address names in it. */
  async look(path, part, item) {
    this.#data[part] = await LOOKS[part](path, item, this.#data[part]);
  }

  view(job, part, item, mayChange) {
    const shown = this.#data[part];
    const title = h("h2", { id: "inspection-title" }, PARTS[part]);
    return [title, shown ? VIEWS[part](shown, job, mayChange, item) : h("p", { class: "nothing" }, "Loading…")];
  }
}

// ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────

const LOOKS = {
  async logs(path, item) {
    const { logs } = await get(`${path}/logs`);
    const [source, number] = item.split("/").map(decodeURIComponent);
    const newest = (name) => logs.filter((log) => log.source === name).at(-1);
    const chosen = source ? logs.find((log) => log.source === source && `${log.incarnation}` === number) ?? newest(source) : newest("synchroniser") ?? logs[0];
    if (!chosen) return { logs, chosen: null, text: "" };
    const where = `${path}/logs/${encodeURIComponent(chosen.source)}?tail=${LINES_SHOWN}&incarnation=${chosen.incarnation}`;
    return { logs, chosen, text: await text(where) };
  },
  checkpoints: (path) => get(`${path}/checkpoints`),
  async events(path) {
    return { records: await read(`${path}/events?follow=false&tail=${RECORDS_READ}&${ROUTINE.map((name) => `without=${name}`).join("&")}`) };
  },
  async settings(path, _item, before) {
    return before ?? { specification: await get(`${path}/spec`) };
  },
};

// ── views ─────────────────────────────────────────────────────────────────────────────────────────────────────────

const VIEWS = { logs, checkpoints, events, settings };

const valueOf = (log) => `${encodeURIComponent(log.source)}/${log.incarnation}`;

function logs({ logs: all, chosen, text: lines }, job) {
  if (!chosen) return h("p", { class: "nothing" }, "No log yet. A log is created when its process starts.");
  const option = (log) =>
    h("option", { value: valueOf(log), "data-key": valueOf(log), selected: log === chosen }, `${log.source} ${log.incarnation} · ${bytes(log.bytes)} · ${day(log.written_at)}`);
  return [
    h("p", {}, h("label", { for: "log" }, "Process, and the number of its start"), " ", h("select", { id: "log", "data-choice": "log" }, all.map(option))),
    h("p", { class: "soft" }, `The last ${LINES_SHOWN} lines, up to ${clock(chosen.written_at)}. `, "Follow it with ", h("code", {}, `atoll logs ${job.job} ${chosen.source} --follow`), "."),
    h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": `Log of ${chosen.source}` }, lines || "It is empty."),
  ];
}

/** `checkpoints` are the complete ones, oldest first. */
function checkpoints({ checkpoints: all }, job, mayChange) {
  const running = mayChange && !FINAL.has(job.state) && job.state !== "queued";
  const heads = ["Number", "Taken", "Version", "Tokens", "Size", "Islands", ...(running && all.length ? ["Change"] : [])];
  const rows = [...all].reverse().map((one) => {
    const cells = [day(one.taken_at), `${one.global_version}`, count(one.tokens_trained), bytes(one.bytes), `${one.islands.length}`];
    if (running) cells.push(h("button", { type: "button", class: "danger", "data-action": "rollback", "data-target": `${one.number}`, "aria-label": `Roll back to ${one.number}` }, "Roll back"));
    return h("tr", { "data-key": `checkpoint-${one.number}` }, h("th", { scope: "row" }, `${one.number}`), cells.map((cell, n) => h("td", { "data-head": heads[n + 1] }, h("span", {}, cell))));
  });
  const trouble = job.checkpoint?.trouble;
  return [
    trouble && h("p", { class: "notice" }, `Checkpoints fail: ${trouble}`),
    all.length
      ? h("table", { class: "stacked" }, h("caption", {}, "Complete checkpoints, newest first"), h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))
      : h("p", { class: "nothing" }, "This job has no complete checkpoint."),
    all.length > 0 && h("p", { class: "soft" }, "To continue from one in a new job: ", h("code", {}, `atoll submit SPEC --resume ${job.job}`)),
    running && h("div", { class: "buttons" }, h("button", { type: "button", "data-action": "checkpoint", "data-target": job.job }, "Take a checkpoint")),
  ];
}

/** Records that only say that training goes on. `atoll events` lists them all. */
const ROUTINE = ["ProgressReported", "TimerFired", "FragmentAdopted", "ContributionArrived", "MergeCompleted", "EvaluationCompleted"];
const TOLD = ["island", "caller", "node_group", "node", "checkpoint", "reason", "detail", "cause", "outcome"];

function events({ records }, job) {
  const told = records.slice(-RECORDS_SHOWN).reverse();
  const row = (record) =>
    h(
      "tr",
      { "data-key": `record-${record.n}` },
      h("th", { scope: "row" }, `${record.n}`),
      h("td", {}, seconds(record.event.at)),
      h("td", {}, h("b", {}, spaced(record.event.type)), " ", h("span", { class: "soft" }, facts(record.event))),
      h("td", { class: "soft" }, [...new Set(record.effects.map((effect) => spaced(effect.type)))].join(", ")),
    );
  const heads = ["Record", "Job time", "What happened", "What was decided"];
  const hint = h("p", { class: "soft" }, "Routine records (progress, contributions, merges, evaluations, timers) are left out. All of them: ", h("code", {}, `atoll events ${job.job}`));
  if (!told.length) return [h("p", { class: "nothing" }, "Nothing but routine was recorded lately."), hint];
  return [
    h("table", {}, h("caption", {}, "Events, newest first"), h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, told.map(row))),
    hint,
  ];
}

/** IslandReady → island ready */
const spaced = (name) => name.replace(/(?<=[a-z])(?=[A-Z])/g, " ").toLowerCase();

const facts = (event) => TOLD.filter((name) => event[name] !== undefined && event[name] !== "" && event[name] !== null).map((name) => (name === "island" ? event[name] : `${name.replace("_", " ")} ${event[name]}`)).join(", ");

const settingsNow = ({ lr_ratio, quorum, grace, interval, cost }) =>
  `learning rate ${lr_ratio} of the specification's, quorum ${quorum}, grace ${grace ?? "for everyone"}, ${interval} steps between offers${cost ? `, limit of cost ${cost}` : ""}`;

function settings({ specification }, job) {
  const fact = (what, value) => value && h("div", {}, h("dt", {}, what), h("dd", {}, value));
  return [
    h(
      "dl",
      { class: "facts wide-facts" },
      fact("Submitted", `by ${job.caller}, ${day(job.submitted_at)}`),
      fact("Priority", `${job.priority}`),
      fact("Quorum now", `${job.quorum} of ${plural(job.island_count, "island")}`),
      fact("Changed settings", job.settings?.changed && settingsNow(job.settings)),
      fact("Codecs", job.wire.up && `${job.wire.up} up, ${job.wire.down} down`),
      fact("Resumed from", job.resumed_from),
      fact("Run folder", job.run_dir),
    ),
    h("p", { class: "soft" }, "The specification, with all defaults:"),
    h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Specification" }, JSON.stringify(specification, null, 2)),
  ];
}
