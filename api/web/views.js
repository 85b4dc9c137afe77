/**
 * The parts of the page that are text: the job's headline, its islands by region, and the commands of operators.
 *
 * Views are functions of the service's answers; they fetch and store nothing. Buttons name their action in `data-action`;
 * `main.js` handles it.
 */

import { badge, h, row, table } from "./dom.js";
import { FINAL, JOB_TONES, ago, beforeTheEnd, bytes, clock, count, day, looks, loss, money, percent, plural, rate, seconds, sentence, significant } from "./words.js";

export { lines } from "./lines.js";

const JOB_ICONS = { good: "play", busy: "dots", bad: "cross", calm: "pause" };

/** The jobs to choose from. `jobs` is null until the service has listed them. */
export function jobOptions(jobs, chosen) {
  const option = (job) =>
    h("option", { value: job.job, selected: job.job === chosen, "data-key": job.job }, `${job.job} · ${place(job)} · ${day(job.submitted_at)}`);
  if (jobs?.length) return [h("option", { value: "", "data-key": "all", selected: !chosen }, "All jobs"), ...jobs.map(option)];
  return h("option", { value: "" }, jobs ? "no jobs yet" : "loading jobs");
}

/** The address of a job's page, or of one of its views. */
export const addressOf = (job, part = "") => `#${encodeURIComponent(job)}${part && `/${part}`}`;

