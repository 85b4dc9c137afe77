/**
 * The page's one loop: an event arrives → fetch the job, at most once a second → draw what changed.
 *
 * The job's event stream only says *that* something happened. Everything shown comes from `GET /v1/jobs/{job}`, so the page
 * cannot disagree with the service. Without a stream it fetches every few seconds. A hidden tab fetches nothing.
 */

import * as charts from "./charts.js";
import { chaos } from "./chaos.js";
import { command } from "./commands.js";
import { Beside } from "./compare.js";
import { askToken } from "./dialogs.js";
import { fill, h } from "./dom.js";
import { groups } from "./groups.js";
import { Merges } from "./merges.js";
import { Refused, file, forget, get, keep, token } from "./session.js";
import { follow } from "./stream.js";
import * as views from "./views.js";
import { looks, sentence } from "./words.js";

const LOOK_AT_MOST_EVERY_MS = 1000;
const LOOK_WITHOUT_STREAM_EVERY_MS = 5000;
const LIST_EVERY_MS = 10_000;
const TOAST_MS = 8000;
/** Larger than every record's number, so the stream begins with new events. */
const FROM_NOW_ON = 2 ** 53;
const FINAL = new Set(["completed", "cancelled", "failed"]);

const place = (id) => document.getElementById(id);
const page = { me: null, jobs: null, groups: [], job: null, commands: [], run: null, looked: false, live: "connecting" };
const beside = new Beside();
const merges = new Merges(() => place("merges").matches(":hover, :focus-within"), () => page.job && drawMerges());

let stop = () => {};
let timer = null;
let lookedAt = -Infinity;
let looking = false;
let again = false;

// ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────

/** Fetch the job soon: now if the last fetch was at least a second ago, else when it was. */
function lookSoon() {
  if (document.hidden) return;
  if (looking) again = true;
  else if (timer === null) timer = setTimeout(look, Math.max(0, lookedAt + LOOK_AT_MOST_EVERY_MS - performance.now()));
}

async function look() {
  timer = null;
  looking = true;
  lookedAt = performance.now();
  const wanted = page.job?.job;
  try {
    if (wanted) {
      const path = jobPath(wanted);
      const [job, asked, run] = await Promise.all([get(path), get(`${path}/commands`), newestRun(path), merges.look(path)]);
      if (wanted === page.job?.job) show(job, asked.commands, run);
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

function show(job, commands, run) {
  announce(page.job, job, page.run, run);
  Object.assign(page, { job, commands, run, looked: true });
  if (FINAL.has(job.state)) {
    stop();
    page.live = "ended";
  }
  draw();
}

async function choose(name) {
  stop();
  page.live = "connecting";
  if (!page.job) fill(place("headline"), h("div", { class: "title" }, h("h1", {}, name)), h("p", { class: "nothing" }, "Loading…"));
  const job = await get(jobPath(name));
  if (job.job !== page.job?.job) {
    merges.forget();
    Object.assign(page, { commands: [], run: null, looked: false });
  }
  page.job = job;
  history.replaceState(null, "", `#${encodeURIComponent(page.job.job)}`);
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

async function listJobs() {
  if (document.hidden || !page.me) return;
  const [listed, fleet] = await Promise.all([get("/v1/jobs"), get("/v1/node-groups").catch(() => null)]);
  page.jobs = listed.jobs;
  page.groups = fleet?.node_groups ?? page.groups; // keep the last known groups while the cluster does not answer
  await beside.look(page.jobs);
  if (page.job) return drawBar();
  complain(null);
  if (page.jobs.length) await choose(asked() ?? begun(page.jobs).job);
  else draw();
}

/** The newest job that has started: a queued job has nothing to show yet. */
const begun = (jobs) => jobs.find((job) => job.state !== "queued") ?? jobs[0];

/** The job that the address names, if the service has it. */
const asked = () => page.jobs?.find((job) => encodeURIComponent(job.job) === location.hash.slice(1))?.job;

// ── who ───────────────────────────────────────────────────────────────────────────────────────────────────────────

const NEEDED = "You need a token to see the jobs of this service.";

async function enter() {
  if (!token()) return signIn(NEEDED);
  try {
    page.me = await get("/v1/whoami");
    await listJobs();
  } catch (error) {
    await failed(error);
  }
}

async function failed(error) {
  if (error instanceof Refused && error.status === 401) {
    await signIn("The service does not accept this token: it is unknown, expired or revoked.");
  } else {
    drawBar();
    complain(error instanceof Refused ? error.message : "The service does not answer. Its jobs continue, and this page keeps trying.");
  }
}

let asking = false;

/** Forget the token and the data, and ask for a token. Several requests may be refused at once; one dialog is enough. */
async function signIn(why) {
  if (asking) return;
  asking = true;
  stop();
  forget();
  page.me = page.job = page.jobs = null;
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
    const asked = await command(action, page.job, target);
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
place("jobs").addEventListener("change", (event) => choose(event.target.value).catch(failed));
window.addEventListener("hashchange", () => asked() && choose(asked()).catch(failed));

// ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────────────

function draw() {
  drawBar();
  const { job } = page;
  if (!job) {
    if (page.jobs) fill(place("headline"), h("div", { class: "title" }, h("h1", {}, "No jobs yet")), h("p", { class: "lead" }, "Submit one with ", h("code", {}, "atoll submit"), "; it appears here."));
    return;
  }
  document.title = `${job.job} · ${job.state} · atoll`;
  document.body.classList.add("ready");
  fill(place("headline"), views.headline(job));
  fill(place("islands"), views.islands(job, mayChange()));
  drawLoss();
  drawChart("goodput", "Where island time went", "Productive time is time that reached a merge.", charts.goodputChart);
  drawChart("timeline", "Islands over time", "× marks a loss.", charts.timelineChart);
  fill(place("lines"), views.lines(job));
  const alive = !FINAL.has(job.state);
  fill(place("groups"), alive && page.groups.length > 0 && groups(page.groups, job, mayChange()));
  if (!page.looked) return drawUnknown(alive && job.state !== "queued");
  const running = alive && job.state !== "queued";
  fill(place("chaos"), (running || page.run) && chaos(page.run, job, mayChange() && running));
  drawMerges();
  fill(place("commands"), views.commands(page.commands));
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
  const style = getComputedStyle(panel);
  const width = Math.floor(panel.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
  fill(panel, h("h2", { id: `${id}-title` }, title), h("p", { class: "sub" }, about), chart(page.job, width));
}

function drawLoss() {
  const shown = page.job.job;
  const chart = (job, width) => [charts.lossChart(job, width, beside.curves(shown)), beside.view(page.jobs ?? [], shown)];
  drawChart("loss", "Loss", "Held-out loss of the merged parameters.", chart);
}

function drawMerges() {
  fill(place("merges"), merges.view(page.job));
}

function drawBar() {
  const picker = place("jobs");
  fill(picker, views.jobOptions(page.jobs, page.job?.job));
  if (page.job) picker.value = page.job.job;
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

new ResizeObserver(() => page.job && draw()).observe(place("main"));
document.addEventListener("visibilitychange", () => (listJobs().catch(failed), lookSoon()));
setInterval(() => page.live === "live" || page.live === "ended" || lookSoon(), LOOK_WITHOUT_STREAM_EVERY_MS);
setInterval(() => listJobs().catch(failed), LIST_EVERY_MS);
enter();
