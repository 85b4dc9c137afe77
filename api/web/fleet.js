/**
 * The first view of the page: what is wrong, all jobs, the queue, and the nodes by group. Views, like those of `views.js`.
 *
 * `problems` derives what is wrong from the service's answers. Certificates and disks are read from its metrics, with the
 * limits of the alerts (deploy/prometheus/alerts.yml).
 */

import { badge, h } from "./dom.js";
import { addressOf, stateBadge } from "./views.js";
import { FINAL, ago, bytes, count, day, loss, percent, plural, seconds, sentence } from "./words.js";

const ENDED_SHOWN = 10;
const DAY_S = 86_400;
const FAILED_LATELY_S = 7 * DAY_S;
const NOTHING = "–";
const CERTIFICATE_EARLY_S = 14 * DAY_S;
const DISK_FREE_MIN_BYTES = 5e8;

// ── what is wrong ─────────────────────────────────────────────────────────────────────────────────────────────────

/** `{tone, what, told, job}` for each problem, the worst first. Times are Unix seconds. */
export function problems({ cluster, jobs, groups, limits, now }) {
  const failed = (job) => job.state === "failed" && now - (job.ended_at ?? job.submitted_at) < FAILED_LATELY_S;
  const about = (job, tone, told) => ({ tone, what: job.job, told: sentence(told), job: job.job });
  const all = jobs ?? [];
  return [
    ...(cluster ? [{ tone: "bad", what: "The cluster", told: cluster }] : []),
    ...all.filter(failed).map((job) => about(job, "bad", `failed ${ago(now - (job.ended_at ?? job.submitted_at))}: ${job.reason}`)),
    ...silence(all.filter((job) => job.silent), cluster, about),
    ...all.filter((job) => !FINAL.has(job.state)).flatMap((job) => job.troubles.map((told) => about(job, "warn", told))),
    ...(limits?.certificates ?? []).flatMap((one) => certificateProblem(one, now)),
    ...(limits?.disks ?? []).filter((one) => one.free < DISK_FREE_MIN_BYTES).map((one) => ({ tone: "bad", what: "Disk", told: `Only ${bytes(one.free)} are free at ${one.path}.` })),
    ...(groups ?? []).filter((group) => group.builds.length > 1).map((group) => ({ tone: "warn", what: group.name, told: `Its nodes have different builds of atoll: ${group.builds.join(", ")}.` })),
  ];
}

/** Jobs that do not answer. With a dead cluster they have one cause, and one line. */
function silence(jobs, cluster, about) {
  if (!cluster || jobs.length < 2) return jobs.map((job) => about(job, "bad", job.reason));
  return [{ tone: "bad", what: plural(jobs.length, "job"), told: `They do not answer: ${jobs.map((job) => job.job).join(", ")}.` }];
}

function certificateProblem({ place, expires, lifetime }, now) {
  const left = expires - now;
  if (left >= DAY_S && !(left < CERTIFICATE_EARLY_S && left < lifetime / 3)) return [];
  const told = left > 0 ? `Expires in ${seconds(left)}.` : `Expired ${ago(-left)}.`;
  return [{ tone: left < DAY_S ? "bad" : "warn", what: `Certificate of ${place}`, told }];
}

/** Certificates and disks in the service's metrics: `{certificates: [{place, expires, lifetime}], disks: [{path, free}]}`. */
export function limitsIn(metrics) {
  const values = (name, label) => {
    const line = new RegExp(`^${name}\\{${label}="((?:[^"\\\\]|\\\\.)*)"\\} (\\S+)$`, "gm");
    return [...metrics.matchAll(line)].map(([, key, value]) => [key, Number(value)]);
  };
  const lifetimes = new Map(values("atoll_certificate_lifetime_seconds", "place"));
  const expiries = values("atoll_certificate_expiry_timestamp_seconds", "place");
  return {
    certificates: expiries.map(([place, expires]) => ({ place, expires, lifetime: lifetimes.get(place) ?? Infinity })),
    disks: values("atoll_disk_free_bytes", "path").map(([path, free]) => ({ path, free })),
  };
}

