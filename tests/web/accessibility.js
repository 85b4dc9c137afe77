/* What axe-core does not look at, told by looking at the page: names of groups, tables, sizes, contrast in drawings.

   The rules are WCAG 2.2's, levels A and AA: 1.1.1, 1.3.1, 1.4.3, 1.4.11, 2.5.8, 4.1.2, 4.1.3. */
() => {
  const faults = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const told = (element) => element.outerHTML.replace(/\s+/g, " ").slice(0, 90);
  const modal = document.querySelector("dialog[open]");
  const reached = (element) => !modal || modal.contains(element);
  const visible = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0 && !element.closest(".hidden, .skip:not(:focus)");
  const blamed = (element, why) => faults.push(`${why}: ${told(element)}`);

  // ── structure ──
  for (const attribute of ["aria-labelledby", "aria-describedby"]) {
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
  if (!document.querySelector("[aria-live='polite']")) faults.push("nothing is told to a screen reader");

  // ── names ──
  const nameOf = (element) => {
    const by = element.getAttribute("aria-labelledby")?.split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join(" ");
    const labels = [...(element.labels ?? [])].map((label) => label.textContent).join(" ");
    return (by || element.getAttribute("aria-label") || labels || "").trim();
  };
  for (const element of all("dialog[open], [role=region], [role=group], progress, section[aria-labelledby]").filter(visible)) {
    if (!nameOf(element)) blamed(element, "it has no name");
  }
  for (const drawing of all("svg:not([role=img])")) {
    if (!drawing.closest("[aria-hidden=true], [role=img]")) blamed(drawing, "a drawing is neither named nor hidden");
  }

  // ── sizes: also of what stands alone, which axe lets be smaller ──
  const controls = all("button, a[href], input, select, textarea, summary, [tabindex='0']").filter((one) => visible(one) && reached(one));
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
  // Text on a drawing, over a page that a dialog covers, or of one letter: there axe does not tell.
  const words = document.createTreeWalker(modal ?? document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const element = words.currentNode.parentElement;
    const text = words.currentNode.nodeValue.trim();
    const ours = modal || element.closest("svg") || text.length === 1;
    if (!text || !ours || element.closest("title, noscript, option, :disabled") || !visible(element)) continue;
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
  return faults;
}
