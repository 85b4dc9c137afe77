/**
 * Losses of other jobs beside those of the one that is shown: which are chosen, and their curves as last asked for.
 *
 * Responsible for asking: once for a job that has ended, and again with every list for one that runs. `charts.js` draws.
 */

import { h } from "./dom.js";
import { get } from "./session.js";

/** As many as there are looks for; more would not be told apart. */
const BESIDE_MAX = 5;
const OFFERED_MAX = 12;
const FINAL = new Set(["completed", "cancelled", "failed"]);

export class Beside {
  #chosen = new Map(); // name → {job, state, look, points}, in the order in which they were chosen

  /** Choose a job, or no longer; whether that could be done. */
  async toggle(name, chosen) {
    if (!chosen) return this.#chosen.delete(name);
    if (this.#chosen.size >= BESIDE_MAX) return false;
    const taken = new Set([...this.#chosen.values()].map((one) => one.look));
    const look = [...Array(BESIDE_MAX).keys()].find((free) => !taken.has(free));
    this.#chosen.set(name, { job: name, state: "", look, points: [] });
    await this.#ask(name);
    return true;
  }

  /** Ask anew for those that may have learned something; forget those that the service has no longer. */
  async look(jobs) {
    const known = new Set(jobs.map((job) => job.job));
    for (const name of [...this.#chosen.keys()]) if (!known.has(name)) this.#chosen.delete(name);
    const running = [...this.#chosen.values()].filter((one) => !FINAL.has(one.state));
    await Promise.all(running.map((one) => this.#ask(one.job)));
  }

  /** The curves beside that of `shown`. */
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
      h("fieldset", {}, h("legend", { class: "hidden" }, "Jobs whose losses are drawn as well"), others.map(option)),
      full && h("p", { class: "soft" }, `${BESIDE_MAX} at a time.`),
    );
  }
}
