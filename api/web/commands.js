/**
 * What an operator may ask from the page: the question before it, the request, and what became of it.
 */

import { consequences } from "./chaos.js";
import { choosePlan, confirm } from "./dialogs.js";
import { counts } from "./groups.js";
import { get, post } from "./session.js";
import { plural } from "./words.js";

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
  scale: {
    text: "Islands that come catch up before they contribute. Those that leave are drained, the last first; their work is kept.",
    verb: "Scale",
  },
  cordon: {
    text: "Nothing new is placed there, in any job, until it is uncordoned. What trains there goes on; what is lost there waits.",
    verb: "Cordon",
  },
  uncordon: {
    text: "Islands are placed there again, and at once those that wait for it.",
    verb: "Uncordon",
  },
  end: {
    text: "No further fault is injected, and stopped islands continue. The job runs on. The plan will have no verdict.",
    verb: "End",
    danger: true,
  },
};
const DECIDED_WITHIN_MS = 15_000;
const LOOK_EVERY_MS = 400;

/**
 * Asks whether it is meant, and hands it in. Answers with `{what, outcome}`, the second to be called for what became of it;
 * or with null if it was not meant.
 */
export async function command(action, job, target) {
  const where = `/v1/jobs/${encodeURIComponent(job.job)}`;
  if (action === "chaos") return startPlan(job, where);
  const question = QUESTIONS[action];
  const field = action === "scale" ? islandsField(job, target) : question.field;
  const { go, ticked, number } = await confirm({ ...question, field, title: `${question.verb} ${target}?` });
  if (!go) return null;
  const what = `${action} ${target}`;
  switch (action) {
    case "cordon":
    case "uncordon": {
      const { node_group: group } = await post(`/v1/node-groups/${encodeURIComponent(target)}/${action}`);
      return { what, outcome: async () => (group.cordoned ? "nothing new is placed there" : "it takes islands") };
    }
    case "end": {
      const ended = await post(`${where}/chaos/runs/latest/stop`);
      return { what, outcome: async () => ended.reason };
    }
    case "scale":
      return given(what, await post(`${where}/scale`, { node_group: target, count: number }));
    case "freeze":
      return given(what, await post(`${where}/chaos/faults`, { kind: "stop", island: target, duration_s: number }));
  }
  const options = action === "kill" ? { restart: !ticked } : undefined;
  return given(what, await post(`${where}/islands/${encodeURIComponent(target)}/${action}`, options));
}

async function startPlan(job, where) {
  const { plans } = await get("/v1/chaos/plans");
  const plan = await choosePlan(plans, job.job, consequences);
  if (!plan) return null;
  const run = await post(`${where}/chaos/runs`, { shipped: plan.name });
  return { what: `start ${plan.name}`, outcome: async () => `${plural(run.fault_count, "fault")} planned` };
}

function islandsField(job, group) {
  const { wanted, most } = counts(job, group);
  return { label: "Islands", value: wanted, min: 0, max: most, hint: `It has ${wanted}; at most ${most}, as the job's specification says.` };
}

const given = (what, asked) => ({ what, outcome: () => decided(asked) });

/** What the job decided about a command; that it is pending if it takes too long. */
async function decided(asked) {
  const where = `/v1/jobs/${encodeURIComponent(asked.job)}/commands/${encodeURIComponent(asked.command)}`;
  const until = performance.now() + DECIDED_WITHIN_MS;
  let now = asked;
  while (["pending", "undelivered"].includes(now.state) && performance.now() < until) {
    await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY_MS));
    now = await get(where);
  }
  return `${now.state}${now.detail ? `, ${now.detail}` : ""}`;
}
