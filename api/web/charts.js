/**
 * The three charts of a job: held-out loss against tokens, island time by class, and islands over time.
 *
 * Each takes the job as `GET /v1/jobs/{job}` returns it, and the available width. The content of a chart is also given as
 * text: in its label, or in a table beside it.
 */

import { h, row, table } from "./dom.js";
import { box, dot, drawing, legend, line, path, scale, text, xAxis, yAxis } from "./plot.js";
import { CLASSES, FINAL, STATES, count, loss, percent, plain, seconds } from "./words.js";

/** Null for a job that has ended, so that its page has no empty panels. */
const nothing = (job, why) => (FINAL.has(job.state) ? null : h("p", { class: "nothing" }, why));

/** Held-out loss of the merged parameters, the islands' own training loss, and the losses of other jobs. */
export function lossChart(job, width, others = []) {
  const heldOut = job.loss_curve.filter((point) => point.loss !== null).map((point) => [point.tokens, point.loss, point.after_s]);
  const training = (job.statistics.training_loss_curve ?? []).filter((point) => point[1] !== null);
  const beside = others.filter((other) => other.points.length > 0);
  const all = [...heldOut, ...training, ...beside.flatMap((other) => other.points)];
  if (!all.length) return nothing(job, "Nothing has been measured yet.");
  const [low, high] = extent(all.map((point) => point[1]));
  const margin = 0.08 * (high - low || 1);
  const across = scale(0, Math.max(...all.map((point) => point[0]), 1), 40, width - 14);
  const bottom = Math.round(Math.min(310, 0.66 * width));
  const up = scale(low - margin, high + margin, bottom, 8);
  const at = ([tokens, value]) => [across(tokens), up(value)];
  const drawn = drawing(
    width,
    bottom + 40,
    [heldOut.length ? lossWords(heldOut) : "No held-out loss has been measured yet.", ...beside.map(besideWords)].join(" "),
    yAxis(up, across.start, across.stop, plain),
    xAxis(across, bottom, count, "tokens trained, all islands"),
    training.length > 1 && path(training.map(at), "curve training-loss"),
    beside.map((other) => path(other.points.map(at), `curve beside-${other.look}`)),
    heldOut.length > 0 && path(heldOut.map(at), "curve loss"),
    heldOut.length <= 60 && heldOut.map((point) => dot(...at(point), 3, "loss", pointWords(point))),
  );
  const keys = [["loss", "held-out loss, nats per token"]];
  if (training.length > 1) keys.push(["training-loss", "training loss, as reported by islands"]);
  keys.push(...others.map((other) => [`beside-${other.look}`, `${other.job}: ${other.points.length ? loss(other.points.at(-1)[1]) : "not measured yet"}`]));
  return [legend(keys), drawn, textFlaws(job.statistics.data_flaws), bySource(job.statistics.evaluations)];
}

/** The newest loss per byte of text, and per source if there are several. */
function bySource(evaluations) {
  const perByte = evaluations?.bits_per_byte;
  const sources = (evaluations?.sources ?? []).map((one) => row(one.source, [loss(one.loss), loss(one.bits_per_byte)]));
  return [
    Number.isFinite(perByte) && h("p", { class: "soft" }, `Now ${loss(perByte)} bits per byte.`),
    sources.length > 0 && table("Newest held-out loss by source", ["Source", "Nats per token", "Bits per byte"], sources),
  ];
}

/** The parts of their text that islands did not read as they are in the files. */
function textFlaws(flaws) {
  return Boolean(flaws?.remark) && h("p", { class: "soft" }, `Of the text, ${flaws.remark}.`);
}

const besideWords = ({ job, points }) => `${job}: ${pointWords(points.at(-1))}.`;

const pointWords = ([tokens, value, at]) => `${loss(value)} at ${count(tokens)} tokens, ${seconds(at)}`;

function lossWords(points) {
  const [first, last] = [points[0], points[points.length - 1]];
  return `Held-out loss against tokens: ${pointWords(first)}; ${points.length > 1 ? `now ${pointWords(last)}` : "measured once"}.`;
}

const CAUSES_SHOWN = 6;

