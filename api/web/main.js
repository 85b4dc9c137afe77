/**
 * The page's one loop: an event arrives → fetch the job, at most once a second → draw what changed.
 *
 * The job's event stream only says *that* something happened. Everything shown comes from `GET /v1/jobs/{job}`, so the page
 * cannot disagree with the service. Without a stream it fetches every few seconds. A hidden tab fetches nothing.
 */

import * as charts from "./charts.js";
import { chaos } from "./chaos.js";
import { command } from "./commands.js";
import { Beside, Sweep } from "./compare.js";
import { Diagnosis } from "./diagnosis.js";
import { askToken } from "./dialogs.js";
import { fill, h } from "./dom.js";
import * as fleet from "./fleet.js";
import { groups } from "./groups.js";
import { Inspection, PARTS, navigation } from "./inspect.js";
import { Merges } from "./merges.js";
import { Refused, clusterProblem, file, forget, get, keep, text, token } from "./session.js";
import { follow } from "./stream.js";
import * as views from "./views.js";
import { FINAL, looks, plural, sentence } from "./words.js";

const LOOK_AT_MOST_EVERY_MS = 1000;
/** For logs, checkpoints, events and settings. */
const INSPECT_AT_MOST_EVERY_MS = 3000;
const LOOK_WITHOUT_STREAM_EVERY_MS = 5000;
const LIST_EVERY_MS = 5000;
const LIMITS_EVERY_MS = 60_000;
const TOAST_MS = 8000;
/** Larger than every record's number, so the stream begins with new events. */
const FROM_NOW_ON = 2 ** 53;

const place = (id) => document.getElementById(id);
const NO_JOB = { job: null, commands: [], run: null, checkpoints: null, looked: false, live: "connecting" };
const page = { me: null, jobs: null, groups: null, groupsLost: false, cluster: null, limits: null, ...NO_JOB };
const beside = new Beside();
const sweep = new Sweep();
const merges = new Merges(() => place("merges").matches(":hover, :focus-within"), () => page.job && drawMerges());
const inspection = new Inspection();
const diagnosis = new Diagnosis();

let stop = () => {};
let timer = null;
let lookedAt = -Infinity;
let looking = false;
let again = false;
/** The job that `choose` is fetching, as a token of that call. */
let choice = null;

// ── where ─────────────────────────────────────────────────────────────────────────────────────────────────────────

/** What the address names: `#` the fleet, `#JOB` a job, `#JOB/PART/ITEM` one of its views. */
function address() {
  const [job, part = "", ...item] = location.hash.slice(1).split("/");
  return { job: decoded(job), part: part in PARTS ? part : "", item: item.join("/") };
}

function decoded(name) {
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
}

/** Show what the address names. */
async function go() {
  const { job, part } = address();
  complain(null);
  if (!job) return leave();
  if (job !== page.job?.job) return choose(job);
  if (part) lookedAt = -Infinity;
  draw();
  lookSoon();
}

/** Go to this job, or to the fleet. A job that is shown already is followed anew. */
function visit(name) {
  const hash = name && `#${encodeURIComponent(name)}`;
  if (name && hash === location.hash) choose(name).catch(failed);
  else location.hash = hash;
}

function leave() {
  stop();
  choice = null;
  Object.assign(page, NO_JOB);
  draw();
  return listJobs();
}

// ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────

/** Fetch the job soon: now if the last fetch was long enough ago, else when it was. */
function lookSoon() {
  if (document.hidden) return;
  const pause = address().part ? INSPECT_AT_MOST_EVERY_MS : LOOK_AT_MOST_EVERY_MS;
  if (looking) again = true;
  else if (timer === null) timer = setTimeout(look, Math.max(0, lookedAt + pause - performance.now()));
}

async function look() {
  timer = null;
  looking = true;
  lookedAt = performance.now();
  const wanted = page.job?.job;
  const { part, item } = address();
  try {
    if (wanted) {
      const path = jobPath(wanted);
      const parts = part ? [inspection.look(path, part, item)] : [get(`${path}/commands`), newestRun(path), lastCheckpoints(path), merges.look(path), diagnosis.look(path, page.job)];
      const [job, commands, run, checkpoints] = await Promise.all([get(path), ...parts]);
      if (wanted === page.job?.job) show(job, part ? {} : { commands: commands.commands, run, checkpoints, looked: true });
    }
    complain(null);
  } catch (error) {
    await failed(error);
  }
  looking = false;
  if (again) {
    again = false;
    lookSoon();
  }
}

/** The newest run of a chaos plan with its decisions, or null if there is none. */
async function newestRun(path) {
  const { runs } = await get(`${path}/chaos/runs`);
  return runs.length ? get(`${path}/chaos/runs/${encodeURIComponent(runs[0].run)}`) : null;
}

