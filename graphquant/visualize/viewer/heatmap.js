// Heatmaps of quantized tensors, colors of changes, and their list.

const SIGNS = { added: "+ ", removed: "− ", changed: "~ " };
const MAX_ENTRIES = 500; // maximum number of list entries
const HEAT_STEPS = 5; // heatmap colors from h0 (harmless) to h4

/** Returns the color modes: each figure, changes, quantization. */
function colorings(m) {
  const figures = m.heat ? m.heat.columns.map((column, i) => [`${i}`, column.name]) : [];
  return [...figures, ...(m.changes ? [["changes", "changes"]] : []), ["quant", "quantization"]];
}

const showsHeatmap = (app) => app.column !== null;

/** Returns the active column of the heatmap, by default the first. */
const activeColumn = (app) => app.m.heat.columns[app.column || 0];

/** Returns an annotation's figure: a number, "equal" if exact, "none" without signal, undefined if unknown. */
function figureOf(app, annotation) {
  const values = app.m.heat && app.m.heat.values[annotation];
  const figure = values ? values[app.column || 0] : null;
  return figure === null ? undefined : figure;
}

function figureText(app, figure, short = false) {
  if (figure === "equal") return "equal";
  if (figure === "none") return "lost";
  return short ? figure.toFixed(0) : `${figure.toFixed(1)} ${activeColumn(app).unit}`;
}

/** Returns the badness of a figure from 0 to 1; negative if unknown. */
function badness(app, figure) {
  if (figure === undefined) return -1;
  if (figure === "equal" || figure === "none") return figure === "none" ? 1 : 0;
  const { hot, cold } = activeColumn(app);
  return Math.min(1, Math.max(0, (figure - cold) / (hot - cold)));
}

/** Returns the color of a figure, as a fill or as a stronger line ("l"). */
function heatColor(app, figure, as = "h") {
  const bad = badness(app, figure);
  return bad < 0 ? "" : app.color[`${as}${Math.min(HEAT_STEPS - 1, Math.floor(bad * HEAT_STEPS))}`];
}

/** Returns the worst figure of an op's inputs and constants. */
function worstFigure(app, op) {
  let worst, bad = -1;
  for (const annotation of app.m.annotationsOf(op)) {
    const figure = figureOf(app, annotation), severity = badness(app, figure);
    if (severity > bad) [worst, bad] = [figure, severity];
  }
  return worst;
}

/** Returns true if an annotation is worse than a bound, by the active figure or by the estimated SQNR. */
function isWorse(app, annotation, bound) {
  if (!app.m.heat) return app.m.annotations[annotation].sqnr !== undefined && app.m.annotations[annotation].sqnr < bound;
  const figure = figureOf(app, annotation), { hot, cold } = activeColumn(app);
  if (figure === undefined || figure === "equal") return false;
  return figure === "none" || (hot < cold ? figure < bound : figure > bound);
}

/** Sorts annotations by the active figure, worst first. */
function sortWorstFirst(app, annotations) {
  const { m } = app, { hot, cold } = m.heat ? activeColumn(app) : { hot: 0, cold: 1 };
  const key = (annotation) => {
    const figure = m.heat ? figureOf(app, annotation) : m.annotations[annotation].sqnr;
    if (figure === undefined) return Infinity;
    if (figure === "equal" || figure === "none") return figure === "none" ? -1e300 : 1e300;
    return hot < cold ? figure : -figure;
  };
  return annotations.sort((a, b) => { const first = key(a), second = key(b); return first === second ? a - b : first < second ? -1 : 1; });
}

/** Returns the change of an op, a wire or an annotation: "added", "removed", "changed" or "". */
function changeStatus(app, kind, number) {
  const { m } = app, side = kind === "op" ? m.side.op[number] : kind === "wire" ? m.side.wire[number] : FIRST + SECOND;
  if (side !== FIRST + SECOND) return side === FIRST ? "removed" : "added";
  const changes = app.changed[kind] && app.changed[kind].get(number);
  return changes ? { "+": "added", "-": "removed", "~": "changed" }[changes[0].sign] : "";
}

/** Indexes the changes by op and by annotation. */
function indexChanges(m) {
  const index = { op: new Map(), annotation: new Map() };
  const add = (map, key, change) => (map.has(key) ? map.get(key).push(change) : map.set(key, [change]));
  for (const change of m.changes || []) {
    for (const op of change.ops) add(index.op, op, change);
    for (const annotation of change.annotations) add(index.annotation, annotation, change);
  }
  return index;
}

