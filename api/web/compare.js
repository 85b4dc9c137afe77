/**
 * The losses of other jobs beside those of the job that is shown: which jobs are chosen, and their newest curves.
 *
 * Responsible for fetching the curves: once for a job that has ended, and with every list for a running job. `charts.js`
 * draws them.
 */

import { h } from "./dom.js";
import { get } from "./session.js";
import { FINAL } from "./words.js";

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
