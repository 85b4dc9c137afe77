/**
 * Numbers and states as text: one vocabulary for the whole page.
 *
 * Responsible for text only, the same as in the report (orchestrator/system/plain.py). It creates no elements.
 */

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** 1234567 → 1.23 M */
export function count(value) {
  if (value === null || value === undefined) return "–";
  const unit = UNITS.find(([limit]) => Math.abs(value) >= limit);
  return unit ? `${Number((value / unit[0]).toPrecision(3))} ${unit[1]}` : `${Math.round(value)}`;
}

/** 1234567 → 1.23 MB */
export const bytes = (value) => (value === null || value === undefined ? "–" : `${count(value)}${Math.abs(value) < 1e3 ? " " : ""}B`);

/** Milliseconds, then seconds up to two minutes, then minutes, then hours. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size < 0.0995) return `${Math.round(value * 1e3)} ms`;
  if (size < 10) return `${value.toFixed(2)} s`;
  if (size < 120) return `${value.toFixed(1)} s`;
  return size < 7200 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
}

/** How long ago, without digits that change too fast to read. */
export function ago(value) {
  if (value === null || value === undefined) return "not yet";
  if (value < 1) return "just now";
  if (value < 120) return `${Math.round(value)} s ago`;
  return value < 7200 ? `${Math.round(value / 60)} min ago` : `${Math.round(value / 3600)} h ago`;
}

/** The same for a job that has ended, relative to its end. */
export function beforeTheEnd(value) {
  if (value === null || value === undefined) return "never";
  return value < 1 ? "at the end" : `${ago(value).replace(" ago", "")} before the end`;
}

export const percent = (ratio) => (ratio === null || ratio === undefined ? "–" : `${(100 * ratio).toFixed(1)} %`);
export const loss = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));
export const plain = (value) => `${Number(value.toPrecision(6))}`;
/** Three digits by `small`, and a large number in full: 20,700 and not 2.07e+4. */
const threeDigits = (value, small) => (value === null || value === undefined ? "–" : Math.abs(value) < 999.5 ? small(value) : value.toLocaleString("en", { maximumSignificantDigits: 3 }));
/** 0.00012345 → 0.000123; 1.2345e-7 → 1.23e-7; 1.5 → 1.5 */
export const significant = (value) => threeDigits(value, (one) => `${Number(one.toPrecision(3))}`);
/** The same with zeros at the end: 1.5 → 1.50 */
export const rate = (value) => threeDigits(value, (one) => one.toPrecision(3));
/** A sum with its currency: with cents, and a small one with three digits. */
export const money = (value, currency) => (value === null || value === undefined ? "–" : `${value > 0 && value < 1 ? plain(Number(value.toPrecision(3))) : value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })} ${currency}`);
export const plural = (number, one) => `${number} ${one}${number === 1 ? "" : "s"}`;
export const sentence = (words) => (words ? `${words[0].toUpperCase()}${words.slice(1)}${/[.!?]$/.test(words) ? "" : "."}` : "");
export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { timeStyle: "medium", hourCycle: "h23" });
export const day = (unix) => new Date(unix * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

/**
 * Every state of an island: its word, its tone (a colour) and its icon. The page never shows one without the others.
 * `flushed` occurs in the timeline only.
 */
export const STATES = {
  training: { word: "training", tone: "good", icon: "play" },
  standby: { word: "standing by", tone: "calm", icon: "pause" },
  draining: { word: "draining", tone: "busy", icon: "down" },
  drained: { word: "drained", tone: "calm", icon: "tick" },
  flushed: { word: "waiting for the end", tone: "calm", icon: "dots" },
  catching_up: { word: "catching up", tone: "busy", icon: "up" },
  starting: { word: "starting", tone: "busy", icon: "dots" },
  placing: { word: "placing", tone: "busy", icon: "dots" },
  waiting: { word: "waiting for a node", tone: "warn", icon: "dots" },
  suspect: { word: "suspect", tone: "warn", icon: "question" },
  lost: { word: "lost", tone: "bad", icon: "cross" },
  failed: { word: "failed", tone: "bad", icon: "cross" },
  stopped: { word: "stopped", tone: "calm", icon: "pause" },
};
/** States that nothing follows once the job has ended. */
const UNFINISHED = new Set(["training", "catching_up", "starting", "placing", "suspect", "lost", "flushed", "draining"]);
const UNKNOWN = { tone: "calm", icon: "question" };

/**
 * How to show an island. A lost island stays red while it is placed and started again: it does not train yet, and a page
 * that is drawn once a second would otherwise miss a short loss.
 */
export function looks(island, ended = false) {
  if (ended && !island.reason && UNFINISHED.has(island.state)) return { word: "ended with the job", tone: "calm", icon: "pause" };
  if (island.spare) return { word: "spare", tone: "calm", icon: "pause" };
  const own = STATES[island.state] ?? { ...UNKNOWN, word: island.state.replaceAll("_", " ") };
  const again = island.incarnation > 1 && (island.state === "placing" || island.state === "starting");
  return again ? { word: `lost, ${own.word} again`, tone: "bad", icon: "cross" } : own;
}

export const CLASSES = {
  productive: "productive",
  in_flight: "in flight",
  discarded: "discarded",
  stalled: "stalled",
  recovering: "recovering",
  starting: "starting",
  down: "down",
};

export const JOB_TONES = {
  starting: "busy", running: "good", finishing: "busy", completed: "good", cancelled: "calm", failed: "bad", queued: "calm",
};

export const FINAL = new Set(["completed", "cancelled", "failed"]);