/** All island time in one bar, by class, and below it a table of what kept islands from being productive. */
export function goodputChart(job, width) {
  const spent = job.goodput.island_seconds;
  if (!spent?.total) return nothing(job, "No island has been placed yet.");
  const shown = Object.keys(CLASSES).filter((name) => spent[name] > 0);
  const across = scale(0, spent.total, 0, width);
  let before = 0;
  const bars = shown.map((name) => {
    const bar = box(across(before), 0, across(spent[name]) - 1, 30, `class-${name}`, `${CLASSES[name]}: ${share(name)}`);
    before += spent[name];
    return bar;
  });
  function share(name) {
    return `${percent(spent[name] / spent.total)}, ${seconds(spent[name])}`;
  }
  const told = `Island time by class: ${shown.map((name) => `${CLASSES[name]} ${percent(spent[name] / spent.total)}`).join(", ")}.`;
  const keys = shown.map((name) => [`class-${name}`, `${CLASSES[name]} ${percent(spent[name] / spent.total)}`]);
  return [drawing(width, 30, told, bars), legend(keys), causesTable(job.goodput.badput_seconds ?? {}, spent.total)];
}

function causesTable(badput, total) {
  const causes = Object.entries(badput).slice(0, CAUSES_SHOWN);
  if (!causes.length) return null;
  const rows = causes.map(([cause, value]) => row(cause, [percent(value / total), seconds(value)]));
  return table("What kept islands from being productive", ["Cause", "Share", "Time"], rows);
}

const ROW = 28;
const LOW_ROW = 17;
/** With more islands the rows are lower, so that the chart fits a screen or two. */
const HIGH_ROWS_MAX = 24;
const UNITS = [
  { name: "seconds", seconds: 1, until: 300 },
  { name: "minutes", seconds: 60, until: 3 * 3600 },
  { name: "hours", seconds: 3600, until: Infinity },
];

/** One row per island, coloured by its state; a cross marks a loss. */
export function timelineChart(job, width) {
  const spans = job.statistics.timeline ?? [];
  if (!spans.length) return nothing(job, "No island has been placed yet.");
  const placed = new Set(spans.map(([island]) => island));
  const islands = job.islands.map((island) => island.island).filter((island) => placed.has(island));
  const pitch = islands.length > HIGH_ROWS_MAX ? LOW_ROW : ROW;
  const bar = pitch === ROW ? ROW - 9 : LOW_ROW - 4;
  const names = Math.min(0.34 * width, 14 + 7.4 * Math.max(...islands.map((name) => name.length)));
  const across = scale(0, Math.max(job.after_s ?? 0, ...spans.map((span) => span[2])), names, width - 14);
  const unit = UNITS.find(({ until }) => across.high <= until);
  const height = 8 + pitch * islands.length;
  const top = (island) => 6 + pitch * islands.indexOf(island);
  const drawn = spans.filter(([island]) => islands.includes(island)).map(([island, from, to, state]) => {
    const told = `${island}: ${STATES[state]?.word ?? state} for ${seconds(to - from)}, from ${seconds(from)}`;
    return box(across(from), top(island), Math.max(across(to) - across(from), 1), bar, `state-${state}`, told);
  });
  const back = (job.statistics.recoveries ?? []).filter(({ island }) => islands.includes(island));
  const losses = back.filter(({ parts }) => parts.detect > 0); // the others were stopped by an operator, and re-added
  const crosses = losses.map(({ island, killed_at: at }) => {
    const [x, y] = [across(at), top(island) + bar / 2];
    return [line(x - 4, y - 4, x + 4, y + 4, "cross"), line(x - 4, y + 4, x + 4, y - 4, "cross")];
  });
  const shown = Object.keys(STATES).filter((state) => spans.some((span) => span[3] === state));
  const picture = drawing(
    width,
    height + 42,
    `Islands over time. ${islands.map((island) => story(island, spans)).join(" ")}`,
    islands.map((name) => text(names - 10, top(name) + bar / 2 + 4.5, shortened(name, names), "end", "label")),
    drawn,
    crosses,
    xAxis(scale(0, across.high / unit.seconds, across.start, across.stop), height, plain, `${unit.name} since the job was created`),
  );
  return [legend(shown.map((state) => [`state-${state}`, STATES[state].word])), picture];
}

/** One island's row in words. */
function story(island, spans) {
  const own = spans.filter((span) => span[0] === island);
  const losses = own.filter((span) => span[3] === "lost").length;
  const training = own.filter((span) => span[3] === "training").reduce((sum, span) => sum + span[2] - span[1], 0);
  return `${island}: trained for ${seconds(training)}${losses ? `, lost ${losses === 1 ? "once" : `${losses} times`}` : ""}.`;
}

function shortened(name, room) {
  const most = Math.max(4, Math.floor((room - 14) / 7));
  return name.length <= most ? name : `${name.slice(0, most - 1)}…`;
}

function extent(values) {
  return [Math.min(...values), Math.max(...values)];
}
