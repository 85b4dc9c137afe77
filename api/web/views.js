/**
 * The parts of the page that are text: the job's headline, its islands by region, and the commands of operators.
 *
 * Views are functions of the service's answers; they fetch and store nothing. Buttons name their action in `data-action`;
 * `main.js` handles it.
 */

import { badge, h } from "./dom.js";
import { JOB_TONES, ago, beforeTheEnd, clock, count, day, looks, loss, percent, plural, rate, sentence } from "./words.js";

export { lines } from "./lines.js";

const JOB_ICONS = { good: "play", busy: "dots", bad: "cross", calm: "pause" };

/** The jobs to choose from. `jobs` is null until the service has listed them. */
export function jobOptions(jobs, chosen) {
  const option = (job) =>
    h("option", { value: job.job, selected: job.job === chosen, "data-key": job.job }, `${job.job} · ${place(job)} · ${day(job.submitted_at)}`);
  if (jobs?.length) return jobs.map(option);
  return h("option", { value: "" }, jobs ? "no jobs yet" : "loading jobs");
}

/** The job's state, and its place in the queue while it waits. */
const place = (job) => (job.queue_position ? `${job.state}, number ${job.queue_position}` : job.state);

/** The caller's name and role, and a button to sign in or out. */
export function who(me, held) {
  if (!me) return held ? null : h("button", { type: "button", class: "quiet", "data-action": "sign-in" }, "Sign in");
  return [
    h("span", { class: "person" }, h("b", {}, me.name), " ", h("span", { class: "role" }, me.role)),
    held && h("button", { type: "button", class: "quiet", "data-action": "sign-out" }, "Sign out"),
  ];
}

const LIVE = {
  live: ["good", "play", "live"],
  away: ["warn", "question", "reconnecting"],
  ended: ["calm", "pause", "ended"],
};

export function liveBadge(state) {
  return badge(...(LIVE[state] ?? ["calm", "dots", "connecting"]));
}

/** The job at a glance: its description, its state and five figures. */
export function headline(job) {
  const tone = JOB_TONES[job.state] ?? "calm";
  const regions = new Set(job.islands.map((island) => island.region)).size;
  const spares = job.islands.filter((island) => island.spare).length;
  const spared = spares ? ` and ${plural(spares, "spare")}` : "";
  const about = `${plural(job.island_count, "island")} in ${plural(regions, "region")}${spared}, submitted by ${job.caller} at ${clock(job.submitted_at)}.`;
  const done = job.token_budget ? Math.min(1, job.tokens_trained / job.token_budget) : 0;
  return [
    h("div", { class: "title" }, h("h1", {}, job.job), badge(tone, job.state === "completed" ? "tick" : JOB_ICONS[tone], place(job))),
    h("p", { class: "lead" }, about, job.reason ? ` ${sentence(job.reason)}` : ""),
    job.report_ready && h("p", { class: "lead" }, h("button", { type: "button", "data-action": "report" }, "Download the report")),
    job.pause_reason && h("p", { class: "notice" }, `No fragment can merge: ${job.pause_reason}`),
    job.checkpoint.trouble && h("p", { class: "notice" }, `Checkpoints fail: ${job.checkpoint.trouble}`),
    (job.warnings ?? []).map((one) => h("p", { class: "lead" }, `Warning: ${one.path} ${one.message} ${one.remedy}`)),
    (job.helpers ?? []).filter((one) => one.reason).map((one) => h("p", { class: "notice" }, `The ${one.name}: ${one.reason}.`)),
    h(
      "dl",
      { class: "tiles" },
      tile(
        "Tokens",
        count(job.tokens_trained),
        h("progress", { max: 1000, value: Math.round(1000 * done), "aria-label": "tokens trained of the budget" }),
        `${percent(done)} of ${count(job.token_budget)}`,
      ),
      tile("Held-out loss", loss(job.loss), `nats per token${job.loss_train === null ? "" : `; training ${loss(job.loss_train)}`}`),
      tile("Goodput", percent(job.goodput_ratio), "of island time reached a merge"),
      tile("Global version", `${job.global_version}`, `outer steps of ${plural(job.fragments.length || job.schedule.fragments || 0, "fragment")}`),
      tile("Islands", `${job.islands_training} of ${job.island_count}`, "training now"),
    ),
  ];
}

const tile = (what, figure, ...notes) =>
  h("div", { class: "panel tile" }, h("dt", {}, what), h("dd", { class: "figure" }, figure), notes.map((note) => h("dd", { class: "note" }, note)));

/** A region with more islands gets a whole row, and so does one that would be alone in its row. */
const STACK_MAX = 3;

/** With more islands, each island that needs no attention is one line, which opens to its card. */
const CARDS_MAX = 16;