/** The checkpoints of a job that has ended, which do not change; null for others. */
async function lastCheckpoints(path) {
  if (page.checkpoints || !FINAL.has(page.job.state)) return page.checkpoints;
  return (await get(`${path}/checkpoints`)).checkpoints;
}

function show(job, more) {
  announce(page.job, job, page.run, more.run);
  const unread = FINAL.has(job.state) && !page.checkpoints && !FINAL.has(page.job.state);
  Object.assign(page, { job, ...more });
  if (FINAL.has(job.state)) {
    stop();
    page.live = "ended";
  }
  draw();
  if (unread) lookSoon();
}

async function choose(name) {
  stop();
  if (name !== page.job?.job) {
    merges.forget();
    diagnosis.forget();
    inspection.forget();
    Object.assign(page, NO_JOB);
    draw();
  }
  page.live = "connecting";
  const mine = (choice = {});
  const job = await get(jobPath(name)).catch((error) => {
    if (choice === mine) choice = null;
    throw error;
  });
  if (choice !== mine) return; // the reader has gone elsewhere, or a second call would follow the job twice
  choice = null;
  page.job = job;
  if (job.job !== name) history.replaceState(null, "", views.addressOf(job.job, address().part)); // `latest`
  lookedAt = -Infinity;
  draw();
  lookSoon();
  stop = follow(`${jobPath(page.job.job)}/events?after=${FROM_NOW_ON}`, {
    record: lookSoon,
    state: (state) => {
      page.live = state;
      drawBar();
      lookSoon();
    },
    end: lookSoon,
  });
}

const jobPath = (name) => `/v1/jobs/${encodeURIComponent(name)}`;

/** Fetch jobs and nodes. Each is drawn when it arrives, so that a dead cluster delays only its own part. */
async function listJobs() {
  if (document.hidden || !page.me) return;
  const fetched = (found) => (Object.assign(page, found), drawFleet());
  const nodes = get("/v1/node-groups").then((found) => fetched({ groups: found.node_groups, groupsLost: false }), () => fetched({ groupsLost: true }));
  fetched({ jobs: await everyJob() });
  if (address().job) {
    await beside.look(page.jobs);
    if (!page.job && !choice) await choose(address().job);
    return;
  }
  complain(null);
  readLimits();
  await Promise.all([nodes, sweep.look(page.jobs).then(drawFleet)]);
}

/** The newest jobs, and all older ones that have not ended. */
async function everyJob() {
  const { jobs, next_cursor: more } = await get("/v1/jobs");
  if (!more) return jobs;
  const known = new Set(jobs.map((job) => job.job));
  const older = await Promise.all(["queued", "starting", "running", "finishing"].map((state) => get(`/v1/jobs?limit=1000&state=${state}`)));
  return [...jobs, ...older.flatMap((found) => found.jobs).filter((job) => !known.has(job.job))];
}

let limitsAt = -Infinity;

/** Certificates and disks, once a minute at most. Without metrics they are left out. */
function readLimits() {
  if (performance.now() - limitsAt < LIMITS_EVERY_MS) return;
  limitsAt = performance.now();
  text("/metrics").then((metrics) => {
    page.limits = fleet.limitsIn(metrics);
    drawFleet();
  }, () => (limitsAt = -Infinity));
}

/** Ask whether the cluster answers. This needs no token, and the service knows it even if nothing else answers. */
async function checkCluster() {
  if (document.hidden) return;
  try {
    page.cluster = await clusterProblem();
  } catch {
    page.cluster = "The service does not answer. Its jobs continue, and this page keeps trying.";
  }
  fill(place("cluster"), page.cluster && h("p", { class: "notice bad" }, h("b", {}, "The cluster is not ready."), ` ${page.cluster} What is shown is the last known state.`));
  drawFleet();
}

// ── who ───────────────────────────────────────────────────────────────────────────────────────────────────────────

const NEEDED = "You need a token to see the jobs of this service.";

async function enter() {
  if (!token()) return signIn(NEEDED);
  try {
    page.me = await get("/v1/whoami");
    drawBar();
    await Promise.all([address().job ? choose(address().job) : draw(), listJobs()]);
  } catch (error) {
    await failed(error);
  }
}

async function failed(error) {
  if (error instanceof Refused && error.status === 401) {
    await signIn("The service does not accept this token: it is unknown, expired or revoked.");
  } else {
    drawBar();
    if (page.me && !page.job) drawHeadline();
    complain(error instanceof Refused ? error.message : "The service does not answer. Its jobs continue, and this page keeps trying.");
  }
}

let asking = false;

