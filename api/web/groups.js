/**
 * The node groups that islands are placed on: which are cordoned, how many islands of the job each has, and the buttons
 * to scale and cordon. Views, like those of `views.js`.
 */

import { badge, h } from "./dom.js";
import { plural } from "./words.js";

const LEFT = new Set(["stopped", "drained", "draining"]);

/** The numbers of the job's islands on a node group: `{training, wanted, most}`. */
export function counts(job, group) {
  const there = job.islands.filter((island) => island.node_group === group && !island.standby);
  return {
    training: there.filter((island) => island.state === "training").length,
    wanted: there.filter((island) => !LEFT.has(island.state)).length,
    most: there.length,
  };
}

/** A line for each node group of the fleet; nothing once the job has ended. */
export function groups(all, job, mayChange) {
  return [
    h("h2", { id: "groups-title" }, "Node groups"),
    h("p", { class: "sub" }, "No job places new islands on a cordoned group. Islands that train there continue."),
    h("ul", { class: "rows" }, all.map((group) => line(group, counts(job, group.name), mayChange, job.state !== "queued"))),
  ];
}

function line(group, islands, mayChange, scales) {
  const takes = group.cordoned ? badge("warn", "pause", `cordoned by ${group.cordoned_by}`) : badge("good", "tick", "accepts islands");
  const spares = islands.most > islands.wanted ? `, ${islands.most} at most` : "";
  const told = islands.most ? `${islands.training} of ${plural(islands.wanted, "island")} training${spares}` : "no island of this job";
  return h(
    "li",
    { class: "row", "data-key": `group-${group.name}` },
    h("span", { class: "row-name" }, h("b", {}, group.name), " ", h("span", { class: "soft" }, group.region === group.name ? null : group.region)),
    h("span", { class: "row-told" }, told),
    takes,
    mayChange &&
      h(
        "span",
        { class: "buttons" },
        scales && islands.most > 0 && button("scale", "Scale", group.name),
        group.cordoned ? button("uncordon", "Uncordon", group.name) : button("cordon", "Cordon", group.name),
      ),
  );
}

const button = (action, words, group) =>
  h("button", { type: "button", "data-key": action, "data-action": action, "data-target": group, "aria-label": `${words} ${group}` }, words);