/** The job's state as a badge. */
export function stateBadge(job) {
  const tone = job.silent ? "bad" : JOB_TONES[job.state] ?? "calm";
  return badge(tone, job.silent ? "question" : job.state === "completed" ? "tick" : JOB_ICONS[tone], job.silent ? `${job.state}, silent` : place(job));
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

/** The job at a glance: its description, its state and five figures. `checkpoints` are its complete ones, if fetched. */
export function headline(job, buttons, checkpoints) {
  const regions = new Set(job.islands.map((island) => island.region)).size;
  const spares = job.islands.filter((island) => island.spare).length;
  const spared = spares ? ` and ${plural(spares, "spare")}` : "";
  const about = `${plural(job.island_count, "island")} in ${plural(regions, "region")}${spared}, submitted by ${job.caller} at ${clock(job.submitted_at)}.`;
  const ended = FINAL.has(job.state);
  return [
    h("div", { class: "title" }, h("h1", {}, job.job), stateBadge(job), buttons.length > 0 && h("span", { class: "buttons job-buttons" }, buttons)),
    h("p", { class: "lead" }, about, job.reason && job.state !== "failed" ? ` ${sentence(job.reason)}` : ""),
    job.state === "failed" && h("p", { class: "notice bad" }, sentence(job.reason)),
    job.report_ready && h("p", { class: "lead" }, h("button", { type: "button", "data-action": "report" }, "Download the report")),
    !ended && job.pause_reason && h("p", { class: "notice" }, job.paused ? sentence(job.pause_reason) : `No fragment can merge: ${job.pause_reason}`),
    job.checkpoint?.trouble && h("p", { class: "notice" }, `Checkpoints ${ended ? "failed" : "fail"}: ${job.checkpoint.trouble}`),
    (job.warnings ?? []).map((one) => h("p", { class: "lead" }, `Warning: ${one.path} ${one.message} ${one.remedy}`)),
    !ended && (job.helpers ?? []).filter((one) => one.reason).map((one) => h("p", { class: "notice" }, `The ${one.name}: ${one.reason}.`)),
    !ended && (job.shards ?? []).map((one) => h("p", { class: one.reason ? "notice" : "lead" }, shardLine(one))),
    ended && job.state !== "completed" && h("h2", { class: "reached" }, "What it reached"),
    tiles(job, ended && job.state !== "completed" ? lastCheckpoint(checkpoints) : tile("Islands", `${job.islands_training ?? "?"} of ${job.island_count}`, "training now")),
  ];
}

/** One of several shards of the synchroniser. */
function shardLine({ shard, node, condition, fragments, byte_count: byteCount, reason }) {
  const holds = fragments.length ? `fragments ${fragments.join(", ")}, ${bytes(byteCount)}` : "no fragments yet";
  return `Shard ${shard} on ${node || "no node"}: ${condition}, ${holds}${reason ? `. ${sentence(reason)}` : "."}`;
}

/** What is known of a job that does not answer, from its line in the list of jobs. */
export function lastKnown(summary) {
  return [
    h("div", { class: "title" }, h("h1", {}, summary.job), stateBadge(summary)),
    h("p", { class: summary.silent ? "notice" : "nothing" }, summary.silent ? `${sentence(summary.reason)} The figures below are the last known ones.` : "Loading…"),
    tiles(summary, tile("Islands", `${summary.island_count}`, summary.silent ? "their states are not known" : "in the specification")),
  ];
}

/** What the job has cost and will cost, or null if none of its node groups has a price. */
export function cost({ goodput: { cost: bill } }) {
  if (!bill) return null;
  const sum = (value) => money(value, bill.currency);
  const { forecast, so_far: soFar } = bill;
  const spread = forecast?.low !== null && forecast?.low !== undefined ? `; between ${sum(forecast.low)} and ${sum(forecast.high)}` : "; its spread is not known yet";
  const rows = [
    ...Object.entries(bill.node_groups).map(([group, value]) => row(group, ["node group", sum(value)])),
    ...Object.entries(bill.badput).filter(([, value]) => value > 0).map(([cause, value]) => row(cause, [`badput, ${percent(soFar ? value / soFar : 0)}`, sum(value)])),
  ];
  return [
    h("h2", { id: "cost-title" }, "Cost"),
    h("p", { class: "sub" }, `${sum(soFar)} so far, ${sum(bill.per_merged_million_tokens)} per merged million tokens.`, forecast ? ` ${sum(forecast.expected)} at the end of the token budget${spread}.` : ""),
    bill.unpriced.length > 0 && h("p", { class: "notice" }, `Without a price, and not in these figures: ${bill.unpriced.join(", ")}.`),
    table("Cost by node group, and of what was not productive", ["Of", "Kind", "Cost"], rows),
  ];
}

function tiles(job, last) {
  const done = job.token_budget ? Math.min(1, job.tokens_trained / job.token_budget) : 0;
  const fragments = job.fragments?.length || job.schedule?.fragments;
  const least = job.last_known ? "≥ " : "";
  return h(
    "dl",
    { class: "tiles" },
    tile(
      "Tokens",
      `${least}${count(job.tokens_trained)}`,
      h("progress", { max: 1000, value: Math.round(1000 * done), "aria-label": "tokens trained of the budget" }),
      `${percent(done)} of ${count(job.token_budget)}${job.eta_s === null ? "" : `; ${seconds(job.eta_s)} left`}`,
    ),
    tile("Held-out loss", loss(job.loss), `nats per token${job.loss_train === null || job.loss_train === undefined ? "" : `; training ${loss(job.loss_train)}`}`),
    tile("Goodput", percent(job.goodput_ratio), "of island time reached a merge"),
    tile("Global version", `${least}${job.global_version}`, fragments ? `outer steps of ${plural(fragments, "fragment")}` : "outer steps"),
    last,
  );
}

/** The newest checkpoint of a job that ended before its budget. */
function lastCheckpoint(checkpoints) {
  if (!checkpoints) return tile("Last checkpoint", "…", "loading");
  const newest = checkpoints.at(-1);
  if (!newest) return tile("Last checkpoint", "none", "nothing to continue from");
  return tile("Last checkpoint", `${newest.number}`, `version ${newest.global_version}, ${count(newest.tokens_trained)} tokens, ${bytes(newest.bytes)}`, `taken at ${day(newest.taken_at)}`);
}

const tile = (what, figure, ...notes) =>
  h("div", { class: "panel tile" }, h("dt", {}, what), h("dd", { class: "figure" }, figure), notes.map((note) => h("dd", { class: "note" }, note)));

/** A region with more islands gets a whole row, and so does one that would be alone in its row. */
const STACK_MAX = 3;

/** With more islands, each region is one line, which opens to its islands, and an island that trains is one line as well. */
const CARDS_MAX = 16;

/** So many islands with a problem are shown whole beside the line of their region. */
const TROUBLED_SHOWN = 3;

/** Islands as cards, grouped by region in the order of the job. */
export function islands(job, mayChange) {
  const regions = [...byRegion(job.islands)];
  const begun = job.state !== "queued" && !FINAL.has(job.state);
  const crowded = job.islands.length > CARDS_MAX;
  const alone = regions.filter(([, members]) => members.length <= STACK_MAX).length === 1;
  const cards = (members) =>
    h("ul", { class: crowded ? "cards crowded" : "cards" }, members.map((island) => card(island, job, mayChange && begun, crowded)));
  const region = ([name, members], n) => {
    const title = h("h3", { id: `region-${n}` }, name, h("span", { class: "soft" }, ` ${shares(members)}`));
    const wide = crowded || alone || members.length > STACK_MAX;
    return h(
      "div",
      { class: wide ? "region wide" : "region", role: "group", "aria-labelledby": `region-${n}`, "data-key": `region-${name}` },
      crowded ? folded(name, title, members, FINAL.has(job.state), cards) : [title, cards(members)],
    );
  };
  return [h("h2", { id: "islands-title" }, "Islands"), h("div", { class: crowded ? "regions folded" : "regions" }, regions.map(region))];
}

/** A region as one line with counts; islands with a problem stay beside it. */
function folded(name, title, members, ended, cards) {
  const troubled = ended ? [] : members.filter(inTrouble).slice(0, TROUBLED_SHOWN);
  const rest = members.filter((island) => !troubled.includes(island));
  return [
    h("details", { "data-key": `fold-${name}` }, h("summary", {}, title, h("span", { class: "counts" }, stateCounts(members, ended))), cards(uneasyFirst(rest))),
    troubled.length > 0 && h("div", { class: "troubled", "data-key": "troubled" }, cards(troubled)),
  ];
}

const inTrouble = (island) => Boolean(island.flag) || (!island.spare && ["bad", "warn"].includes(looks(island).tone));

/** How many islands of a region are in each state. */
function stateCounts(members, ended) {
  const counts = new Map();
  for (const island of members) {
    const { word, tone, icon } = looks(island, ended);
    counts.set(word, { word, tone, icon, number: (counts.get(word)?.number ?? 0) + 1 });
  }
  const order = ["bad", "warn", "busy", "good", "calm"];
  const sorted = [...counts.values()].sort((one, other) => order.indexOf(one.tone) - order.indexOf(other.tone));
  return sorted.map(({ word, tone, icon, number }) => badge(tone, icon, `${number} ${word}`));
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
  const ended = FINAL.has(job.state);
  const { word, tone, icon } = looks(island, ended);
  const reason = island.reason || (ended ? "" : "no problem");
  const axes = Object.entries(island.mesh).map(([axis, length]) => `${axis} ${length}`).join(" × ");
  const merged = island.last_merge_after_s === null ? null : Math.max(0, (job.after_s ?? 0) - island.last_merge_after_s);
  const title = [h("h4", {}, island.island), badge(tone, icon, word)];
  const about = [
    (island.spare || reason) && h("p", { class: "reason" }, island.spare ? SPARE : reason),
    island.flag && h("p", { class: "notice flag" }, `Not used: ${island.flag}`),
    !island.spare && h(
      "dl",
      { class: "facts" },
      fact("Steps/s", rate(island.steps_per_second)),
      fact("Tokens/s", rate(island.tokens_per_second)),
      fact("Tokens", count(island.tokens_total)),
      fact("Loss", loss(island.loss)),
      island.learning_rate !== null && fact("Learning rate", significant(island.learning_rate)),
      island.gradient_norm !== null && fact("Gradient norm", significant(island.gradient_norm), "of the last step, before clipping"),
      island.mfu_ratio !== null && fact("MFU", percent(island.mfu_ratio), "model FLOPs utilisation"),
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

/** The commands that operators gave for the job, newest first; nothing if it ended without any. */
export function commands(all, ended) {
  if (ended && !all.length) return null;
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
