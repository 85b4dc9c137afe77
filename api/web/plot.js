/**
 * A small set of SVG helpers for plots: scales, ticks, axes. They turn coordinates into elements.
 *
 * A drawing uses the pixels of its panel, so text has the page's size at every width. Colours are classes, which the style
 * sheet defines for light and dark. The same ideas as orchestrator/report/page.py.
 */

import { h, svg } from "./dom.js";

/** Maps [low, high] onto [start, stop] of the drawing. */
export function scale(low, high, start, stop) {
  const span = high - low || 1;
  const place = (value) => start + ((value - low) / span) * (stop - start);
  return Object.assign(place, { low, high, start, stop });
}

/** Round values inside the scale's range, about `about` of them. */
export function ticks({ low, high }, about) {
  if (high <= low) return [low];
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const many = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: many }, (_, n) => (first + n) * step);
}

export const text = (x, y, words, anchor = "start", kind = "tick") =>
  svg("text", { x: fixed(x), y: fixed(y), "text-anchor": anchor, class: kind }, words);

export const line = (x1, y1, x2, y2, kind) =>
  svg("line", { x1: fixed(x1), y1: fixed(y1), x2: fixed(x2), y2: fixed(y2), class: kind });

/** A filled rectangle with a tooltip. */
export const box = (x, y, width, height, kind, told) =>
  svg("rect", { x: fixed(x), y: fixed(y), width: fixed(Math.max(0, width)), height, rx: 2, class: kind }, title(told));

export const dot = (x, y, radius, kind, told) =>
  svg("circle", { cx: fixed(x), cy: fixed(y), r: radius, class: kind }, title(told));

export const path = (points, kind) =>
  svg("path", { d: `M${points.map(([x, y]) => `${fixed(x)} ${fixed(y)}`).join("L")}`, class: kind });

/** Ticks below `y`, and the name of the axis at its right end. */
export function xAxis(across, y, say, name) {
  const marks = ticks(across, Math.max(2, (across.stop - across.start) / 90));
  return [
    line(across.start, y, across.stop, y, "axis"),
    marks.map((tick) => text(across(tick), y + 17, say(tick), "middle")),
    text(across.stop, y + 35, name, "end"),
  ];
}

/** Grid lines between `left` and `right` with their values on the left. */
export const yAxis = (up, left, right, say) =>
  ticks(up, 4).map((tick) => [line(left, up(tick), right, up(tick), "grid"), text(left - 7, up(tick) + 4, say(tick), "end")]);

/** A whole drawing; `told` is its text for screen readers. */
export const drawing = (width, height, told, ...parts) =>
  svg("svg", { class: "drawing", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": told }, ...parts);

/** Colour keys as wrapping text. */
export const legend = (entries) =>
  h("p", { class: "legend" }, entries.map(([kind, words]) => h("span", { class: "key" }, swatch(kind), words)));

export const swatch = (kind) =>
  svg("svg", { class: "swatch", viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("rect", { width: 12, height: 12, rx: 3, class: kind }));

const title = (told) => told && svg("title", {}, told);
const fixed = (value) => Number(value.toFixed(1));
