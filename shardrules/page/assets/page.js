// The report page of shardrules: it reads a plan from the JSON in #data and draws it.
//
// Texts in the data are untrusted: they become text nodes or attributes, never markup.
// Drawings are the only exception, and pass through `picture`, which accepts only shapes.
//
// In this order: helpers, the plan, search, small parts, header, findings, map, table, detail,
// audit, autoplan, training, rules, start.

"use strict";

(() => {

  // ------------------------------------------------------------------ helpers

  const $ = (id) => document.getElementById(id);
  const cssValue = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const clamp = (n, low, high) => Math.max(low, Math.min(high, n));

  /** Make an element: el("td.num", {title: "…"}, "text", child). Texts become text nodes. */
  function el(name, props = {}, ...children) {
    const [tag, ...classes] = name.split(".");
    const node = document.createElement(tag);
    if (classes.length) node.className = classes.join(" ");
    for (const [key, value] of Object.entries(props)) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  }

  const button = (name, props, ...children) => el(name, { type: "button", ...props }, ...children);

  const count = (n) => Number(n).toLocaleString("en-US");
  const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
  const exact = (n) => plural(n, "byte");
  const size = (n) => el("span", { title: exact(n) }, bytes(n));
  const shapeText = (shape) => shape.length ? shape.join(" × ") : "scalar";

  function percent(part, whole) {
    return `${rounded(whole ? 100 * part / whole : 0, 1)}%`;
  }

  function duration(s) {
    const [scale, unit] = s >= 1 ? [1, "s"] : s >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    return `${Number((s * scale).toPrecision(3))} ${unit}`;
  }

  const SHAPES = new Set(["svg", "g", "rect", "path", "line", "polyline", "polygon", "circle", "ellipse",
    "text", "tspan", "title", "desc", "defs", "pattern", "clipPath", "marker"]);

  /** The element of an SVG text, or null. Scripts, styles, links and handlers are refused. */
  function picture(text, label) {
    const root = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
    if (root.localName !== "svg" || root.querySelector("parsererror")) return null;
    for (const node of [root, ...root.querySelectorAll("*")]) {
      if (!SHAPES.has(node.localName)) node.remove();
      for (const { name } of [...node.attributes]) if (/^on|href$|^style$/i.test(name)) node.removeAttribute(name);
    }
    root.setAttribute("role", "img");
    root.setAttribute("aria-label", label);
    return document.importNode(root, true);
  }

  // ------------------------------------------------------------------ the plan

  const data = JSON.parse($("data").textContent);
  const { rows, paths, row_of: rowOf, totals } = data;
  const rowOfLeaf = (leaf) => rows[rowOf[leaf]];
  const leavesOf = rows.map(() => []);
  rowOf.forEach((row, leaf) => leavesOf[row].push(leaf));

  // The seven or eight most frequent specs have a colour each, the others share one, and replicated
  // arrays are hatched. Neighbours in this order of colours differ most.
  const SPEC_COLOURS = ["--c4", "--c1", "--c2", "--c0", "--c6", "--c5", "--c3", "--c7"];
  const kinds = makeKinds();
  const kindOfRow = [];
  kinds.forEach((kind, at) => kind.rows.forEach((row) => { kindOfRow[row] = at; }));
  const kindOfLeaf = (leaf) => kinds[kindOfRow[rowOf[leaf]]];

  function makeKinds() {
    const bySpec = new Map();
    const whole = [];
    rows.forEach((row, at) => {
      if (row.dims.every(([, blocks]) => blocks <= 1)) whole.push(at);
      else if (bySpec.has(row.spec)) bySpec.get(row.spec).push(at);
      else bySpec.set(row.spec, [at]);
    });
    const kind = (label, css, members) => ({ label, css, rows: members,
      arrays: sum(members.map((at) => rows[at].count)), bytes: sum(members.map((at) => rows[at].count * rows[at].device_bytes)) });
    const specs = [...bySpec].map(([spec, members]) => kind(spec, "", members)).sort((a, b) => b.arrays - a.arrays || b.bytes - a.bytes);
    const rest = specs.length > SPEC_COLOURS.length ? specs.splice(SPEC_COLOURS.length - 1) : [];
    specs.forEach((one, at) => { one.css = SPEC_COLOURS[at]; });
    if (rest.length) specs.push(kind(plural(rest.length, "other spec"), SPEC_COLOURS.at(-1), rest.flatMap((one) => one.rows)));
    return whole.length ? [...specs, kind("replicated", null, whole)] : specs;
  }

  /** The layer of a leaf: its path up to the first index, else its module. */
  function layerOf(path, leaf) {
    const parts = path.split("/");
    const star = rowOfLeaf(leaf).path.split("/").findIndex((part) => part.includes("*"));
    const index = star >= 0 ? star : parts.findIndex((part) => /^\d+$/.test(part));
    return parts.slice(0, index >= 0 && index < parts.length - 1 ? index + 1 : -1).join("/");
  }

  // ------------------------------------------------------------------ search

  const pathTexts = paths.map((path) => path.toLowerCase());
  const rowTexts = rows.map((row) => [row.path, row.spec, row.dtype, row.rule, row.reason].join("\n").toLowerCase());

  /** A test for paths: a star matches any part of one name, and a module all paths inside it. */
  function pathTest(pattern) {
    const source = pattern.split(/\*+/).map((text) => text.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join("[^/]*");
    return new RegExp(`^${source}(/|$)`, "i");
  }

  /** The words of a search. A text in double quotes is a whole path (or module) or a whole spec. */
  function readQuery(query) {
    return [...query.matchAll(/"([^"]+)"?|([^\s"]\S*)/g)].map(([, quoted, word]) => {
      const text = (quoted ?? word).toLowerCase();
      if (word) return { text, row: (row, at) => rowTexts[at].includes(text), leaf: (leaf) => pathTexts[leaf].includes(text) };
      const test = pathTest(quoted);
      return { row: (row) => [row.path, row.spec].some((one) => one.toLowerCase() === text), leaf: (leaf) => test.test(paths[leaf]) };
    });
  }

  const quoted = (path) => path.includes('"') ? path : `"${path}"`;

  /** Which leaves match all terms: one byte per leaf. What the leaves of a row share is tested once a row. */
  function findMatches(terms) {
    const found = new Uint8Array(paths.length).fill(1);
    for (const term of terms) {
      const hits = rows.map(term.row);
      for (let leaf = 0; leaf < found.length; leaf++) {
        if (found[leaf] && !hits[rowOf[leaf]] && !term.leaf(leaf)) found[leaf] = 0;
      }
    }
    return found;
  }

  /** Whether the path of a finding matches any leaf. */
  function leadsSomewhere(path) {
    if (!path) return false;
    const test = pathTest(path);
    return rows.some((row) => row.path === path) || paths.some((one) => test.test(one));
  }

  // ------------------------------------------------------------------ small parts

  const chip = ([name, value]) => el("span.chip", {}, name, value && el("b", {}, value));
  const chips = (pairs, none = "none") => pairs.length ? el("span.chips", {}, pairs.map(chip)) : el("span.muted", {}, none);
  const meshChips = (mesh) => chips(mesh.split(",").filter(Boolean).map((part) => part.split(":")));
  const axisChips = (axes) => chips(axes.split(",").filter(Boolean).map((axis) => [axis.trim()]));
  const code = (text) => el("code", {}, text);
  const muted = (...children) => el("span.muted", {}, ...children);
  const badge = (style, text) => el(`span.badge.${style}`, {}, text);
  const swatch = (css) => css ? el("span.swatch", { style: `--c: var(${css})` }) : el("span.swatch.whole");
  const part = (name, title, ...children) => el(name, {}, el("h3", {}, title), ...children);
  const definitions = (name, pairs) => el(name, {}, pairs.map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value))));

  // It scrolls, so the keyboard must reach it.
  const scrollBox = (name, label, ...children) => el(name, { tabindex: 0, role: "region", "aria-label": label }, ...children);

  /** A bar of parts [name, number, css]; a part of `scale` would fill it. */
  function stackedBar(name, parts, scale) {
    return el(name, { role: "img", "aria-label": parts.map(([text, n]) => `${text} ${bytes(n)}`).join(", ") },
      parts.map(([text, n, css]) => n > 0 && el("i", { style: `--c: var(${css}); width: ${100 * n / scale}%`, title: `${text}: ${exact(n)}` })));
  }

  function keys(parts) {
    return el("ul.keys", {}, parts.map(([text, n, css]) => el("li", {}, swatch(css), text, el("b", { title: exact(n) }, bytes(n)))));
  }

  function moreButton(n, action) {
    const box = el("p.more", {}, button("button.link", { onclick: () => { action(); box.remove(); } }, `Show all ${count(n)}`));
    return box;
  }

  /** A plain table; `columns` are [heading, class]. A button shows the rest of a long one. */
  function plainTable(label, columns, lines, { limit = 12, picked = () => false } = {}) {
    const row = (cells, at) => el(picked(at) ? "tr.picked" : "tr", {}, cells.map((cell, column) => el("td", { class: columns[column][1] }, cell)));
    const head = el("tr", {}, columns.map(([heading, css]) => el(heading ? "th" : "td", { scope: heading ? "col" : null, class: css }, heading)));
    const long = lines.length > limit + 3;
    const body = el("tbody", {}, lines.slice(0, long ? limit : undefined).map(row));
    return scrollBox("div.scroll", label, el("table.plain", { "aria-label": label }, el("thead", {}, head), body),
      long && moreButton(lines.length, () => body.append(...lines.slice(limit).map((cells, at) => row(cells, limit + at)))));
  }

  // ------------------------------------------------------------------ header

  /** The findings of everything that the page shows: of the plan, and of what stands below it. */
  const allFindings = () => [data, ...Object.values(data)].flatMap((part) => part?.findings ?? []);

  function drawHeader() {
    const { total_bytes: whole, device_bytes: each } = totals;
    const best = data.device_count > 1 && whole > 0 && `, ${percent(1, data.device_count)} at best`;
    const found = allFindings();
    const amounts = ["error", "warning", "note"].map((severity) => [severity, found.filter((one) => one.severity === severity).length]);
    const badges = amounts.filter(([, n]) => n).map(([severity, n]) => [badge(severity, plural(n, severity)), " "]);
    const calm = amounts.every(([severity, n]) => severity === "note" || !n) && [badge("good", "no errors, no warnings"), " "];
    $("summary").append(...definitions("dl", [
      ["Mesh", [chips(data.mesh), el("small", {}, plural(data.device_count, "device"))]],
      ["Arrays", count(totals.arrays)],
      ["Total", size(whole)],
      ["Per device", [size(each), el("small", {}, percent(each, whole), " of the total", best)]],
      ["Findings", [calm, ...badges]],
      ["Fingerprint", el("code.hash", { title: data.fingerprint }, data.fingerprint)],
    ]).children);
    $("summary").hidden = false;
  }

  function drawSectionLinks() {
    const links = [["findings", "Findings"], ["treemap", "Map"], ["arrays", "Arrays"], ["audit", "Audit"], ["autoplan", "Autoplan"], ["training", "Training"], ["origin", "Rules"]];
    const amount = (id) => (id === "findings" ? data : data[id])?.findings?.length;
    $("sections").append(...links.filter(([id]) => $(id)).map(([id, text]) => el("a", { href: `#${id}` }, text, amount(id) > 0 && el("b", {}, count(amount(id))))));
  }

  // ------------------------------------------------------------------ findings

  /** One finding. In the full list it links to its arrays; beside its array it has no path. */
  function findingItem(finding, beside = false) {
    const goes = !beside && leadsSomewhere(finding.path);
    // For the keyboard the path is a button; its clicks bubble up here like any other on the item.
    const go = () => String(getSelection()) || page.search(quoted(finding.path));
    const facts = [
      goes ? button("button", { title: "Show its arrays in the table" }, finding.path)
        : !beside && finding.path && code(finding.path),
      finding.count > 1 && `× ${count(finding.count)}`,
      finding.shape && code(shapeText(finding.shape)),
      Number.isInteger(finding.dim) && `dim ${finding.dim}`,
      finding.axis && `axis ${finding.axis}`,
      finding.rule,
      finding.source && code(finding.source),
    ].filter(Boolean);
    return el(`li.finding.${finding.severity}${goes ? ".goes" : ""}`, { onclick: goes && go },
      el("p.what", {}, finding.message, code(finding.code)),
      facts.length > 0 && el("p.facts", {}, facts.map((fact) => el("span", {}, fact))),
      finding.remedy && el("p.remedy", {}, finding.remedy));
  }

  /** Findings by severity: errors and warnings are open, notes are folded. */
  function findingGroups(findings, limit = 30) {
    return [["error", "Errors"], ["warning", "Warnings"], ["note", "Notes"]].map(([severity, title]) => {
      const mine = findings.filter((finding) => finding.severity === severity);
      const items = (from, to) => mine.slice(from, to).map((finding) => findingItem(finding));
      const list = el("ul", {}, items(0, limit));
      return mine.length > 0 && el("details.group", { open: severity !== "note" },
        el("summary", {}, title, badge(severity, count(mine.length))), list,
        mine.length > limit && moreButton(mine.length, () => list.append(...items(limit))));
    }).filter(Boolean);
  }

  function drawFindings() {
    if (!data.findings.length) { $("findings").remove(); return; }
    $("findings").append(...findingGroups(data.findings));
    $("findings").hidden = false;
  }

  // ------------------------------------------------------------------ map

  const LABEL = 16;   // the height of a label, in CSS pixels
  const LABELS = 90;  // at most this many labels of modules
  const GENERAL = new Set(["weight", "kernel", "w", "embedding"]); // names that say less than the module's
  const NAMES = 300;  // at most this many names of arrays
  const SLOW = 12000; // with more boxes, a frame of a moving map takes too long

  function makeMap() {
    const box = document.querySelector(".map");
    const [canvas, names, labels, hover, ring, tip] = box.children;
    const crumbs = document.querySelector(".crumbs");
    const legend = document.querySelector(".legend");
    const context = canvas.getContext("2d");
    const { boxes } = data.treemap;
    // Leaves of one colour are painted together: changing the fill is slow.
    const byKind = paths.map((_, leaf) => leaf).sort((a, b) => kindOfRow[rowOf[a]] - kindOfRow[rowOf[b]]);
    const root = readModules();
    let zoom = root;          // the module that fills the map
    let view = contents(root); // the visible part of the layout
    let wide = 0;
    let high = 0;
    let matches = null;       // one byte per leaf during a search
    let single = null;        // the only kind that the legend shows
    let chosen = -1;
    let moving = 0;

    // ---- geometry

    function readModules() {
      const { width, height, modules } = data.treemap;
      const top = { path: "", x: 0, y: 0, w: width, h: height, bytes: totals.device_bytes, leaves: paths.length, parent: null, inner: [] };
      const known = new Map([["", top]]);
      for (const [path, , x, y, w, h, used, leaves] of modules) {
        if (path === "") continue;
        let above = path;
        do above = above.slice(0, Math.max(0, above.lastIndexOf("/"))); while (!known.has(above));
        const module = { path, x, y, w, h, bytes: used, leaves, parent: known.get(above), inner: [] };
        module.parent.inner.push(module);
        known.set(path, module);
      }
      return top;
    }

    /** The modules one step in. A module that holds only one other module is not a step. */
    function steps(module) {
      let { inner } = module;
      while (inner.length === 1 && inner[0].leaves === module.leaves && inner[0].inner.length) inner = inner[0].inner;
      return inner;
    }

    function boxOf(leaf) {
      return { x: boxes[4 * leaf], y: boxes[4 * leaf + 1], w: boxes[4 * leaf + 2], h: boxes[4 * leaf + 3] };
    }

    function inside({ x, y, w, h }, px, py) {
      return px >= x && py >= y && px < x + w && py < y + h;
    }

    /** What fills the map when zoomed to a module: its modules and arrays, without its own label strip. */
    function contents(module) {
      let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
      const take = ({ x, y, w, h }) => {
        if (!(w > 0 && h > 0 && inside(module, x + w / 2, y + h / 2))) return;
        [left, top, right, bottom] = [Math.min(left, x), Math.min(top, y), Math.max(right, x + w), Math.max(bottom, y + h)];
      };
      module.inner.forEach(take);
      for (let leaf = 0; leaf < paths.length; leaf++) take(boxOf(leaf));
      return right > left ? { x: left, y: top, w: right - left, h: bottom - top } : module;
    }

    /** From the layout to the screen; null for what is not visible. */
    function toScreen({ x, y, w, h }) {
      const [kx, ky] = [wide / view.w, high / view.h];
      const at = { x: (x - view.x) * kx, y: (y - view.y) * ky, w: w * kx, h: h * ky };
      return at.w > 0 && at.h > 0 && at.x < wide && at.y < high && at.x + at.w > 0 && at.y + at.h > 0 ? at : null;
    }

    /** The part of a rectangle that is on the screen; null if that is nothing. */
    function visible(rect) {
      const at = toScreen(rect);
      if (!at) return null;
      const [x, y] = [Math.max(at.x, 0), Math.max(at.y, 0)];
      return { x, y, w: Math.min(at.x + at.w, wide) - x, h: Math.min(at.y + at.h, high) - y };
    }

    function pointed(event) {
      const frame = canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
      const [px, py] = [view.x + x * view.w / wide, view.y + y * view.h / high];
      const leaf = paths.findIndex((_, one) => inside(boxOf(one), px, py));
      return { x, y, leaf, module: steps(zoom).find((module) => inside(module, px, py)) };
    }

    // ---- painting

    const faded = (leaf) => (matches && !matches[leaf]) || (single !== null && kindOfRow[rowOf[leaf]] !== single);

    function paint() {
      const ratio = devicePixelRatio || 1;
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(high * ratio);
      context.scale(ratio, ratio);
      paintBoxes(ratio);
      paintSeams();
    }

    function paintBoxes(ratio) {
      const fills = kinds.map((kind) => kind.css ? cssValue(kind.css) : hatching(ratio));
      let kind = -1;
      for (const leaf of byKind) {
        const at = toScreen(boxOf(leaf));
        if (!at) continue;
        if (kindOfRow[rowOf[leaf]] !== kind) { kind = kindOfRow[rowOf[leaf]]; context.fillStyle = fills[kind]; }
        const thin = Math.min(at.w, at.h);
        const gap = thin > 5 ? 1 : thin > 2 ? 0.5 : 0;
        context.globalAlpha = faded(leaf) ? 0.14 : 1;
        context.fillRect(at.x, at.y, at.w - gap, at.h - gap);
      }
      context.globalAlpha = 1;
    }

    function hatching(ratio) {
      const side = Math.round(6 * ratio);
      const tile = el("canvas", { width: side, height: side });
      const pen = tile.getContext("2d");
      pen.scale(side / 6, side / 6);
      pen.fillStyle = cssValue("--whole");
      pen.fillRect(0, 0, 6, 6);
      pen.strokeStyle = cssValue("--whole-line");
      pen.lineWidth = 1.2;
      for (const x of [-6, 0, 6]) { pen.moveTo(x - 1, 7); pen.lineTo(x + 7, -1); }
      pen.stroke();
      const pattern = context.createPattern(tile, "repeat");
      pattern.setTransform(new DOMMatrix().scale(6 / side));
      return pattern;
    }

    /** Outlines the modules one and two steps in, which boxes may fill to the edge. */
    function paintSeams() {
      context.strokeStyle = cssValue("--bg");
      const seam = (module, width) => {
        const at = toScreen(module);
        if (!at || at.w < 12 || at.h < 12) return;
        context.lineWidth = width;
        context.strokeRect(at.x - 0.5, at.y - 0.5, at.w, at.h);
      };
      for (const module of steps(zoom)) {
        for (const inner of steps(module)) seam(inner, 2);
        seam(module, 3);
      }
    }

    // ---- labels, names, crumbs, legend

    /** Where labels and names are; none is put where it would touch another. */
    function makeRoom() {
      const boxes = [];
      const isFree = (spot) => boxes.every((other) => spot.x >= other.x + other.w + 1 || other.x >= spot.x + spot.w + 1
        || spot.y >= other.y + other.h + 1 || other.y >= spot.y + spot.h + 1);
      /** The first of some spots that is free, which is taken then. */
      return (spots) => {
        const spot = spots.find(isFree);
        if (spot) boxes.push(spot);
        return spot;
      };
    }

    const textWidth = (text, font) => { context.font = font; return Math.ceil(context.measureText(text).width); };
    const inPercent = ({ x, y, w }) => `left: ${100 * x / wide}%; top: ${100 * y / high}%; width: ${100 * w / wide}%`;

    /** Two steps of labels, each a button over its module. A label without room is left out. */
    function findLabels(take) {
      const spots = [];
      const place = (module, above) => {
        const at = visible(module);
        if (!at || spots.length >= LABELS) return;
        const text = module.path.slice(above ? above.path.length + 1 : module.path.lastIndexOf("/") + 1);
        const full = textWidth(text, `${above ? 400 : 650} 11px ${cssValue("--sans")}`) + 11;
        const room = at.w - 5;
        if (room < Math.min(full, 90)) return;
        const ys = [at.y + 1, at.y + LABEL + 3].filter((y) => at.y + at.h - y >= LABEL + 2);
        const spot = take(ys.map((y) => ({ module, text, x: at.x + 2, y, w: Math.min(full, room), h: LABEL, main: !above })));
        if (spot) spots.push(spot);
      };
      const outer = steps(zoom);
      for (const module of outer) place(module, null);
      for (const module of outer) for (const inner of steps(module)) if (inner.leaves > 1) place(inner, module);
      return spots;
    }

    /** The names of the largest arrays, at the bottom of their boxes. */
    function findNames(take) {
      const spots = [];
      const large = [];
      for (let leaf = 0; leaf < paths.length; leaf++) {
        // Most boxes are too small: look no further.
        if (boxes[4 * leaf + 2] * wide < 44 * view.w || boxes[4 * leaf + 3] * high < 20 * view.h || faded(leaf)) continue;
        const at = visible(boxOf(leaf));
        if (at && at.w >= 44 && at.h >= 20) large.push([at, leaf]);
      }
      for (const [at, leaf] of large.sort(([a], [b]) => b.w * b.h - a.w * a.h).slice(0, NAMES)) {
        const parts = paths[leaf].split("/");
        // `query_proj/weight`, or `query_proj` where that is too long.
        const short = parts.length > 1 && GENERAL.has(parts.at(-1)) ? [parts.at(-2)] : [];
        const widths = [parts.slice(-2).join("/"), ...short, parts.at(-1)].map((text) => [text, textWidth(text, `11px ${cssValue("--mono")}`) + 7]);
        const [text, full] = widths.find(([, width]) => width < at.w - 5) ?? widths.at(-1);
        if (full > at.w - 5 && at.w < 70) continue; // too little of it would be left
        const spot = take([{ text, x: at.x + 3, y: at.y + at.h - 19, w: Math.min(full, at.w - 6), h: 15, whole: !kindOfLeaf(leaf).css }]);
        if (spot) spots.push(spot);
      }
      return spots;
    }

    function drawLabels() {
      const hadFocus = labels.contains(document.activeElement);
      const take = makeRoom();
      labels.replaceChildren(...findLabels(take).map((spot, at) => button(spot.main ? "button.main" : "button", {
        tabindex: at ? -1 : 0, style: inPercent(spot),
        "aria-label": `${spot.module.path}: ${bytes(spot.module.bytes)} per device, ${plural(spot.module.leaves, "array")}`,
        onclick: () => enter(spot.module), onfocus: () => showModule(spot.module), onblur: hideHover,
        onpointerenter: () => showModule(spot.module), onpointerleave: hideHover }, spot.text)));
      names.replaceChildren(...findNames(take).map((spot) => el(spot.whole ? "span.whole" : "span", { style: inPercent(spot) }, spot.text)));
      if (hadFocus) (labels.firstElementChild ?? crumbs.querySelector("button")).focus({ preventScroll: true });
    }

    /** The labels are one stop for Tab; the arrows move within. */
    function moveLabel(event) {
      const all = [...labels.children];
      const at = all.indexOf(document.activeElement);
      const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
      if (!all[to]) return;
      event.preventDefault();
      all[at].tabIndex = -1;
      all[to].tabIndex = 0;
      all[to].focus({ preventScroll: true });
    }

    function drawCrumbs() {
      const chain = [];
      for (let module = zoom; module; module = module.parent) chain.unshift(module);
      crumbs.replaceChildren(...chain.map((module, at) => {
        const text = at ? module.path.slice(chain[at - 1].path.length).replace(/^\//, "") : "all";
        return module === zoom ? el("span", { "aria-current": "true" }, text) : button("button", { onclick: () => zoomTo(module) }, text);
      }));
      document.querySelector(".map-sum").replaceChildren(`${bytes(zoom.bytes)} per device, ${plural(zoom.leaves, "array")}`,
        zoom === root ? "" : button("button.link", { onclick: () => page.search(quoted(zoom.path)) }, "Show in the table"));
    }

    function drawLegend() {
      legend.append(...kinds.map((kind, at) => button("button", { "aria-pressed": "false", onclick: () => showSingle(at),
        title: `${plural(kind.arrays, "array")}, ${bytes(kind.bytes)} per device` }, swatch(kind.css), code(kind.label), muted(count(kind.arrays)))));
    }

    function showSingle(kind) {
      single = single === kind ? null : kind;
      [...legend.children].forEach((one, at) => one.setAttribute("aria-pressed", String(single === at)));
      draw();
    }

    // ---- zooming

    /** A module with a single array opens that array. */
    function enter(module) {
      if (module.leaves > 1) zoomTo(module);
      else page.choose(paths.findIndex((path) => path.startsWith(`${module.path}/`)), { scroll: true });
    }

    function zoomTo(module) {
      const [from, to] = [view, contents(module)];
      zoom = module;
      hideHover();
      drawCrumbs();
      $("map-status").textContent = `${module.path || "All"}: ${plural(steps(module).length, "module")}, ${plural(module.leaves, "array")}`;
      cancelAnimationFrame(moving);
      if (paths.length > SLOW || matchMedia("(prefers-reduced-motion: reduce)").matches) { view = to; draw(); return; }
      for (const label of labels.children) label.style.opacity = 0;
      names.replaceChildren();
      ring.hidden = true;
      const start = performance.now();
      const frame = (now) => {
        const left = (1 - clamp((now - start) / 220, 0, 1)) ** 3;
        view = Object.fromEntries(Object.keys(to).map((key) => [key, to[key] + (from[key] - to[key]) * left]));
        if (left > 0) { paint(); moving = requestAnimationFrame(frame); } else draw();
      };
      moving = requestAnimationFrame(frame);
    }

    function draw() {
      if (!wide || !high) return;
      paint();
      drawLabels();
      outline(ring, chosen < 0 ? null : boxOf(chosen));
    }

    function outline(node, rect) {
      const at = rect && toScreen(rect);
      node.hidden = !at;
      if (at) Object.assign(node.style, { left: `${at.x}px`, top: `${at.y}px`, width: `${Math.max(3, at.w - 1)}px`, height: `${Math.max(3, at.h - 1)}px` });
    }

    // ---- hovering

    function showTip(x, y, ...lines) {
      tip.replaceChildren(...lines);
      tip.hidden = false;
      const { offsetWidth: w, offsetHeight: h } = tip;
      tip.style.left = `${clamp(x + 16 + w > wide ? x - w - 12 : x + 16, 4, Math.max(4, wide - w - 4))}px`;
      tip.style.top = `${Math.max(4, y + 16 + h > high ? y - h - 12 : y + 16)}px`;
    }

    function showModule(module) {
      const at = toScreen(module);
      if (!at) return;
      outline(hover, module);
      showTip(Math.max(0, at.x), Math.max(0, at.y) + LABEL, el("b", {}, module.path), `${bytes(module.bytes)} per device, ${plural(module.leaves, "array")}`);
    }

    function showPointed(event) {
      const { x, y, leaf, module } = pointed(event);
      if (leaf < 0) { if (module) showModule(module); else hideHover(); return; }
      const row = rowOfLeaf(leaf);
      const zooms = module && module.leaves > 1;
      outline(hover, zooms ? module : boxOf(leaf));
      showTip(x, y, el("b", {}, paths[leaf]),
        el("span", {}, swatch(kindOfLeaf(leaf).css), code(row.spec), ` ${bytes(row.device_bytes)} per device`),
        muted(row.reason), muted(zooms ? `Click: zoom into ${module.path}` : "Click: show this array"));
    }

    function hideHover() {
      tip.hidden = true;
      hover.hidden = true;
    }

    canvas.addEventListener("pointermove", showPointed);
    canvas.addEventListener("pointerleave", hideHover);
    canvas.addEventListener("click", (event) => {
      const { leaf, module } = pointed(event);
      if (module && module.leaves > 1) zoomTo(module);
      else if (leaf >= 0) page.choose(leaf, { scroll: true });
    });
    labels.addEventListener("keydown", moveLabel);
    $("treemap").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && zoom.parent) zoomTo(zoom.parent);
      else if (event.key === "Escape") hideHover();
    });
    $("treemap").hidden = false;
    drawLegend();
    drawCrumbs();
    new ResizeObserver(([entry]) => {
      ({ width: wide, height: high } = entry.contentRect);
      draw();
    }).observe(box);

    let timer = 0;
    return {
      repaint: draw,
      choose(leaf) { chosen = leaf; outline(ring, leaf < 0 ? null : boxOf(leaf)); },
      /** Fades what does not match, a moment later, so that typing stays quick. */
      match(found) { clearTimeout(timer); timer = setTimeout(() => { matches = found; draw(); }, 120); },
    };
  }

  // ------------------------------------------------------------------ table

  // `value` is the sort key of a row, the number of its matching arrays, and its place in the tree.
  // `large` columns begin with the largest.
  const COLUMNS = [
    { key: "path", label: "Path", value: (row, n, place) => place },
    { key: "count", label: "Arrays", css: ".num", large: true, value: (row, n) => n },
    { key: "shape", label: "Shape", large: true, value: (row) => row.shape.reduce((a, b) => a * b, 1) },
    { key: "dtype", label: "Dtype", value: (row) => row.dtype },
    { key: "spec", label: "Spec", value: (row) => row.spec },
    { key: "bytes", label: "Bytes", css: ".num", large: true, value: (row, n) => n * row.bytes },
    { key: "device", label: "Per device", css: ".num", large: true, value: (row, n) => n * row.device_bytes },
    { key: "rule", label: "Rule", value: (row) => row.rule },
    { key: "reason", label: "Reason", value: (row) => row.reason },
  ];
  const AROUND = 6;       // rows drawn above and below the visible ones
  const ON_PAPER = 500;   // rows that are printed

  function makeTable() {
    const table = $("leaves");
    const list = $("list"); // the box that scrolls
    const [head, body] = [table.tHead, table.tBodies[0]];
    const unfolded = new Set();     // rows
    const foldedLayers = new Set(); // prefixes
    const drawn = new Map();        // index of an item -> its <tr>
    let layers = null;              // of each leaf, made when first needed
    let terms = [];
    let found = findMatches([]);
    let sort = { column: COLUMNS[0], down: false };
    let every = false;
    let order = [];     // rows, or leaves, as sorted
    let items = [];     // what the list holds: rows, leaves and headings of layers
    let largest = 1;    // bytes per device that fill a gauge
    let active = 0;     // the item that Tab reaches
    let chosen = -1;
    let rowHeight = 30;
    let printing = false;

    // ---- what is in the list

    /** Sorts again. The order depends only on the column and the view, so a search just filters it. */
    function putInOrder() {
      const { column, down } = sort;
      const values = every ? paths.map((_, leaf) => column.value(rowOfLeaf(leaf), 1, leaf))
        : rows.map((row, at) => column.value(row, row.count, leavesOf[at][0]));
      const way = down ? -1 : 1;
      order = values.map((_, at) => at).sort((a, b) => values[a] < values[b] ? -way : values[a] > values[b] ? way : a - b);
      largest = rows.reduce((most, row) => Math.max(most, row.device_bytes * (every ? 1 : row.count)), 1);
    }

    function listRows() {
      for (const row of order) {
        const leaves = leavesOf[row].filter((leaf) => found[leaf]);
        if (!leaves.length) continue;
        const open = leaves.length > 1 ? unfolded.has(row) : undefined;
        items.push({ kind: "row", row, leaf: leaves[0], n: leaves.length, level: 1, open });
        if (open) for (const leaf of leaves) items.push({ kind: "leaf", leaf, n: 1, level: 2 });
      }
    }

    /** The layer of each leaf; an array alone in its layer has no heading. */
    function makeLayers() {
      const all = paths.map(layerOf);
      const sizes = new Map();
      for (const layer of all) sizes.set(layer, (sizes.get(layer) ?? 0) + 1);
      return all.map((layer) => sizes.get(layer) > 1 ? layer : "");
    }

    function listLayers() {
      layers ??= makeLayers();
      let heading = null;
      for (const leaf of order) {
        if (!found[leaf]) continue;
        const layer = layers[leaf];
        if (layer && heading?.layer !== layer) {
          heading = { kind: "heading", layer, n: 0, bytes: 0, device: 0, level: 1, open: !foldedLayers.has(layer) };
          items.push(heading);
        }
        if (!layer) { heading = null; items.push({ kind: "leaf", leaf, n: 1, level: 1 }); continue; }
        heading.n++;
        heading.bytes += rowOfLeaf(leaf).bytes;
        heading.device += rowOfLeaf(leaf).device_bytes;
        if (heading.open) items.push({ kind: "leaf", leaf, n: 1, level: 2, layer });
      }
    }

    function refresh() {
      items = [];
      if (!every) listRows();
      else if (sort.column.key === "path") listLayers();
      else for (const leaf of order) if (found[leaf]) items.push({ kind: "leaf", leaf, n: 1, level: 1 });
      active = clamp(active, 0, Math.max(0, items.length - 1));
      rowHeight = parseFloat(cssValue("--row"));
      body.style.height = `${items.length * rowHeight}px`;
      list.style.setProperty("--rows", Math.max(4, items.length));
      table.setAttribute("aria-rowcount", items.length + 1);
      table.dataset.view = every ? "every" : "together";
      table.toggleAttribute("data-flat", every && sort.column.key !== "path");
      table.hidden = !items.length;
      $("no-match").hidden = items.length > 0;
      body.replaceChildren();
      drawn.clear();
      drawVisible();
    }

    // ---- drawing

    /** Draws the visible rows, and the active one, which may have the focus and must not vanish. */
    function drawVisible() {
      const first = printing ? 0 : Math.max(0, Math.floor(list.scrollTop / rowHeight) - AROUND);
      const end = Math.min(items.length, printing ? ON_PAPER : Math.ceil((list.scrollTop + list.clientHeight) / rowHeight) + AROUND);
      const wanted = Array.from({ length: Math.max(0, end - first) }, (_, at) => first + at);
      if (active < first) wanted.unshift(active);
      else if (active >= end && active < items.length) wanted.push(active);
      const keep = new Set(wanted);
      for (const [at, row] of drawn) if (!keep.has(at)) { row.remove(); drawn.delete(at); }
      let next = body.firstElementChild; // rows that stay are not moved, which would lose their focus
      for (const at of wanted) {
        if (!drawn.has(at)) drawn.set(at, drawRow(items[at], at));
        if (drawn.get(at) === next) next = next.nextElementSibling;
        else body.insertBefore(drawn.get(at), next);
      }
    }

    function drawRow(item, at) {
      const isHeading = item.kind === "heading";
      const cells = isHeading ? headingCells(item) : arrayCells(item);
      return el(isHeading ? "tr.heading" : "tr", { role: "row", tabindex: at === active ? 0 : -1, "data-at": at,
        "aria-rowindex": at + 2, "aria-level": item.level, "aria-expanded": item.open === undefined ? null : String(item.open),
        "aria-selected": isHeading ? null : String(isChosen(item)), style: `top: ${at * rowHeight}px; --level: ${item.level}` },
      COLUMNS.map(({ key, css = "" }) => el(`td.c-${key}${css}`, { role: "gridcell", title: cells[key]?.[1] }, cells[key]?.[0])));
    }

    // Cells are [content, title].

    function headingCells({ layer, n, bytes: whole, device, open }) {
      return { path: [[foldButton(open, n), el("span.name", {}, marked(layer))], layer], shape: [muted(plural(n, "array"))],
        bytes: [bytes(whole), exact(whole)], device: [bytes(device), exact(device)] };
    }

    function arrayCells(item) {
      const { n, layer, kind } = item;
      const row = rowOfLeaf(item.leaf);
      const path = n > 1 ? row.path : paths[item.leaf];
      const start = layer ? layer.length + 1 : 0;
      const times = (each) => [bytes(n * each), n > 1 ? `${count(n)} × ${exact(each)} = ${exact(n * each)}` : exact(each)];
      const [device, deviceTitle] = times(row.device_bytes);
      const share = n * row.device_bytes / largest;
      return {
        path: [[foldButton(item.open, n), el("span.name", {}, start > 0 && el("span.muted.prefix", {}, marked(path.slice(0, start))), marked(path.slice(start)))], path],
        count: kind === "leaf" ? [""] : [count(n), n < row.count ? `${count(n)} of ${count(row.count)} match` : null],
        shape: [shapeText(row.shape), shapeText(row.shape)],
        dtype: [marked(row.dtype), row.dtype],
        spec: [[swatch(kindOfLeaf(item.leaf).css), marked(row.spec)], row.spec],
        bytes: times(row.bytes),
        device: [[device, share > 0.02 && el("span.gauge", { style: `width: ${100 * share}%` })], deviceTitle],
        rule: [marked(row.rule), row.rule],
        reason: [marked(row.reason), row.reason],
      };
    }

    /** The arrow of a row that folds. The keyboard folds with the arrow keys, so Tab skips it. */
    function foldButton(open, n) {
      if (open === undefined) return el("span.nofold");
      return button("button.fold", { tabindex: -1, "aria-label": open ? "Fold" : `Show the ${plural(n, "array")}` });
    }

    /** A text with the words of the search marked. */
    function marked(text) {
      const low = text.toLowerCase();
      const words = terms.map((term) => term.text).filter(Boolean).sort((a, b) => b.length - a.length);
      if (!words.length || low.length !== text.length) return [text]; // "İ" grows when it is made small
      const parts = [];
      let from = 0;
      for (;;) {
        const hits = words.map((word) => [low.indexOf(word, from), word.length]).filter(([at]) => at >= 0);
        if (!hits.length) return [...parts, text.slice(from)];
        const [at, length] = hits.reduce((a, b) => b[0] < a[0] ? b : a);
        parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + length)));
        from = at + length;
      }
    }

    /** A folded row represents its leaves, so it is chosen if any of them is. */
    function isChosen(item) {
      if (chosen < 0 || item.open || item.kind === "heading") return false;
      return item.n > 1 ? rowOf[chosen] === item.row : item.leaf === chosen;
    }

    function drawHead() {
      head.replaceChildren(el("tr", { role: "row", "aria-rowindex": 1 }, COLUMNS.map((column) => el(`th.c-${column.key}${column.css ?? ""}`,
        { role: "columnheader", scope: "col", "aria-sort": sort.column === column && (sort.down ? "descending" : "ascending") },
        button("button", { onclick: () => sortBy(column) }, column.label)))));
    }

    function showCount() {
      let [n, device] = [0, 0];
      for (let leaf = 0; leaf < found.length; leaf++) if (found[leaf]) { n++; device += rowOfLeaf(leaf).device_bytes; }
      $("match-count").replaceChildren(el("b", {}, terms.length ? `${count(n)} of ${count(found.length)}` : count(n)),
        ` array${!terms.length && n === 1 ? "" : "s"}, ${bytes(device)} per device`);
    }

    // ---- actions

    function search(query) {
      terms = readQuery(query);
      found = findMatches(terms);
      showCount();
      toTop();
      page.map?.match(terms.length ? found : null);
    }

    function toTop() {
      active = 0;
      list.scrollTop = 0;
      refresh();
    }

    function sortBy(column) {
      sort = sort.column === column ? { column, down: !sort.down } : { column, down: Boolean(column.large) };
      const hadFocus = head.contains(document.activeElement);
      drawHead();
      if (hadFocus) head.querySelector("[aria-sort] button").focus({ preventScroll: true });
      putInOrder();
      toTop();
    }

    function setView(wish) {
      every = wish;
      if (every && sort.column.key === "count") sort = { column: COLUMNS[0], down: false }; // every row is one array
      drawHead();
      putInOrder();
      toTop();
    }

    function fold(at) {
      const { kind, layer, row } = items[at];
      const [set, key] = kind === "heading" ? [foldedLayers, layer] : [unfolded, row];
      if (!set.delete(key)) set.add(key);
      const hadFocus = body.contains(document.activeElement);
      active = at;
      refresh();
      if (hadFocus) focusRow(at);
    }

    function act(at) {
      if (items[at].kind === "heading") fold(at);
      else page.choose(items[at].leaf);
    }

    function setActive(at) {
      drawn.get(active)?.setAttribute("tabindex", "-1");
      active = at;
      drawVisible();
      drawn.get(at)?.setAttribute("tabindex", "0");
    }

    const seenHeight = () => list.clientHeight - head.offsetHeight;

    function focusRow(wish) {
      const at = clamp(wish, 0, items.length - 1);
      list.scrollTop = clamp(list.scrollTop, (at + 1) * rowHeight - seenHeight(), at * rowHeight);
      setActive(at);
      drawn.get(at)?.focus({ preventScroll: true });
    }

    function onKey(event) {
      const item = items[active];
      if (!item || event.altKey || event.ctrlKey || event.metaKey) return;
      const leap = Math.max(1, Math.floor(seenHeight() / rowHeight) - 1);
      const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: leap, PageUp: -leap, Home: -Infinity, End: Infinity };
      if (event.key in moves) focusRow(active + moves[event.key]);
      else if (event.key === "ArrowRight" && item.open === false) fold(active);
      else if (event.key === "ArrowRight" && item.open) focusRow(active + 1);
      else if (event.key === "ArrowLeft" && item.open) fold(active);
      else if (event.key === "ArrowLeft" && item.level > 1) focusRow(items.findLastIndex((one, at) => at < active && one.level === 1));
      else if (event.key === " " && item.open !== undefined) fold(active);
      else if (event.key === "Enter" || event.key === " ") act(active);
      else return;
      event.preventDefault();
    }

    function onClick(event) {
      const row = event.target.closest("tr");
      if (!row || String(getSelection())) return; // selecting text to copy is not choosing
      const at = Number(row.dataset.at);
      focusRow(at);
      if (event.target.closest(".fold")) fold(at);
      else act(at);
    }

    let waiting = 0;
    list.addEventListener("scroll", () => { waiting ||= requestAnimationFrame(() => { waiting = 0; drawVisible(); }); }, { passive: true });
    body.addEventListener("keydown", onKey);
    body.addEventListener("click", onClick);
    new ResizeObserver(() => parseFloat(cssValue("--row")) === rowHeight ? drawVisible() : refresh()).observe(list);
    $("search").addEventListener("input", () => search($("search").value));
    $("clear").addEventListener("click", () => { $("search").value = ""; search(""); $("search").focus(); });
    for (const input of $("view").querySelectorAll("input")) input.addEventListener("change", () => setView(input.value === "every"));
    $("view").querySelector("input").checked = true; // browsers may restore the view and the search on reload
    $("search").value = "";
    $("arrays").hidden = false;
    if (!paths.length) $("no-match").textContent = "This plan has no arrays.";
    setView(false);
    showCount();

    return {
      search,
      focus: () => focusRow(active),
      /** Marks the chosen leaf, -1 for none; `reveal` also scrolls the list to it. */
      choose(leaf, reveal) {
        chosen = leaf;
        for (const [at, row] of drawn) if (items[at].kind !== "heading") row.setAttribute("aria-selected", String(isChosen(items[at])));
        const at = reveal ? items.findIndex(isChosen) : -1;
        if (at < 0) return;
        list.scrollTop = (at + 0.5) * rowHeight - list.clientHeight / 2;
        setActive(at);
      },
      print(on) {
        printing = on;
        $("print-note").textContent = on && items.length > ON_PAPER ? `The first ${ON_PAPER} of ${count(items.length)} rows.` : "";
        refresh();
      },
    };
  }

  // ------------------------------------------------------------------ detail

  /** "dim 0: 512 in 2 blocks of 256 over model" */
  function dimSentence([length, blocks, axes], at) {
    if (blocks <= 1) return `dim ${at}: ${count(length)}, whole on every device`;
    const most = length % blocks ? "at most " : "";
    return `dim ${at}: ${count(length)} in ${count(blocks)} blocks of ${most}${count(Math.ceil(length / blocks))} over ${axes.join(" and ")}`;
  }

  function makeDetail() {
    const panel = $("detail");
    let opener = null;

    function fill(leaf) {
      const row = rowOfLeaf(leaf);
      const about = data.findings.filter(({ path }) => path && (path === row.path || pathTest(path).test(paths[leaf])));
      const svg = Number.isInteger(row.drawing) && picture(data.drawings[row.drawing], `Which device holds which block of ${paths[leaf]}`);
      const block = (title, child) => el("div", {}, el("h4", {}, title), child);
      panel.replaceChildren(
        el("header", {}, el("h3", {}, paths[leaf]), button("button.close", { "aria-label": "Close", title: "Close (Escape)", onclick: page.close }, "×")),
        facts(leaf, row),
        ...[
          row.dims.length > 0 && block("Dimensions", el("ul", {}, row.dims.map((dim, at) => el("li", {}, dimSentence(dim, at))))),
          svg && block("Which device holds which block", [drawing(svg), data.device_count > 8 && el("p.muted", {}, "Of more than 8 devices, those whose blocks are neighbours have different colours.")]),
          about.length > 0 && block("Findings", el("ul", {}, about.map((finding) => findingItem(finding, true)))),
        ].filter(Boolean));
    }

    function drawing(svg) {
      const box = scrollBox("div", "Drawing of the blocks", svg);
      box.id = "drawing";
      return box;
    }

    function facts(leaf, row) {
      const inFull = (n) => n >= 1024 && `${count(n)} bytes`;
      const share = `${percent(row.device_bytes, row.bytes)} of it`;
      const lines = [
        ["Shape", code(shapeText(row.shape))],
        ["Dtype", code(row.dtype)],
        ["Spec", [swatch(kindOfLeaf(leaf).css), code(row.spec)]],
        ["Rule", row.rule],
        ["Reason", row.reason],
        ["Bytes", [bytes(row.bytes), el("small", {}, inFull(row.bytes))]],
        ["Per device", [bytes(row.device_bytes), el("small", {}, [inFull(row.device_bytes), share].filter(Boolean).join(", "))]],
        row.count > 1 && ["Equal arrays", [`${count(row.count)}: `, button("button.link", { title: "Show them in the table", onclick: () => page.search(quoted(row.path)) }, code(row.path))]],
      ];
      return el("dl.facts-list", {}, lines.filter((line) => line && line[1]).map(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));
    }

    return {
      show(leaf, focus) {
        if (panel.hidden) opener = document.activeElement;
        fill(leaf);
        panel.hidden = false;
        panel.scrollTop = 0;
        panel.parentElement.classList.add("open");
        $("leaf-status").textContent = `Shown: ${paths[leaf]}`;
        // A sheet over the page takes the focus; beside the table the focus stays in the table.
        if (focus || getComputedStyle(panel).position === "fixed") panel.focus({ preventScroll: true });
      },
      hide() {
        const hadFocus = panel.contains(document.activeElement);
        panel.hidden = true;
        panel.parentElement.classList.remove("open");
        $("leaf-status").textContent = "";
        if (!hadFocus) return;
        if (opener?.isConnected && opener !== document.body && !$("leaves").contains(opener)) opener.focus({ preventScroll: true });
        else page.table.focus();
      },
      isOpen: () => !panel.hidden,
    };
  }

  // ------------------------------------------------------------------ audit

  const PART_COLOURS = ["--c4", "--c0", "--c1", "--c2", "--c6", "--c5", "--c3", "--c7"];
  const partColour = (at) => PART_COLOURS[at % PART_COLOURS.length];

  /** What the sections of the audit and the autoplan share: heading, figures, parts, findings. */
  function drawPlanned(id, planned, summary, parts) {
    const section = $(id);
    section.querySelector(".head").append(el("p", {}, summary));
    section.append(definitions("dl.stats.small", planned.figures), el("div.parts", {}, parts));
    if (planned.findings.length) section.append(el("div.inset-findings", {}, findingGroups(planned.findings)));
    section.hidden = false;
  }

  function drawAudit({ audit } = data) {
    if (!audit) { $("audit").remove(); return; }
    const where = [code(audit.name), ` on ${audit.hardware || audit.target}, ${plural(audit.device_count, "device")} `, meshChips(audit.mesh)];
    drawPlanned("audit", audit, where, [
      memoryPart(audit),
      audit.axes.length > 0 && axesPart(audit.axes),
      audit.collectives.length > 0 && collectivesPart(audit.collectives),
      audit.modules.length > 0 && modulesPart(audit.modules),
      audit.lines.length > 0 && linesPart(audit),
      audit.timeline && timelinePart(audit),
    ]);
  }

  const EVENTS = { compute: ["kernel", "--c4"], communication: ["collective", "--c1"], copy: ["copy", "--c2"], wait: ["waiting", "--c5"],
    loop: ["loop", "--c7"], rest: ["more rounds, not to scale", "--c3"] };

  function timelinePart({ timeline, timeline_kinds: shown }) {
    const drawn = picture(timeline, "Timeline of the step; the table of lines holds the sums of its numbers");
    return part("div.wide", ["Timeline ", el("small", {}, "one device, one call; shardrules audit --timeline writes it for trace viewers")],
      drawn && scrollBox("div.figure.timeline", "Drawing of the timeline", drawn),
      el("ul.keys", {}, shown.map((kind) => el("li", {}, swatch(EVENTS[kind][1]), EVENTS[kind][0]))));
  }

  function linesPart({ lines, seconds }) {
    const columns = [["Line", "break"], ["Time", "num"], ["Share", "num"], ["On the critical path", "num"], ["Kernels", "num"], ["Sends", "num"], ["Exposed", "num"], ["Copies", "num"], ["Hidden by", "break"]];
    const time = (s) => s ? duration(s) : "";
    return part("div.wide", ["Time by line of code ", el("small", {}, "kernels, and what the device waits for")], plainTable("Time by line of code", columns,
      lines.map(([line, all, kernels, sent, exposed, copies, critical, hidden]) =>
        [code(line), duration(all), percent(all, seconds), percent(critical, seconds), time(kernels), time(sent), time(exposed), time(copies), hidden && sent > exposed ? code(hidden) : ""])));
  }

  function memoryPart({ memory, peak_bytes: peak, capacity_bytes: capacity }) {
    const parts = memory.map(([text, n], at) => [text, n, partColour(at)]);
    const scale = Math.max(capacity || 0, peak, sum(memory.map(([, n]) => n)), 1);
    const share = capacity ? ` of ${bytes(capacity)}, ${percent(peak, capacity)}` : "";
    const over = capacity > 0 && peak > capacity;
    return part("div", ["Memory per device ", el("small", {}, `peak ${bytes(peak)}${share} `), over && badge("error", `${bytes(peak - capacity)} too much`)],
      el("div.bar-box", {}, stackedBar("div.bar", parts, scale),
        over && el("span.limit", { style: `left: ${100 * capacity / scale}%`, title: `capacity ${exact(capacity)}` })),
      keys(capacity > peak ? [...parts, ["free", capacity - peak, "--surface"]] : parts));
  }

  function axesPart(axes) {
    const byKind = new Map();
    for (const axis of axes) for (const [kind, , wire] of axis.kinds) byKind.set(kind, (byKind.get(kind) ?? 0) + wire);
    const names = [...byKind.keys()].sort((a, b) => byKind.get(b) - byKind.get(a));
    const css = (kind) => partColour(names.indexOf(kind));
    const most = Math.max(1, ...axes.map((axis) => axis.wire_bytes));
    return part("div", ["Traffic by mesh axis ", el("small", {}, "bytes on the wire, number of collectives")],
      axes.map((axis) => el("div.axis-row", {}, axisChips(axis.axes),
        stackedBar("div.bar.thin", axis.kinds.map(([kind, n, wire]) => [`${count(n)} ${kind}`, wire, css(kind)]), most),
        el("span.num", {}, el("b", { title: exact(axis.wire_bytes) }, bytes(axis.wire_bytes)), muted(` in ${count(axis.count)}`)))),
      keys(names.map((kind) => [kind, byKind.get(kind), css(kind)])));
  }

  function collectivesPart(collectives) {
    const columns = [["Kind"], ["Over"], ["Bytes sent", "num"], ["Runs", "num"], ["Array", "break"], ["Line"]];
    return part("div.wide", "Collectives, most bytes first", plainTable("Collectives", columns, collectives.map((one) => [one.kind, axisChips(one.axes),
      size(one.wire_bytes), count(one.run_count), code(one.array), code(one.line || "–")])));
  }

  function modulesPart(modules) {
    const gauge = (at, css) => {
      const most = Math.max(1, ...modules.map((module) => module[at]));
      return (module) => el("div.bar.thin", { "aria-hidden": "true" }, el("i", { style: `--c: var(${css}); width: ${100 * module[at] / most}%` }));
    };
    const [work, wire] = [gauge(1, "--c4"), gauge(2, "--c0")];
    return part("div.wide", "Modules", plainTable("Modules", [["Module", "break"], ["Matmuls", "num"], ["", "gauge-bar"], ["Wire", "num"], ["", "gauge-bar"]],
      modules.map((one) => [code(one[0]), el("span", { title: `${count(one[1])} FLOP` }, flops(one[1])), work(one), size(one[2]), wire(one)])));
  }

  // ------------------------------------------------------------------ autoplan

  function drawAutoplan({ autoplan } = data) {
    if (!autoplan) { $("autoplan").remove(); return; }
    const how = [code(autoplan.name), " ", meshChips(autoplan.mesh), " ", badge(autoplan.status === "optimal" ? "good" : "note", autoplan.status)];
    drawPlanned("autoplan", autoplan, how, [
      autoplan.split_dims.length > 0 && splitPart(autoplan.split_dims),
      autoplan.candidates.length > 0 && meshesPart(autoplan),
      autoplan.frontier && frontierPart(autoplan.frontier),
    ]);
  }

  function splitPart(dims, label = "Dimensions and their mesh axes") {
    const axes = (names, none) => chips(names.map((name) => [name]), none);
    return part("div", "Dimensions", plainTable(label, [["Dimension", "break"], ["Size", "num"], ["Split over"], ["Stored over"]],
      dims.map((dim) => [code(dim.name), count(dim.size), axes(dim.axes, "whole"), axes(dim.stored, "–")])));
  }

  function meshesPart({ candidates, mesh }) {
    const isChosen = (at) => candidates[at].mesh === mesh;
    return part("div", "Meshes tried", plainTable("Meshes tried", [["Mesh"], ["Time", "num"], ["Peak memory", "num"], [""]],
      candidates.map((one, at) => [meshChips(one.mesh), one.seconds === null ? muted("no plan") : duration(one.seconds), size(one.peak_bytes),
        isChosen(at) && badge("good", "chosen")]), { picked: isChosen }));
  }

  function frontierPart({ svg, points }, what = "time") {
    const drawn = svg && picture(svg, "Time against memory; the table beside it holds the same numbers");
    return part("div.wide", "Time against memory", el("div.pair", {}, drawn && scrollBox("div.figure", `Drawing of ${what} against memory`, drawn),
      plainTable(`${what[0].toUpperCase()}${what.slice(1)} against memory, as numbers`, [["Limit per device", "num"], ["Time", "num"], ["Peak memory", "num"]],
        points.map((point) => [size(point.limit_bytes), duration(point.seconds), size(point.peak_bytes)]))));
  }

  // ------------------------------------------------------------------ training

  function drawTraining({ training } = data) {
    if (!training) { $("training").remove(); return; }
    const how = [code(training.name), ` on ${training.cluster} `, meshChips(training.mesh)];
    drawPlanned("training", training, how, [
      memoryPart(training),
      training.split_dims.length > 0 && splitPart(training.split_dims, "Dimensions of the training and their mesh axes"),
      training.schedule && schedulePart(training.schedule),
      trainingPart(training),
      training.frontier && frontierPart(training.frontier, "time of the training"),
    ]);
  }

  function schedulePart({ svg, label }) {
    const drawn = svg && picture(svg, "Which stage computes which microbatch when, and where stages wait");
    return part("div.wide", "Schedule of the stages", drawn ? scrollBox("div.figure", "Drawing of the schedule", drawn)
      : el("p", {}, `${label}. It is too long to be drawn here: print(plan.schedule) shows it.`));
  }

  function trainingPart({ candidates }) {
    const isChosen = (at) => candidates[at].reason === "";
    const columns = [["Mesh"], ["Microbatches"], ["Backward", "break"], ["Time", "num"], ["Peak memory", "num"], ["", "break"]];
    return part("div.wide", "What was planned", plainTable("What was planned", columns,
      candidates.map((one, at) => [meshChips(one.mesh), one.batch, one.keep, one.seconds === null ? muted("no plan") : duration(one.seconds),
        size(one.peak_bytes), isChosen(at) ? badge("good", "chosen") : muted(one.reason)]), { picked: isChosen }));
  }

  // ------------------------------------------------------------------ rules

  /** The command that made the page, and the rules. */
  function drawOrigin({ command, rules } = data) {
    if (!command && !rules) { $("origin").remove(); return; }
    if (command) $("origin").append(el("p.unseen", {}, "This command made the page:"), el("pre.command", {}, code(command)));
    if (rules) $("origin").append(scrollBox("div.scroll", "Text of the rules", el("pre", {}, code(rules))));
    $("origin").hidden = false;
  }

  // ------------------------------------------------------------------ start

  /** The chosen leaf in the address (#leaf=<path>), -1 for none. */
  function leafInAddress() {
    if (!location.hash.startsWith("#leaf=")) return -1;
    try { return paths.indexOf(decodeURIComponent(location.hash.slice(6))); } catch { return -1; }
  }

  function remember(hash) {
    // A page in a sandbox may not change its address: then only the links to arrays are missing.
    try { history.pushState(null, "", hash); } catch { /* see above */ }
  }

  /** What the parts of the page call. `map` is absent if there is nothing to draw. */
  const page = {
    choose(leaf, { scroll = false } = {}) {
      if (leafInAddress() !== leaf) remember(`#leaf=${encodeURIComponent(paths[leaf])}`);
      page.open(leaf, { reveal: scroll, focus: scroll });
      if (scroll) $("arrays").scrollIntoView();
    },
    open(leaf, { reveal = true, focus = false } = {}) {
      page.detail.show(leaf, focus);
      page.table.choose(leaf, reveal);
      page.map?.choose(leaf);
    },
    shut() {
      page.detail.hide();
      page.table.choose(-1);
      page.map?.choose(-1);
    },
    close() {
      if (leafInAddress() >= 0) remember("#");
      page.shut();
    },
    search(query) {
      $("search").value = query;
      page.table.search(query);
      $("arrays").scrollIntoView();
      $("arrays").focus({ preventScroll: true });
    },
  };

  function followAddress() {
    const leaf = leafInAddress();
    if (leaf >= 0) page.open(leaf);
    else if (!location.hash) page.shut(); // "#audit" and its like are links within the page
  }

  function closeOnEscape(event) {
    const { activeElement } = document;
    if (event.key !== "Escape" || !page.detail.isOpen() || activeElement === $("search")) return;
    if (activeElement === document.body || $("arrays").contains(activeElement)) page.close();
  }

  /** Paper is light, and has room for more rows than a screen. */
  function startPrinting() {
    const root = document.documentElement.dataset;
    let kept = root.theme;
    const turn = (on) => {
      if (on) kept = root.theme;
      root.theme = on ? "light" : kept;
      page.table.print(on);
      page.map?.repaint();
    };
    addEventListener("beforeprint", () => turn(true));
    addEventListener("afterprint", () => turn(false));
  }

  function start() {
    drawHeader();
    drawFindings();
    page.table = makeTable();
    page.detail = makeDetail();
    if (data.treemap?.boxes.some((side) => side > 0)) page.map = makeMap();
    else $("treemap").remove();
    drawAudit();
    drawAutoplan();
    drawTraining();
    drawOrigin();
    drawSectionLinks();
    startTheme(() => page.map?.repaint());
    startPrinting();
    addEventListener("popstate", followAddress);
    addEventListener("keydown", closeOnEscape);
    followAddress();
    if (leafInAddress() >= 0) $("arrays").scrollIntoView();
  }

  start();
})();
