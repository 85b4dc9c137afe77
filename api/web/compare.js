/**
 * Jobs beside each other: the losses of other jobs beside those of the job that is shown, and settings beside results.
 *
 * Responsible for fetching the curves: once for a job that has ended, and with every list for a running job. `charts.js`
 * draws them.
 */

import { h } from "./dom.js";
import { get } from "./session.js";
import { FINAL, count, loss, percent, plain, plural, seconds } from "./words.js";

/** The number of line styles; more curves could not be told apart. */
const BESIDE_MAX = 5;
const OFFERED_MAX = 12;

export class Beside {
  #chosen = new Map(); // name → {job, state, look, points}, in the order in which they were chosen

  /** Add or remove a job. Returns whether that was possible. */
  async toggle(name, chosen) {
    if (!chosen) return this.#chosen.delete(name);
    if (this.#chosen.size >= BESIDE_MAX) return false;
    const taken = new Set([...this.#chosen.values()].map((one) => one.look));
    const look = [...Array(BESIDE_MAX).keys()].find((free) => !taken.has(free));
    this.#chosen.set(name, { job: name, state: "", look, points: [] });
    await this.#ask(name);
    return true;
  }

  /** Refresh the curves of running jobs, and drop jobs that the service no longer has. */
  async look(jobs) {
    const known = new Set(jobs.map((job) => job.job));
    for (const name of [...this.#chosen.keys()]) if (!known.has(name)) this.#chosen.delete(name);
    const running = [...this.#chosen.values()].filter((one) => !FINAL.has(one.state));
    await Promise.all(running.map((one) => this.#ask(one.job)));
  }

  /** The curves of all chosen jobs except `shown`. */
  curves(shown) {
    return [...this.#chosen.values()].filter((one) => one.job !== shown);
  }

  async #ask(name) {
    const job = await get(`/v1/jobs/${encodeURIComponent(name)}`);
    const points = job.loss_curve.filter((point) => point.loss !== null).map((point) => [point.tokens, point.loss, point.after_s]);
    const one = this.#chosen.get(name);
    if (one) Object.assign(one, { state: job.state, points });
  }

  /** What can be chosen: the newest other jobs. */
  view(jobs, shown) {
    const others = jobs.filter((job) => job.job !== shown && job.state !== "queued").slice(0, OFFERED_MAX);
    if (!others.length) return null;
    const full = this.#chosen.size >= BESIDE_MAX;
    const option = ({ job, state }) => {
      const chosen = this.#chosen.has(job);
      return h(
        "label",
        { class: "choice", "data-key": job },
        h("input", { type: "checkbox", "data-beside": job, checked: chosen, disabled: full && !chosen }),
        ` ${job} `,
        h("span", { class: "soft" }, state),
      );
    };
    return h(
      "details",
      { class: "beside", "data-key": "beside" },
      h("summary", {}, h("span", {}, "Compare with other jobs")),
      h("fieldset", {}, h("legend", { class: "hidden" }, "Jobs with losses to draw as well"), others.map(option)),
      full && h("p", { class: "soft" }, `${BESIDE_MAX} at a time.`),
    );
  }
}

// ── settings beside results ───────────────────────────────────────────────────────────────────────────────────────

const SWEEP_MAX = 32;
const NOTHING = "–";

/** A column of results: its title, how it is read from a job of the list, and how it is shown. */
const RESULTS = [
  ["Loss", (job) => job.loss, loss],
  ["Tokens", (job) => job.tokens_trained, count],
  ["Version", (job) => job.global_version, String],
  ["Goodput", (job) => job.goodput_ratio, percent],
  ["Time", (job) => (job.started_at !== null && job.ended_at !== null ? job.ended_at - job.started_at : null), seconds],
];

/**
 * The jobs of one name as a table: the settings in which they differ, beside their results, as `atoll jobs --table` has it.
 * A job's settings never change, so each specification is fetched once, and only for the name that is chosen.
 */
export class Sweep {
  #name = "";
  #settings = new Map(); // job → its settings by path
  #sort = { column: "Loss", descending: false };

  /** Compare the jobs of this name; none if it is empty. */
  async choose(name, jobs) {
    this.#name = name;
    await this.look(jobs);
  }

  /** Sort by this column; by the same one again, the other way round. */
  sortBy(column) {
    this.#sort = { column, descending: this.#sort.column === column && !this.#sort.descending };
  }

  /** Fetch the settings of jobs that came since. */
  async look(jobs) {
    const missing = this.#jobs(jobs).filter((job) => !this.#settings.has(job.job));
    await Promise.all(
      missing.map(async ({ job }) => {
        const { specification } = await get(`/v1/jobs/${encodeURIComponent(job)}/spec`);
        this.#settings.set(job, new Map(fields(specification)));
      }),
    );
  }

  #jobs(jobs) {
    return this.#name ? (jobs ?? []).filter((job) => job.name === this.#name).slice(0, SWEEP_MAX) : [];
  }

  /** The panel. It is absent while no two jobs have the same name. */
  view(jobs) {
    const counts = new Map();
    for (const { name } of jobs ?? []) counts.set(name, (counts.get(name) ?? 0) + 1);
    const names = [...counts].filter(([name, number]) => number > 1 || name === this.#name);
    if (!names.length) return null;
    const option = ([name, number]) => h("option", { value: name, selected: name === this.#name }, `${name} (${plural(number, "job")})`);
    return [
      h("h2", { id: "sweep-title" }, "Compare settings"),
      h("p", { class: "sub" }, "Jobs of one name: the settings in which they differ, beside their results."),
      h("label", { for: "sweep-name" }, "Name "),
      h("select", { id: "sweep-name" }, h("option", { value: "", selected: !this.#name }, "none"), names.map(option)),
      this.#table(this.#jobs(jobs).filter((job) => this.#settings.has(job.job))),
    ];
  }

  #table(jobs) {
    if (!jobs.length) return null;
    const columns = [["Job", (job) => job.job, String], ["State", (job) => job.state, String], ...this.#differing(jobs), ...RESULTS];
    const sort = columns.find(([title]) => title === this.#sort.column) ?? columns[0];
    const rows = jobs.map((job) => ({ job, value: sort[1](job) })).sort((one, other) => ordered(one.value, other.value, this.#sort.descending));
    const head = ([title, , , path]) => {
      const order = title !== sort[0] ? null : this.#sort.descending ? "descending" : "ascending";
      return h("th", { scope: "col", "aria-sort": order }, h("button", { type: "button", class: "sort", "data-sort": title, title: path }, title));
    };
    const cell = ([title, read, show], job) => {
      const value = read(job);
      const words = value === null || value === undefined ? NOTHING : show(value);
      return h("td", { "data-head": title, class: words === NOTHING ? "none" : null }, h("span", {}, words));
    };
    const row = ({ job }) =>
      h(
        "tr",
        { "data-key": job.job },
        h("th", { scope: "row" }, h("a", { href: `#${encodeURIComponent(job.job)}` }, job.job)),
        columns.slice(1).map((column) => cell(column, job)),
      );
    return h(
      "table",
      { class: "stacked dense sweep" },
      h("caption", {}, `${plural(jobs.length, "job")} of the name ${this.#name}${jobs.length === SWEEP_MAX ? ", the newest" : ""}`),
      h("thead", {}, h("tr", {}, columns.map(head))),
      h("tbody", {}, rows.map(row)),
    );
  }

  /** The columns of settings. A title is the end of its path, as long as it needs to be to differ from the others. */
  #differing(jobs) {
    const all = jobs.map((job) => this.#settings.get(job.job));
    const paths = [...new Set(all.flatMap((settings) => [...settings.keys()]))];
    const differing = paths.filter((path) => all.some((settings) => settings.get(path) !== all[0].get(path)));
    const titles = new Map(differing.map((path) => [path, shortest(path, differing)]));
    return differing.map((path) => [titles.get(path), (job) => this.#settings.get(job.job).get(path), setting, path]);
  }
}

/** The fields of a specification as [path, value], without those that are not set. */
function fields(value, path = "") {
  if (value === null) return [];
  if (typeof value !== "object") return [[path, value]];
  return Object.entries(value).flatMap(([name, part]) => fields(part, path ? `${path}.${name}` : name));
}

function shortest(path, paths) {
  const parts = path.split(".");
  const ends = parts.map((_, n) => parts.slice(parts.length - 1 - n).join("."));
  return ends.find((end) => paths.filter((other) => other === end || other.endsWith(`.${end}`)).length === 1) ?? path;
}

const setting = (value) => (typeof value === "number" ? plain(value) : String(value));

/** Numbers by value, words by the alphabet, and what is absent last in either direction. */
function ordered(one, other, descending) {
  const absent = (value) => value === null || value === undefined;
  if (absent(one) || absent(other)) return absent(one) - absent(other);
  const both = typeof one === "number" && typeof other === "number";
  const order = both ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
  return descending ? -order : order;
}