/** Islands as cards, grouped by region in the order of the job. */
export function islands(job, mayChange) {
  const regions = [...byRegion(job.islands)];
  const begun = !["queued", "completed", "cancelled", "failed"].includes(job.state);
  const crowded = job.islands.length > CARDS_MAX;
  const alone = regions.filter(([, members]) => members.length <= STACK_MAX).length === 1;
  const region = ([name, members], n) => [
    h(
      "div",
      { class: alone || members.length > STACK_MAX ? "region wide" : "region", role: "group", "aria-labelledby": `region-${n}`, "data-key": `region-${name}` },
      h("h3", { id: `region-${n}` }, name, h("span", { class: "soft" }, ` ${shares(members)}`)),
      h("ul", { class: crowded ? "cards crowded" : "cards" }, (crowded ? uneasyFirst(members) : members).map((island) => card(island, job, mayChange && begun, crowded))),
    ),
  ];
  return [h("h2", { id: "islands-title" }, "Islands"), h("div", { class: "regions" }, regions.map(region))];
}

/** How many of the islands train, of those that should. */
const shares = (members) => `${members.filter((one) => one.state === "training").length}/${members.filter((one) => !one.spare && !one.standby).length}`;

function byRegion(members) {
  const regions = new Map();
  for (const island of members) regions.set(island.region, [...(regions.get(island.region) ?? []), island]);
  return regions;
}

const SPARE = "A scale-up slot: it has a data shard, but no process until the job is scaled up.";

const uneasyFirst = (members) => [...members.filter((island) => !calm(island)), ...members.filter(calm)];

/** Whether nothing is wrong with the island, and nothing is in progress. */
const calm = (island) => island.spare || (!island.flag && ["training", "standby"].includes(island.state));

function card(island, job, mayChange, crowded) {
  const { word, tone, icon } = looks(island);
  const axes = Object.entries(island.mesh).map(([axis, length]) => `${axis} ${length}`).join(" × ");
  const merged = island.last_merge_after_s === null ? null : Math.max(0, (job.after_s ?? 0) - island.last_merge_after_s);
  const title = [h("h4", {}, island.island), badge(tone, icon, word)];
  const about = [
    h("p", { class: "reason" }, island.spare ? SPARE : island.reason || "no problem"),
    island.flag && h("p", { class: "notice flag" }, `Not used: ${island.flag}`),
    !island.spare && h(
      "dl",
      { class: "facts" },
      fact("Steps/s", rate(island.steps_per_second)),
      fact("Tokens", count(island.tokens_total)),
      fact("Loss", loss(island.loss)),
      fact("Last merge", job.ended_at ? beforeTheEnd(merged) : ago(merged)),
      (island.hosts > 1 || axes) && fact("Hosts", `${island.hosts}${axes && `: ${axes}`}`),
      fact("Incarnation", `${island.incarnation}`, island.node && `on ${island.node}`),
    ),
    mayChange && h("div", { class: "buttons" }, actions(island).map((action) => button(action, island.island))),
  ];
  return h(
    "li",
    { class: `panel card ${tone}`, "data-key": island.island, "data-state": island.state },
    crowded && calm(island) ? h("details", {}, h("summary", {}, title), about) : [h("div", { class: "card-title" }, title), about],
  );
}

const fact = (what, value, more) => h("div", {}, h("dt", {}, what), h("dd", { title: more || null }, value));

const AWAY = new Set(["stopped", "failed", "lost", "drained"]);

/** The actions that the island's state allows. */
function actions(island) {
  if (AWAY.has(island.state)) return ["readd"];
  return island.state === "training" ? ["freeze", "drain", "kill"] : ["kill"];
}

const ACTIONS = { kill: "Kill", drain: "Drain", freeze: "Freeze", readd: "Re-add" };

function button(action, island) {
  const kind = action === "kill" ? "danger" : "";
  const label = `${ACTIONS[action]} ${island}`;
  return h("button", { type: "button", class: kind, "data-key": action, "data-action": action, "data-target": island, "aria-label": label }, ACTIONS[action]);
}

const OUTCOME = { accepted: ["good", "tick"], pending: ["busy", "dots"], refused: ["bad", "cross"], undelivered: ["warn", "question"] };

/** The commands that operators gave for the job, newest first. */
export function commands(all) {
  const title = h("h2", { id: "commands-title" }, "Commands");
  if (!all.length) return [title, h("p", { class: "nothing" }, "No commands for this job yet.")];
  const newest = [...all].sort((one, other) => other.requested_at - one.requested_at).slice(0, 8);
  const row = (command) =>
    h(
      "tr",
      { "data-key": command.command },
      h("th", { scope: "row" }, `${command.kind}${command.island ? ` ${command.island}` : ""}`),
      h("td", {}, command.caller, h("br"), h("span", { class: "soft" }, clock(command.requested_at))),
      h("td", {}, badge(...(OUTCOME[command.state] ?? ["calm", "question"]), command.state), h("span", { class: "soft" }, ` ${command.detail}`)),
    );
  const head = ["What", "Who, when", "Outcome"].map((name) => h("th", { scope: "col" }, name));
  return [
    title,
    h("table", {}, h("caption", {}, "Commands of operators, newest first"), h("thead", {}, h("tr", {}, head)), h("tbody", {}, newest.map(row))),
  ];
}