/** The panel of problems. `looked` says whether jobs and nodes have been listed. */
export function problemsView(found, looked) {
  const item = (one, n) =>
    h(
      "li",
      { class: "row", "data-key": `problem-${one.what}-${n}` },
      badge(one.tone, one.tone === "bad" ? "cross" : "question", one.tone === "bad" ? "problem" : "warning"),
      h("span", { class: "row-name" }, h("b", {}, one.job ? link(one.job) : one.what), " ", one.told),
    );
  const none = looked ? badge("good", "tick", "no problems") : h("span", { class: "soft" }, "Loading…");
  return [
    h("h2", { id: "problems-title" }, "Problems"),
    found.length ? h("ul", { class: "rows" }, found.map(item)) : h("p", { class: "chaos-run" }, none),
  ];
}

// ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

const link = (job) => h("a", { href: addressOf(job) }, job);

const HEADS = ["Job", "State", "Version", "Tokens", "Loss", "Goodput", "Time left", "Last merge", "What is wrong"];

/** The panel of jobs: those that run, then those that have ended, newest first. `jobs` is null until they are listed. */
export function jobsView(jobs, now) {
  const title = h("h2", { id: "overview-title" }, "Jobs");
  if (!jobs) return [title, h("p", { class: "nothing" }, "Loading…")];
  const alive = jobs.filter((job) => !FINAL.has(job.state) && job.state !== "queued");
  const ended = jobs.filter((job) => FINAL.has(job.state));
  if (!jobs.length) return [title, h("p", { class: "nothing" }, "No jobs yet. Submit one with ", h("code", {}, "atoll submit"), "; it appears here.")];
  const rest = ended.slice(ENDED_SHOWN);
  const shown = [...alive, ...ended.slice(0, ENDED_SHOWN)];
  return [
    title,
    shown.length ? jobTable(alive.length ? "Running jobs, then ended ones, newest first" : "No job runs. Ended jobs, newest first", shown, now) : h("p", { class: "nothing" }, "No job runs."),
    rest.length > 0 && h("details", { "data-key": "older-jobs" }, h("summary", {}, h("span", {}, `${plural(rest.length, "older job")}`)), jobTable("Older jobs", rest, now)),
  ];
}

function jobTable(caption, jobs, now) {
  const head = HEADS.map((name) => h("th", { scope: "col" }, name));
  return h(
    "table",
    { class: "stacked dense jobs" },
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, head)),
    h("tbody", {}, jobs.map((job) => jobRow(job, now))),
  );
}

function jobRow(job, now) {
  const running = job.state === "running" && !job.silent;
  const share = job.token_budget ? ` (${percent(Math.min(1, job.tokens_trained / job.token_budget))})` : "";
  const cells = [
    stateBadge(job),
    `${job.silent || job.last_known ? "≥ " : ""}${job.global_version}`,
    `${count(job.tokens_trained)}${share}`,
    loss(job.loss),
    percent(job.goodput_ratio),
    job.eta_s === null ? NOTHING : seconds(job.eta_s),
    running ? ago(job.merged_at === null ? null : Math.max(0, now - job.merged_at)) : job.ended_at ? `ended ${day(job.ended_at)}` : NOTHING,
    wrong(job),
  ];
  return h(
    "tr",
    { "data-key": job.job },
    h("th", { scope: "row" }, link(job.job)),
    cells.map((cell, n) => h("td", { "data-head": HEADS[n + 1], class: cell === NOTHING ? "none" : null }, h("span", {}, cell))),
  );
}

/** What is wrong with the job, in words. */
function wrong(job) {
  if (job.silent || job.state === "failed") return sentence(job.reason);
  return job.troubles.length ? job.troubles.map(sentence).join(" ") : NOTHING;
}

// ── the queue ─────────────────────────────────────────────────────────────────────────────────────────────────────

/** The queued jobs, the next to start first; null if none waits. */
export function queueView(jobs, mayChange) {
  const queued = (jobs ?? []).filter((job) => job.state === "queued").sort((one, other) => (one.queue_position ?? Infinity) - (other.queue_position ?? Infinity));
  if (!queued.length) return null;
  const item = (job) =>
    h(
      "li",
      { class: "row", "data-key": `queued-${job.job}` },
      h("span", { class: "row-name" }, h("b", {}, job.queue_position ? `${job.queue_position}. ` : "", link(job.job)), " ", h("span", { class: "soft" }, `${plural(job.island_count, "island")}, priority ${job.priority}, submitted by ${job.caller} at ${day(job.submitted_at)}`)),
      h("span", { class: "row-told" }, sentence(job.reason)),
      mayChange && h("span", { class: "buttons" }, jobButtons(job)),
    );
  return [
    h("h2", { id: "queue-title" }, "Queue"),
    h("p", { class: "sub" }, "By priority, then by order of submission. No job overtakes another."),
    h("ul", { class: "rows" }, queued.map(item)),
  ];
}