/** Forget the token and the data, and ask for a token. Several requests may be refused at once; one dialog is enough. */
async function signIn(why) {
  if (asking) return;
  asking = true;
  stop();
  choice = null;
  forget();
  Object.assign(page, { me: null, jobs: null, groups: null, limits: null, ...NO_JOB });
  clear();
  const given = await askToken(why);
  asking = false;
  if (!given) return complain("Sign in to see the jobs of this service.");
  keep(given);
  return enter();
}

function signOut() {
  forget();
  location.reload();
}

const mayChange = () => page.me?.role === "operator" || page.me?.role === "admin";

// ── doing ─────────────────────────────────────────────────────────────────────────────────────────────────────────

async function act(action, target) {
  try {
    const asked = await command(action, page.job ?? page.jobs?.find((job) => job.job === target), target);
    if (!asked) return;
    toast(`${asked.what}: requested`);
    lookSoon();
    toast(`${asked.what}: ${await asked.outcome()}`);
    await listJobs();
    lookSoon();
  } catch (error) {
    toast(`${action} ${target || "plan"}: ${error.message}`);
  }
}

/** A link cannot carry a token, so the page fetches a report first and then saves it. */
async function save(path, name) {
  const address = await file(`${jobPath(page.job.job)}/${path}`);
  h("a", { href: address, download: `${page.job.job}${name}.html` }).click();
  setTimeout(() => URL.revokeObjectURL(address), TOAST_MS);
}

// An address of this page names a job, so this link moves the focus without one.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  place("main").focus();
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (!button) return;
  const { action, target } = button.dataset;
  if (action === "close") button.closest("dialog").close();
  else if (action === "sign-in") signIn(NEEDED);
  else if (action === "sign-out") signOut();
  else if (action === "report") save("report.html", "").catch(failed);
  else if (action === "verdict") save("chaos/runs/latest/report", `-${target}`).catch(failed);
  else act(action, target);
});

// `toggle` does not bubble, so this listener captures it.
document.addEventListener(
  "toggle",
  ({ target }) => target.dataset.merge && merges.toggled(jobPath(page.job.job), target.dataset.merge, target.open).catch(failed),
  true,
);

place("loss").addEventListener("change", ({ target }) => {
  if (target.dataset.beside) beside.toggle(target.dataset.beside, target.checked).then(drawLoss).catch(failed);
});
place("sweep").addEventListener("change", ({ target }) => sweep.choose(target.value, page.jobs).then(drawFleet).catch(failed));
place("sweep").addEventListener("click", ({ target }) => {
  const head = target.closest("button[data-sort]");
  if (!head) return;
  sweep.sortBy(head.dataset.sort);
  drawFleet();
});
place("jobs").addEventListener("change", (event) => visit(event.target.value));
place("inspection").addEventListener("change", ({ target }) => {
  if (target.dataset.choice === "log") location.hash = `${views.addressOf(page.job.job, "logs")}/${target.value}`;
});
window.addEventListener("hashchange", ({ oldURL }) => {
  const before = new URL(oldURL).hash.slice(1).split("/")[0];
  if (before !== location.hash.slice(1).split("/")[0]) moved();
  go().catch(failed);
});

/** Another job, or the fleet, is read from its beginning. The focus stays on what is still there. */
function moved() {
  scrollTo(0, 0);
  if (place("main").contains(document.activeElement)) place("main").focus({ preventScroll: true });
}

// ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────────────

function draw() {
  const { part, item } = address();
  drawBar();
  if (!page.me) return;
  document.body.dataset.view = !address().job ? "fleet" : !page.job ? "none" : part ? "part" : "job";
  document.body.classList.toggle("ready", Boolean(page.job) || (!address().job && page.jobs !== null));
  drawHeadline();
  if (!page.job) return drawFleet();
  document.title = `${page.job.job} · ${page.job.state} · atoll`;
  if (part) fill(place("inspection"), inspection.view(page.job, part, item, mayChange()));
  else drawJob(page.job);
}

function drawHeadline() {
  const { job: name, part } = address();
  const { job } = page;
  const summary = page.jobs?.find((one) => one.job === name);
  if (job) fill(place("headline"), views.headline(job, mayChange() ? fleet.jobButtons(job) : [], page.checkpoints), navigation(job.job, part));
  else if (name && summary) fill(place("headline"), views.lastKnown(summary));
  else fill(place("headline"), h("div", { class: "title" }, h("h1", {}, name || "Training jobs")), name && page.me && h("p", { class: "nothing" }, "Loading…"));
}

