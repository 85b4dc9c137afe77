/**
 * The commands that an operator can give on the page: the question before each, the request, and its outcome.
 */

import { consequences } from "./chaos.js";
import { choosePlan, confirm } from "./dialogs.js";
import { counts } from "./groups.js";
import { get, patch, post } from "./session.js";
import { plural } from "./words.js";

const QUESTIONS = {
  kill: {
    text: "Its process gets a SIGKILL now, without warning. Work that is not in a merge yet is lost. The other islands continue to train.",
    box: "Do not place it again until it is re-added",
    verb: "Kill",
    danger: true,
  },
  drain: {
    text: "It offers its work, waits until that is merged, and then stops. Nothing is lost.",
    verb: "Drain",
  },
  freeze: {
    text: "Chaos: its process is stopped (SIGSTOP) for this long, and then continues by itself. The other islands should not be affected.",
    field: { label: "Seconds", value: 10, min: 1, max: 3600 },
    verb: "Freeze",
    danger: true,
  },
  readd: {
    text: "It is placed again now, and catches up before it contributes.",
    verb: "Re-add",
  },
  scale: {
    text: "New islands catch up before they contribute. Islands that leave are drained, the last first, and their work is kept.",
    verb: "Scale",
  },
  cordon: {
    text: "No job places anything new there until it is uncordoned. Islands that train there continue; islands that are lost there wait.",
    verb: "Cordon",
  },
  uncordon: {
    text: "Islands are placed there again, starting with those that wait for it.",
    verb: "Uncordon",
  },
  cancel: {
    text: "It stops without waiting for the work in flight. A job that has started still writes its report; what has merged is kept.",
    verb: "Cancel",
    dismiss: "Keep the job",
    danger: true,
  },
  finish: {
    text: "Islands stop stepping and give their last work. Once that is merged, the job is completed, with its parameters and its report.",
    verb: "Finish",
    dismiss: "Train on",
  },
  settings: {
    text: "Islands use them from their next boundary between two steps on. The job refuses what is outside its bounds.",
    verb: "Change the settings of",
  },
  priority: {
    text: "Jobs of higher priority start first.",
    verb: "Change the priority of",
  },
  upgrade: {
    text: "Once a checkpoint is complete, its synchroniser restarts in the release of this service. Islands continue to train. If it cannot start, the job continues in its present release.",
    verb: "Upgrade",
  },
  checkpoint: {
    text: "It is taken while training continues.",
    verb: "Take a checkpoint of",
  },
  rollback: {
    text: "Later merges are undone, and their tokens count as discarded. Every island adopts the parameters of the checkpoint.",
    verb: "Roll back to checkpoint",
    danger: true,
  },
  end: {
    text: "No further fault is injected, stopped islands continue, and the job keeps running. The plan will have no verdict.",
    verb: "End",
    danger: true,
  },
};
/** The words on the button that confirms, where they differ from the question. */
const BUTTONS = { cancel: "Cancel the job", finish: "Finish the job", settings: "Change", priority: "Change", checkpoint: "Take it", rollback: "Roll back" };
const PRIORITY_MAX = 100;
const DECIDED_WITHIN_MS = 15_000;
const LOOK_EVERY_MS = 400;

/**
 * Asks for confirmation and sends the command. Returns `{what, outcome}`, where calling `outcome` waits for the result, or
 * null if the operator cancelled. `job` is null for an action on a node group.
 */
export async function command(action, job, target) {
  const where = `/v1/jobs/${encodeURIComponent(job?.job ?? target)}`;
  if (action === "chaos") return startPlan(job, where);
  const question = QUESTIONS[action];
  const field = action === "scale" ? islandsField(job, target) : action === "priority" ? priorityField(job) : question.field;
  const fields = action === "settings" ? settingFields(await get(where)) : []; // the page's copy may be seconds old
  const { go, ticked, number, numbers } = await confirm({ ...question, ...(BUTTONS[action] && { verb: BUTTONS[action] }), field, fields, title: `${question.verb} ${target}?` });
  if (!go) return null;
  const what = `${action} ${target}`;
  switch (action) {
    case "cordon":
    case "uncordon": {
      const { node_group: group } = await post(`/v1/node-groups/${encodeURIComponent(target)}/${action}`);
      return { what, outcome: async () => (group.cordoned ? "nothing new is placed there" : "islands can be placed there") };
    }
    case "priority": {
      const moved = await patch(where, { priority: number });
      return { what, outcome: async () => `priority ${moved.priority}${moved.queue_position ? `, number ${moved.queue_position} in the queue` : ""}` };
    }
    case "cancel":
      return given(what, await post(`${where}/cancel`));
    case "settings": {
      const changed = fields.filter(({ name, value }) => numbers[name] !== value).map(({ name }) => [name, numbers[name]]);
      return given(what, await post(`${where}/set`, Object.fromEntries(changed)));
    }
    case "finish":
    case "upgrade":
      return given(what, await post(`${where}/${action}`));
    case "checkpoint":
      return given(what, await post(`${where}/checkpoints`));
    case "rollback":
      return given(`roll back to checkpoint ${target}`, await post(`${where}/rollback`, { checkpoint: Number(target) }));
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
  return { label: "Islands", value: wanted, min: 0, max: most, hint: `Now ${wanted}, at most ${most} by the job's specification.` };
}

/** What `atoll set` changes, with its present values. A grace window without a limit is left out. */
function settingFields({ settings: { lr_ratio, quorum, grace, interval, cost }, goodput }) {
  return [
    { name: "lr_ratio", label: "Learning rate, as a ratio of the specification's", value: lr_ratio, step: "any" },
    { name: "quorum", label: "Quorum", value: quorum, step: 1 },
    grace !== null && { name: "grace", label: "Grace window, in steps", value: grace, step: "any" },
    { name: "interval", label: "Steps between offers", value: interval, step: 1 },
    goodput.cost && { name: "cost", label: `Limit of cost, in ${goodput.cost.currency} (empty: as submitted)`, value: cost, step: "any" },
  ].filter(Boolean);
}

function priorityField(job) {
  return { label: "Priority", value: job.priority, min: -PRIORITY_MAX, max: PRIORITY_MAX, hint: `Now ${job.priority}. The default is 0.` };
}

const given = (what, asked) => ({ what, outcome: () => decided(asked) });

/** The job's decision about a command, or "pending" if it takes too long. */
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