/** What an operator can do with a job as a whole. */
export function jobButtons(job) {
  if (FINAL.has(job.state)) return [];
  const button = (action, words, kind) =>
    h("button", { type: "button", class: kind, "data-key": action, "data-action": action, "data-target": job.job, "aria-label": `${words} ${job.job}` }, words);
  return [job.state === "queued" && button("priority", "Priority", ""), job.upgrade && button("upgrade", `Upgrade to ${job.upgrade}`, ""), job.state === "running" && job.settings && button("settings", "Settings", ""), job.state === "running" && button("finish", "Finish", ""), button("cancel", "Cancel", "danger")];
}

// ── nodes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

const NODE_HEADS = ["Group", "Nodes", "CPUs free", "Accelerators", "Placement", "Build"];

/** The nodes by group. `groups` is null until the cluster has listed them; `lost` says that it does not answer now. */
export function nodesView(groups, lost, limits, now, mayChange) {
  const title = h("h2", { id: "nodes-title" }, "Nodes");
  const head = [...NODE_HEADS, ...(mayChange ? ["Change"] : [])].map((name) => h("th", { scope: "col" }, name));
  const table = groups?.length > 0 &&
    h(
      "table",
      { class: "stacked dense" },
      h("caption", {}, lost ? "Node groups as last seen: the cluster does not answer" : "Node groups"),
      h("thead", {}, h("tr", {}, head)),
      h("tbody", {}, groups.map((group) => nodeRow(group, mayChange))),
    );
  const none = groups ? "No node has joined yet." : lost ? "Unknown: the cluster does not answer." : "Loading…";
  return [title, table || h("p", { class: "nothing" }, none), limits && h("p", { class: "sub limits" }, limitWords(limits, now))];
}

function nodeRow(group, mayChange) {
  const region = group.region === group.name ? null : h("span", { class: "soft" }, ` ${group.region}`);
  const leaving = group.nodes_leaving ? `, ${group.nodes_leaving} leaving` : "";
  const down = group.nodes_down ? `, ${group.nodes_down} down` : "";
  const single = group.cordoned_nodes ?? [];
  const nodes = single.map((one) =>
    h("span", { class: "sub" }, ` ${one.node} is cordoned by ${one.cordoned_by}${one.reason ? `: ${one.reason}` : ""}`));
  const takes = group.cordoned ? badge("warn", "pause", `cordoned by ${group.cordoned_by}`) : badge("good", "tick", "accepts islands");
  const [action, words] = group.cordoned ? ["uncordon", "Uncordon"] : ["cordon", "Cordon"];
  const cells = [
    `${group.nodes}${leaving}${down}`,
    `${count(group.cpus_free)} of ${count(group.cpus)}`,
    `${group.accelerators}`,
    nodes.length ? [takes, ...nodes] : takes,
    group.builds.join(", ") || NOTHING,
    ...(mayChange ? [h("button", { type: "button", "data-action": action, "data-target": group.name, "aria-label": `${words} ${group.name}` }, words)] : []),
  ];
  const heads = [...NODE_HEADS, "Change"];
  return h(
    "tr",
    { "data-key": `node-group-${group.name}` },
    h("th", { scope: "row" }, group.name, region),
    cells.map((cell, n) => h("td", { "data-head": heads[n + 1], class: cell === NOTHING ? "none" : null }, h("span", {}, cell))),
  );
}

function limitWords({ certificates, disks }, now) {
  const first = [...certificates].sort((one, other) => one.expires - other.expires)[0];
  const days = first && Math.floor((first.expires - now) / DAY_S);
  return [
    disks.length && `Free on the service's disks: ${disks.map(({ path, free }) => `${bytes(free)} at ${path}`).join(", ")}.`,
    first && `The first certificate to expire is that of ${first.place}, in ${plural(Math.max(0, days), "day")}.`,
  ].filter(Boolean).join(" ");
}
