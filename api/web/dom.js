/**
 * Elements as values, and one function that updates the document to match them.
 *
 * A view returns new elements; `fill` changes the document only where it differs, so that focus, selection and open
 * disclosures stay. Children with the same `data-key` are the same element, even if their order changes. Nothing here ever
 * parses HTML: text is text, so a name that a user chose cannot become markup.
 */

const SVG = "http://www.w3.org/2000/svg";
const READER_OWNS = new Set(["open"]);

/** An HTML element. Attributes that are null or false are omitted; true means present. */
export const h = (name, attributes, ...children) => build(document.createElement(name), attributes, children);

/** An SVG element. */
export const svg = (name, attributes, ...children) => build(document.createElementNS(SVG, name), attributes, children);

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== "");
}

/** Give `parent` these children. */
export function fill(parent, ...children) {
  const keyed = new Map([...parent.childNodes].filter(keyOf).map((child) => [keyOf(child), child]));
  let at = parent.firstChild;
  for (const child of present(children)) {
    const wanted = child instanceof Node ? child : document.createTextNode(child);
    const before = keyOf(wanted) ? keyed.get(keyOf(wanted)) : at;
    if (!before || !alike(before, wanted)) {
      parent.insertBefore(wanted, at);
    } else {
      if (before === at) at = at.nextSibling;
      else parent.insertBefore(before, at);
      become(before, wanted);
    }
  }
  while (at) {
    const surplus = at;
    at = at.nextSibling;
    surplus.remove();
  }
}

const keyOf = (node) => node.dataset?.key;
const alike = (one, other) => one.nodeName === other.nodeName && keyOf(one) === keyOf(other);

function become(node, wanted) {
  if (node.nodeType === Node.TEXT_NODE) {
    if (node.nodeValue !== wanted.nodeValue) node.nodeValue = wanted.nodeValue;
    return;
  }
  for (const { name } of [...node.attributes]) {
    if (!wanted.hasAttribute(name) && !READER_OWNS.has(name)) node.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
  fill(node, ...wanted.childNodes);
}

const PATHS = {
  play: "M5 3.5v9l7.5-4.5z",
  dots: "M3 8h.01M8 8h.01M13 8h.01",
  up: "M8 13V3.5M4 7.5l4-4 4 4",
  down: "M8 3v9.5M4 8.5l4 4 4-4",
  question: "M5.5 5.5a2.5 2.5 0 1 1 3.6 2.3c-.8.4-1.1.9-1.1 1.7M8 12.5h.01",
  cross: "M4 4l8 8M12 4l-8 8",
  pause: "M5.5 3.5v9M10.5 3.5v9",
  tick: "M3 8.5l3.5 3.5L13 4.5",
};

/** A small icon beside a word with the same meaning. */
export function icon(name) {
  const kind = name === "play" ? "icon solid" : "icon";
  return svg("svg", { class: kind, viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: PATHS[name] }));
}

/** A state as colour, icon and word at once. */
export function badge(tone, iconName, word) {
  return h("span", { class: `badge ${tone}` }, icon(iconName), word);
}

/** A row of a table of figures: its name, then the figures. */
export const row = (name, cells) => h("tr", { "data-key": name }, h("th", { scope: "row" }, name), cells.map((cell) => h("td", {}, cell)));

/** A small table of figures with a caption. */
export function table(caption, heads, rows) {
  const head = heads.map((name) => h("th", { scope: "col" }, name));
  return h("table", { class: "shares" }, h("caption", {}, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows));
}
