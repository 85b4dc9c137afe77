/**
 * What an operator may ask of an island from the page: the question before it, the request, and what became of it.
 */

import { confirm } from "./dialogs.js";
import { get, post } from "./session.js";

const QUESTIONS = {
  kill: {
    text: "Its process gets a SIGKILL, now and without warning. Work that is not in a merge yet is lost. The other islands go on training.",
    box: "Keep it away until it is re-added",
    verb: "Kill",
    danger: true,
  },
  drain: {
    text: "It offers the work it has, waits until that is in a merge, and then stops. Nothing is lost.",
    verb: "Drain",
  },
  freeze: {
    text: "Chaos: its process is stopped (SIGSTOP) for so long, and then goes on by itself. The others should not notice.",
    field: { label: "Seconds", value: 10, min: 1, max: 3600 },
    verb: "Freeze",
    danger: true,
  },
  readd: {
    text: "It is placed again now. It catches up before it contributes.",
    verb: "Re-add",
  },
};
const DECIDED_WITHIN_MS = 15_000;
const LOOK_EVERY_MS = 400;

/** Asks whether it is meant, and hands the command in. Answers with it, or with null if it was not meant. */
export async function command(action, job, island) {
  const question = QUESTIONS[action];
  const { go, ticked, number } = await confirm({ ...question, title: `${question.verb} ${island}?` });
  if (!go) return null;
  const where = `/v1/jobs/${encodeURIComponent(job)}`;
  if (action === "freeze") return post(`${where}/chaos/faults`, { kind: "stop", island, duration_s: number });
  return post(`${where}/islands/${encodeURIComponent(island)}/${action}`, action === "kill" ? { restart: !ticked } : undefined);
}

/** The command once the job has decided on it; as it stands if that takes too long. */
export async function outcome(given) {
  const where = `/v1/jobs/${encodeURIComponent(given.job)}/commands/${encodeURIComponent(given.command)}`;
  const until = performance.now() + DECIDED_WITHIN_MS;
  let now = given;
  while (["pending", "undelivered"].includes(now.state) && performance.now() < until) {
    await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY_MS));
    now = await get(where);
  }
  return now;
}
