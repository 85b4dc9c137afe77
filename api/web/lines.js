/**
 * The traffic between the islands and the synchroniser: codecs, bytes each way, how busy each line is and what is queued
 * for it, and per fragment how much the codec of updates has not sent yet. A view, like those of `views.js`.
 */

import { h, row, table } from "./dom.js";
import { FINAL, bytes, percent, plural, seconds } from "./words.js";

/** The panel, or null if the job reports no traffic. */
export function lines(job) {
  const ended = FINAL.has(job.state);
  const carried = job.islands.filter((island) => island.line && !island.spare && !(ended && idle(island.line)));
  const merged = job.fragments.filter((fragment) => fragment.update_norm !== null);
  if (!carried.length && !merged.length) return null;
  return [
    h("h2", { id: "lines-title" }, "Lines and codecs"),
    h("p", { class: "soft" }, codecs(job.wire), "Counted since the synchroniser last started."),
    lineTables(carried),
    !ended && carried.filter(({ line }) => line.trouble).map(({ island, line }) => h("p", { class: "notice" }, `${island}: ${line.trouble}`)),
    normTables(merged),
  ];
}

/** Whether the line carried nothing. */
const idle = (line) => !line.up_bytes && !Object.values(line.down_bytes).some(Boolean);

/** With more islands, only the lines with the most queued are shown at once, and the others on demand. */
const ROWS_MAX = 16;
const MOST_QUEUED_SHOWN = 6;
const HEADS = ["Island", "Up", "Down", "Whole values", "Queued"];

function lineTables(carried) {
  if (!carried.length) return null;
  const caption = "Bytes carried by each line, and its speed while busy";
  if (carried.length <= ROWS_MAX) return lineTable(caption, carried);
  const byQueue = [...carried].sort((one, other) => other.line.queued_bytes - one.line.queued_bytes);
  const others = byQueue.slice(MOST_QUEUED_SHOWN);
  return [
    lineTable(`${caption}: the lines with the most queued`, byQueue.slice(0, MOST_QUEUED_SHOWN)),
    h("details", { "data-key": "other-lines" }, h("summary", {}, `The other ${others.length} lines`), lineTable(caption, others)),
  ];
}

function lineTable(caption, carried) {
  const made = table(caption, HEADS, carried.map(lineRow));
  made.classList.add("stacked");
  return made;
}

const codecs = ({ up, down }) => (up ? `Contributions are sent in ${up}, updates in ${down}. ` : "");

function lineRow({ island, line }) {
  const whole = line.down_bytes.values + line.down_bytes.state;
  const down = line.down_bytes.update + whole;
  const queued = line.queued_fragments ? `${plural(line.queued_fragments, "fragment")}, ${bytes(line.queued_bytes)}` : "nothing";
  const cells = [carriedIn(line.up_bytes, line.up_busy_seconds), carriedIn(down, line.down_busy_seconds), down ? percent(whole / down) : "–", queued];
  const made = row(island, cells);
  [...made.children].slice(1).forEach((cell, n) => cell.setAttribute("data-head", HEADS[n + 1]));
  return made;
}

/** How much was carried, and how fast while a transfer was in progress. */
const carriedIn = (carried, busy) => `${bytes(carried)}, ${busy > 0 ? `${bytes(carried / busy)}/s for ${seconds(busy)}` : "–"}`;

function normTables(merged) {
  if (!merged.length) return null;
  const made = table("Each fragment's last update", ["Fragment", "Norm", "Not sent yet"], merged.map(normRow));
  if (merged.length <= ROWS_MAX) return made;
  return h("details", { "data-key": "fragments" }, h("summary", {}, `The last update of each of ${merged.length} fragments`), made);
}

function normRow({ fragment, update_norm: update, residue_norm: residue }) {
  return row(`${fragment}`, [update.toPrecision(3), update ? percent(residue / update) : "–"]);
}