function drawFleet() {
  if (!page.me) return;
  drawBar();
  if (page.job) return;
  if (address().job) return drawHeadline();
  const now = Date.now() / 1000;
  const found = fleet.problems({ ...page, now });
  const running = page.jobs?.filter((job) => job.state === "running").length ?? 0;
  document.title = `${plural(running, "job")} running, ${plural(found.length, "problem")} · atoll`;
  document.body.dataset.view = "fleet";
  document.body.classList.toggle("ready", page.jobs !== null);
  fill(place("problems"), fleet.problemsView(found, page.jobs !== null && (page.groups !== null || page.groupsLost || page.cluster !== null)));
  fill(place("overview"), fleet.jobsView(page.jobs, now));
  fill(place("sweep"), sweep.view(page.jobs));
  fill(place("queue"), fleet.queueView(page.jobs, mayChange()));
  fill(place("nodes"), fleet.nodesView(page.groups, page.groupsLost || page.cluster !== null, page.limits, now, mayChange()));
}

function drawJob(job) {
  fill(place("islands"), views.islands(job, mayChange()));
  drawLoss();
  drawChart("goodput", "Where island time went", "Productive time is time that reached a merge.", charts.goodputChart);
  fill(place("diagnosis"), diagnosis.view(job));
  fill(place("cost"), views.cost(job));
  drawChart("timeline", "Islands over time", "× marks a loss.", charts.timelineChart);
  fill(place("lines"), views.lines(job));
  const alive = !FINAL.has(job.state);
  fill(place("groups"), alive && page.groups?.length > 0 && groups(page.groups, job, mayChange()));
  if (!page.looked) return drawUnknown(alive && job.state !== "queued");
  const running = alive && job.state !== "queued";
  fill(place("chaos"), (running || page.run) && chaos(page.run, job, mayChange() && running));
  drawMerges();
  fill(place("commands"), views.commands(page.commands, !alive));
}

/** Show "Loading…" for parts that have not been fetched yet, instead of calling them empty. */
function drawUnknown(alive) {
  for (const [id, title] of [["chaos", alive && "Chaos"], ["merges", "Last merges"], ["commands", "Commands"]]) {
    fill(place(id), title && [h("h2", { id: `${id}-title` }, title), h("p", { class: "nothing" }, "Loading…")]);
  }
}

function clear() {
  document.title = "atoll";
  document.body.classList.remove("ready");
  fill(place("headline"), h("h1", {}, "Training jobs"));
  drawBar();
}

function drawChart(id, title, about, chart) {
  const panel = place(id);
  if (!panel.firstChild) fill(panel, h("h2", { id: `${id}-title` }, title)); // an empty panel has no width
  const style = getComputedStyle(panel);
  const width = Math.floor(panel.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
  const drawn = chart(page.job, width);
  fill(panel, drawn && [h("h2", { id: `${id}-title` }, title), h("p", { class: "sub" }, about), drawn]);
}

function drawLoss() {
  const shown = page.job.job;
  const chart = (job, width) => {
    const curves = charts.lossChart(job, width, beside.curves(shown));
    return curves && [curves, beside.view(page.jobs ?? [], shown)];
  };
  drawChart("loss", "Loss", "Held-out loss of the merged parameters.", chart);
}

function drawMerges() {
  fill(place("merges"), merges.view(page.job));
}

function drawBar() {
  const picker = place("jobs");
  fill(picker, views.jobOptions(page.jobs, page.job?.job));
  picker.value = page.job?.job ?? "";
  picker.disabled = !page.jobs?.length;
  fill(place("live"), page.job && views.liveBadge(page.live));
  fill(place("who"), views.who(page.me, token() !== null));
}

/** Announce changes of state to screen readers, but not every figure. */
function announce(before, now, runBefore, run) {
  const known = new Map(before?.islands.map((island) => [island.island, looks(island).word]));
  const changed = now.islands.filter((island) => known.has(island.island) && known.get(island.island) !== looks(island).word);
  const told = changed.map((island) => `${island.island} is ${looks(island).word}.`);
  if (before && before.state !== now.state) told.push(`The job is ${now.state}.`);
  if (run && runBefore && runBefore.state !== run.state) told.push(`The plan ${run.plan} is ${run.state}.`);
  if (told.length) fill(place("announcer"), told.join(" "));
}

let shownToast = null;

function toast(words) {
  clearTimeout(shownToast);
  fill(place("toast"), h("p", {}, sentence(words)));
  shownToast = setTimeout(() => fill(place("toast")), TOAST_MS);
}

function complain(words) {
  fill(place("problem"), words && h("p", { class: "notice bad" }, words));
}

let listings = 0;

/** The fleet is listed each time, and beside a job every second time. */
function tick() {
  checkCluster();
  listings += 1;
  if (!address().job || !page.job || listings % 2 === 0) listJobs().catch(failed);
}

new ResizeObserver(() => page.job && draw()).observe(place("main"));
document.addEventListener("visibilitychange", () => (checkCluster(), listJobs().catch(failed), lookSoon()));
setInterval(() => page.live === "live" || page.live === "ended" || lookSoon(), LOOK_WITHOUT_STREAM_EVERY_MS);
setInterval(tick, LIST_EVERY_MS);
checkCluster();
enter();
