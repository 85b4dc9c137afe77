/* What can be told of a page's accessibility by looking at it: names, structure, contrast. Answers with a list of faults.

   The rules are WCAG 2.2's, levels A and AA: 1.1.1, 1.3.1, 1.4.3, 1.4.11, 2.4.2, 2.4.6, 2.5.8, 3.1.1, 4.1.2. */
() => {
  const faults = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const told = (element) => element.outerHTML.replace(/\s+/g, " ").slice(0, 90);
  const modal = document.querySelector("dialog[open]");
  const reached = (element) => !modal || modal.contains(element);
  const visible = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0 && !element.closest(".hidden, .skip:not(:focus)");
  const blamed = (element, why) => faults.push(`${why}: ${told(element)}`);

  // ── structure ──
  if (!document.documentElement.lang) faults.push("the document has no language");
  if (!document.title.trim()) faults.push("the document has no title");
  for (const [selector, count] of [["main", 1], ["body > header", 1], ["h1", 1]]) {
    if (all(selector).filter(visible).length !== count) faults.push(`there are ${all(selector).length} ${selector}, not ${count}`);
  }
  const levels = all("main :is(h1, h2, h3, h4, h5, h6)").filter(visible);
  levels.reduce((before, heading) => {
    const level = Number(heading.tagName[1]);
    if (level > before + 1) blamed(heading, `a heading of level ${level} follows one of level ${before}`);
    return level;
  }, 0);
  const ids = all("[id]").map((element) => element.id);
  for (const id of new Set(ids.filter((id, n) => ids.indexOf(id) !== n))) faults.push(`two elements have the id ${id}`);
  for (const attribute of ["aria-labelledby", "aria-describedby", "for"]) {
    for (const element of all(`[${attribute}]`).filter(visible)) {
      for (const id of element.getAttribute(attribute).split(" ")) {
        if (!document.getElementById(id)) blamed(element, `${attribute} names ${id}, which is not there`);
      }
    }
  }
  for (const table of all("table").filter(visible)) {
    if (!table.caption?.textContent.trim()) blamed(table, "a table has no caption");
    for (const cell of table.querySelectorAll("th:not([scope])")) blamed(cell, "a table's heading has no scope");
  }
  for (const list of all("ul, ol")) {
    for (const child of list.children) if (child.tagName !== "LI") blamed(child, "a list holds what is no item");
  }
  if (!document.querySelector("[aria-live='polite']")) faults.push("nothing is told to a screen reader");

  // ── names ──
  const nameOf = (element) => {
    const by = element.getAttribute("aria-labelledby")?.split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join(" ");
    const labels = [...(element.labels ?? [])].map((label) => label.textContent).join(" ");
    const content = ["BUTTON", "A", "SUMMARY"].includes(element.tagName) ? element.textContent : "";
    return (by || element.getAttribute("aria-label") || labels || content || "").trim();
  };
  const controls = all("button, a[href], input, select, textarea, summary, [tabindex='0']").filter((one) => visible(one) && reached(one));
  for (const element of [...controls, ...all("dialog[open], [role=img], [role=region], [role=group], progress, section[aria-labelledby]").filter(visible)]) {
    if (!nameOf(element)) blamed(element, "it has no name");
  }
  for (const image of all("img:not([alt])")) blamed(image, "an image has no text");
  for (const drawing of all("svg:not([role=img])")) {
    if (!drawing.closest("[aria-hidden=true], [role=img]")) blamed(drawing, "a drawing is neither named nor hidden");
  }
  for (const element of all("[aria-hidden=true]")) {
    if (element.querySelector("button, a[href], input, select, [tabindex='0']")) blamed(element, "something hidden can have the focus");
  }
  for (const control of controls.filter((one) => one.getAttribute("aria-label") && one.tagName === "BUTTON")) {
    if (!control.getAttribute("aria-label").includes(control.textContent.trim())) blamed(control, "its name is not what it shows");
  }
  for (const control of controls) {
    const { width, height } = control.getBoundingClientRect();
    const large = control.closest("label")?.getBoundingClientRect().height >= 24;
    if (!large && (width < 24 || height < 24)) blamed(control, `${width} by ${height} pixels are too small to be hit`);
  }

  // ── contrast ──
  const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const parsed = (css) => {
    // A colour has many ways to be written (rgb, color, oklab while it fades); painting one reads them all.
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = css;
    pixel.fillRect(0, 0, 1, 1);
    const [r, g, b, alpha] = pixel.getImageData(0, 0, 1, 1).data;
    return [r, g, b, alpha / 255];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      layers.push(parsed(getComputedStyle(one).backgroundColor));
      if (layers[layers.length - 1][3] === 1) break;
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((n) => n / 255).map((n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const needs = (element, colour, least, what, ground = behind(element)) => {
    const reached = ratio(over(parsed(colour), ground), ground);
    if (reached < least) blamed(element, `${what} has a contrast of ${reached.toFixed(2)}, not ${least}`);
  };
  const words = document.createTreeWalker(modal ?? document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (words.nextNode()) {
    const element = words.currentNode.parentElement;
    if (!words.currentNode.nodeValue.trim() || seen.has(element) || element.closest("title, noscript, option, :disabled") || !visible(element)) continue;
    seen.add(element);
    const style = getComputedStyle(element);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    needs(element, element instanceof SVGElement ? style.fill : style.color, large ? 3 : 4.5, "text");
  }
  for (const control of controls.filter((one) => ["BUTTON", "SELECT"].includes(one.tagName) && !one.classList.contains("quiet"))) {
    needs(control, getComputedStyle(control).borderTopColor, 3, "its border", behind(control.parentElement));
  }
  for (const card of modal ? [] : all(".card")) needs(card, getComputedStyle(card).borderTopColor, 3, "the mark of its state");
  for (const curve of modal ? [] : all(".curve.loss")) needs(curve, getComputedStyle(curve).stroke, 3, "the curve");
  if (!seen.size) faults.push("no text was looked at");
  return faults;
}
