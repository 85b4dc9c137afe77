/**
 * What travels between the islands and the synchroniser: codecs, bytes each way, how busy each line is and what waits for
 * it, and per fragment how much the codec of updates still owes. A view, as those of `views.js`.
 */

import { h, row, table } from "./dom.js";
import { bytes, percent, plural, seconds } from "./words.js";

/** The panel, or nothing where the job does not say what it carried. */
export function lines(job) {
  const carried = job.islands.filter((island) => island.line && !island.spare);
  const merged = job.fragments.filter((fragment) => fragment.update_norm !== null);
  if (!carried.length && !merged.length) return null;
  return [
    h("h2", { id: "lines-title" }, "Lines and codecs"),
    h("p", { class: "soft" }, codecs(job.wire), "Counted since the synchroniser last began."),
    lineTables(carried),
    carried.filter(({ line }) => line.trouble).map(({ island, line }) => h("p", { class: "notice" }, `${island}: ${line.trouble}`)),
    normTables(merged),
  ];
}

/** In a job of more islands those whose lines have most waiting are seen first, and the others on demand. */
const ROWS_MAX = 16;
const HEADS = ["Island", "Up", "Down", "Of it whole", "Queued"];

function lineTables(carried) {
  if (!carried.length) return null;
  const caption = "What each line carried, and how fast while it was busy";
  if (carried.length <= ROWS_MAX) return lineTable(caption, carried);
  const byQueue = [...carried].sort((one, other) => other.line.queued_bytes - one.line.queued_bytes);
  const others = byQueue.slice(ROWS_MAX);
  return [
    lineTable(`${caption}: those with most queued`, byQueue.slice(0, ROWS_MAX)),
    h("details", { "data-key": "other-lines" }, h("summary", {}, `The other ${others.length} lines`), lineTable(caption, others)),
  ];
}

function lineTable(caption, carried) {
  const made = table(caption, HEADS, carried.map(lineRow));
  made.classList.add("line-table");
  return made;
}

const codecs = ({ up, down }) => (up ? `Contributions travel in ${up}, updates in ${down}. ` : "");

function lineRow({ island, line }) {
  const whole = line.down_bytes.values + line.down_bytes.state;
  const down = line.down_bytes.update + whole;
  const queued = line.queued_fragments ? `${plural(line.queued_fragments, "fragment")}, ${bytes(line.queued_bytes)}` : "nothing";
  const cells = [carriedIn(line.up_bytes, line.up_busy_seconds), carriedIn(down, line.down_busy_seconds), down ? percent(whole / down) : "–", queued];
  const made = row(island, cells);
  [...made.children].slice(1).forEach((cell, n) => cell.setAttribute("data-head", HEADS[n + 1]));
  return made;
}

/** How much, and how fast while something was under way. */
const carriedIn = (carried, busy) => `${bytes(carried)}, ${busy > 0 ? `${bytes(carried / busy)}/s for ${seconds(busy)}` : "–"}`;

function normTables(merged) {
  if (!merged.length) return null;
  const made = table("What each fragment's last update changed", ["Fragment", "Norm", "Owed by the codec"], merged.map(normRow));
  if (merged.length <= ROWS_MAX) return made;
  return h("details", { "data-key": "fragments" }, h("summary", {}, `What the last update of each of ${merged.length} fragments changed`), made);
}

function normRow({ fragment, update_norm: update, residue_norm: residue }) {
  return row(`${fragment}`, [update.toPrecision(3), update ? percent(residue / update) : "–"]);
}