/** Returns the list entries: quantized tensors, worst first, or changes; each with its selection. */
function listEntries(app) {
  const { m } = app;
  if (m.changes) {
    return m.changes.map((change) => {
      const selection = change.annotations.length ? { kind: "annotation", annotation: change.annotations[0] } : change.ops.length ? { kind: "op", op: change.ops[0] } : null;
      return { selection, text: change.location, detail: change.message, suffix: `${change.sign} ${change.kind}`, color: { "+": "added", "-": "removed", "~": "changed" }[change.sign] };
    });
  }
  return sortWorstFirst(app, Object.keys(m.heat.values).map(Number)).map((annotation) => {
    const figure = figureOf(app, annotation), note = m.heat.notes[annotation];
    return { selection: { kind: "annotation", annotation }, text: m.annotations[annotation].name || m.annotations[annotation].tensor, detail: figure === undefined ? note || "not known" : "", suffix: figure === undefined ? "" : figureText(app, figure), figure };
  });
}

/** Fills the list at the left. */
function fillList(app) {
  const { m, list } = app;
  app.entries = m.heat || m.changes ? listEntries(app) : [];
  if (!m.heat && !m.changes) return;
  const title = m.changes ? pluralize(app.entries.length, "change") : `Worst first: ${activeColumn(app).name}`;
  const line = (entry, i) => {
    const swatch = el("span", { className: "swatch" });
    swatch.style.background = entry.color ? app.color[entry.color] : heatColor(app, entry.figure) || app.color.box;
    return el("li", {}, el("button", { onclick: () => goToEntry(app, i), disabled: !entry.selection },
      swatch, el("span", {}, entry.text, entry.detail ? el("small", {}, entry.detail) : ""), el("small", {}, entry.suffix)));
  };
  const more = app.entries.length > MAX_ENTRIES ? [el("li", { className: "more" }, `and ${pluralize(app.entries.length - MAX_ENTRIES, "more", "more")}; use the search`)] : [];
  list.replaceChildren(el("h2", {}, title), el("ol", {}, ...app.entries.slice(0, MAX_ENTRIES).map(line), ...more));
  app.listAt = -1;
}

/** Selects an entry of the list. */
function goToEntry(app, i) {
  if (!app.entries.length) return;
  const step = i < app.listAt ? -1 : 1;
  let index = i;
  for (let skipped = 0; skipped < app.entries.length; skipped++, index += step) {
    index = (index + app.entries.length) % app.entries.length;
    if (app.entries[index].selection) break;
  }
  app.listAt = index;
  const buttons = app.list.querySelectorAll("button");
  buttons.forEach((button, j) => button.classList.toggle("here", j === index));
  if (buttons[index]) buttons[index].scrollIntoView({ block: "nearest" });
  if (app.entries[index].selection) select(app, app.entries[index].selection, { move: true });
}

/** Sets the color mode: "quant", "changes", or the number of a figure. */
function colorBy(app, by) {
  app.by = by;
  app.column = /^\d+$/.test(by) ? +by : null;
  const selector = document.getElementById("by-color");
  if (selector) selector.value = by;
  colored(app);
  if (app.m.heat) fillList(app);
  if (app.filters.sqnr !== null) search(app);
  app.panel.replaceChildren(...panelContent(app, app.selected));
  app.mapLater();
  app.redraw();
}

/** Explains the current colors. */
function legend(app) {
  const { m } = app, swatch = (color, text) => {
    const node = el("span", { className: "swatch" });
    node.style.background = app.color[color] || color;
    return el("div", {}, node, text);
  };
  if (showsHeatmap(app)) {
    const { name, description, hot, cold, unit } = activeColumn(app);
    const bound = (i) => +(cold + ((hot - cold) * i) / HEAT_STEPS).toPrecision(3);
    const bucket = (i) => (i === 0 ? `${bound(1)} ${unit} and better` : i === HEAT_STEPS - 1 ? `${bound(i)} ${unit} and worse` : `${bound(i)} to ${bound(i + 1)} ${unit}`);
    return [
      el("h3", {}, `Colors: ${name}`), el("p", {}, `${description[0].toUpperCase()}${description.slice(1)}. An op has the color of its worst input.`),
      ...Array.from({ length: HEAT_STEPS }, (_, i) => swatch(`h${i}`, bucket(i))),
    ];
  }
  if (app.by === "changes") {
    return [el("h3", {}, "Colors: changes"), swatch("added", "+ added"), swatch("removed", "− removed"), swatch("changed", "~ changed"), swatch("box", "the same")];
  }
  const counts = [0, 0, 0, 0];
  for (const inputs of m.ops.inputs) counts[inputs]++;
  return [
    el("h3", {}, "Colors"),
    swatch("quant", `inputs quantized (${counts[3].toLocaleString("en")}); a bar at the left`),
    swatch("part", `some inputs quantized (${counts[2].toLocaleString("en")}); half a bar`),
    swatch("float", "weighted op in float; dashed"),
    swatch("box", "other ops"),
    swatch("b8", "8 bits"), swatch("b16", "16 bits"), swatch("b4", "4 bits or fewer"), swatch("f8", "float8"), swatch("b32", "32 bits, bias"),
  ];
}
