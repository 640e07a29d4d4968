// Selection and the details panel.

/** Returns the wires of a selection. */
function connectedWires(app, selection) {
  const { m } = app;
  if (selection.kind === "op") return [...m.incoming.of(selection.op), ...m.outgoing.of(selection.op)];
  if (selection.kind === "wire") return [selection.wire];
  if (selection.kind === "annotation") return m.readers[selection.annotation].flatMap((reader) => (reader.wire === undefined ? [] : [reader.wire]));
  return [];
}

/** Returns the op to center on for a selection. */
function targetOp(app, selection) {
  const { m } = app;
  if (selection.kind === "op") return selection.op;
  if (selection.kind === "wire") return m.wire.target[selection.wire];
  return selection.kind === "annotation" && m.readers[selection.annotation].length ? m.readers[selection.annotation][0].op : -1;
}

/** Selects an item, shows its details, and optionally moves it into view. */
function select(app, selection, { move = false, link = true } = {}) {
  app.selected = selection;
  const op = selection ? targetOp(app, selection) : -1;
  if (move && op >= 0) {
    for (let group = app.m.ops.group[op]; group >= 0; group = app.m.group.parent[group]) app.collapsed.delete(group);
    rebuild(app);
    centerOn(app, op);
  }
  if (link) {
    const name = selection && op >= 0 ? `#op=${encodeURIComponent(app.m.full(op))}` : "#";
    app.linked = name;
    if (location.hash !== name && (name !== "#" || location.hash)) location.hash = name;
  }
  app.panel.replaceChildren(...panelContent(app, selection));
  app.panel.scrollTop = 0;
  app.redraw();
}

/** Returns the full name for the tooltip, since the drawing truncates names. */
function fullName(app, selection) {
  const { m } = app;
  if (selection.kind === "op") {
    const constants = Array.from(m.constants.of(selection.op), (i) => `${m.text(m.constant.role[i])} ${m.text(m.constant.dtype[i])} ${m.text(m.constant.shape[i])}`);
    return [`${m.type(selection.op)} ${m.full(selection.op)}`, ...constants].join("\n");
  }
  if (selection.kind === "wire") return `${m.full(m.wire.source[selection.wire])}:${m.wire.port[selection.wire]}`;
  if (selection.kind === "group") return m.text(m.group.label[selection.group]);
  const annotation = m.annotations[selection.annotation];
  return `${annotation.name || annotation.tensor}: ${annotationLabel(app, selection.annotation)}`;
}

function panelContent(app, selection) {
  if (!selection) return aboutModel(app);
  return { op: aboutOp, wire: aboutWire, annotation: aboutAnnotation, group: aboutGroup }[selection.kind](app, selection);
}

const opLink = (app, op, text) => el("button", { className: "link", onclick: () => select(app, { kind: "op", op }, { move: true }) }, text || app.m.full(op));
const tableRow = (label, ...content) => el("tr", {}, el("th", { scope: "row" }, label), el("td", {}, ...content));
const table = (...rows) => el("table", {}, ...rows.filter(Boolean));
const pill = (app, annotation) => {
  const node = el("button", { className: "pill", onclick: () => select(app, { kind: "annotation", annotation }) }, annotationText(app.m.annotations[annotation]));
  node.style.background = badgeColor(app, app.m.annotations[annotation].dtype);
  return node;
};

function aboutModel(app) {
  const { m } = app;
  const rules = new Map();
  for (const annotation of m.annotations) if (annotation.rule) rules.set(annotation.rule, (rules.get(annotation.rule) || 0) + 1);
  return [
    el("h2", {}, m.title),
    el("p", {}, `${m.format}, ${pluralize(m.count, "op")}, ${pluralize(m.annotations.length, m.planned ? "site" : "quantized tensor")}.`),
    m.planned ? el("p", {}, "This is a plan: annotations show planned quantization.") : "",
    ...m.notes.map((note) => el("p", { className: "warn" }, note)),
    ...(m.heat ? m.heat.summary.map((line) => el("p", {}, line)) : []),
    el("details", { open: !matchMedia(NARROW).matches }, el("summary", {}, "Legend"),
    ...legend(app),
    rules.size ? el("h3", {}, "Rules") : "",
    table(...[...rules].map(([rule, number]) => tableRow(rule, pluralize(number, "tensor")))),
    el("h3", {}, "Keys"),
    table(
      tableRow("/", "search"), tableRow("n  p", m.heat || m.changes ? "next, previous result, or entry of the list" : "next, previous result"), tableRow("arrows", "to producers, to readers, along the row"),
      tableRow("+  −  0  1", "zoom in, zoom out, fit, full size"), tableRow("u", "unfold or fold the selected annotation, or all"),
      tableRow("c  e", "collapse the enclosing group, expand all"),
      colorings(m).length > 1 ? tableRow("h", "next color mode") : "",
      m.twoSides ? tableRow("v", "both sides, the first, the second") : "",
      m.control.source.length ? tableRow("d", "control edges on or off") : "",
      tableRow("?", "this"), tableRow("Esc", "clear"), tableRow("wheel", "moves; with Ctrl it zooms"),
    )),
  ];
}

function aboutOp(app, { op }) {
  const { m } = app;
  const attrs = m.text(m.ops.attrs[op]).split("\n").filter(Boolean).map((line) => line.split(" = "));
  const rule = m.text(m.ops.rule[op]);
  const state = m.ops.inputs[op];
  return [
    el("h2", {}, m.name(op)),
    el("p", {}, `${m.type(op)} (${m.kind(op)})` + (m.ops.graph[op] ? `, in graph ${m.text(m.ops.graph[op])}` : "") + (state ? `, ${STATES[state]}` : "")),
    ...changeLines(app, "op", op),
    sideNote(app, m.side.op[op]),
    m.firstBoxes[op] && m.firstBoxes[op].full !== m.full(op) ? el("p", {}, `In ${m.sides.titles[0]} it is ${m.firstBoxes[op].full}, ${m.firstBoxes[op].type}.`) : "",
    m.ops.reason[op] ? el("p", { className: "warn" }, `Float: ${m.text(m.ops.reason[op])}.`) : "",
    rule ? el("p", {}, `Made by ${rule}.`) : "",
    groupPath(app, op),
    (m.ops.annotations[op] || []).length ? el("p", {}, ...m.ops.annotations[op].map((annotation) => pill(app, annotation))) : "",
    el("h3", {}, "Inputs"),
    table(...inputRows(app, op)),
    el("h3", {}, "Outputs"),
    table(...outputRows(app, op)),
    ...runsAfter(app, op),
    (m.ops.calls[op] || []).length ? el("p", {}, "Runs ", ...m.ops.calls[op].map((group) => groupLink(app, group))) : "",
    attrs.length ? el("h3", {}, "Attributes") : "",
    table(...attrs.map(([name, ...value]) => tableRow(name, value.join(" = ")))),
  ];
}

/** Returns the control inputs of an op. */
function runsAfter(app, op) {
  const { source, target } = app.m.control, before = Array.from(source).filter((_, i) => target[i] === op);
  const more = before.length > 20 ? ` and ${pluralize(before.length - 20, "more", "more")}` : "";
  return before.length ? [el("p", {}, "Runs after ", ...before.slice(0, 20).flatMap((reader) => [opLink(app, reader), " "]), more)] : [];
}

/** Returns the changes of an item. */
function changeLines(app, kind, number) {
  return ((app.changed[kind] && app.changed[kind].get(number)) || []).map((change) => el("p", { className: `is-${changeStatus(app, kind, number) || "changed"}` }, `${change.sign} ${change.kind}: ${change.message}`));
}

/** Returns a note if an item is only on one side. */
function sideNote(app, side) {
  return app.m.twoSides && side !== FIRST + SECOND ? el("p", {}, `Only in ${app.m.sides.titles[side - 1]}.`) : "";
}

/** Marks the side of an input. */
const sideMark = (app, side) => (app.m.twoSides && side !== FIRST + SECOND ? el("small", {}, ` (${app.m.sides.titles[side - 1]})`) : "");

function inputRows(app, op) {
  const { m } = app, rows = [];
  for (const wire of m.incoming.of(op)) {
    const pills = (m.wire.annotations[wire] || []).map((annotation) => pill(app, annotation));
    const reason = m.text(m.wire.reason[wire]);
    const into = m.wire.slot[wire] < 0;
    const outputs = m.ops.outputs[m.wire.source[wire]], at = 3 * m.wire.port[wire];
    const kind = at + 2 < outputs.length ? `${m.text(outputs[at + 1])} ${m.text(outputs[at + 2])}` : "";
    rows.push([m.wire.slot[wire], tableRow(into ? "↳" : `${m.wire.slot[wire]}`, opLink(app, m.wire.source[wire]), ` ${kind} `, ...pills, sideMark(app, m.side.wire[wire]), reason ? el("div", { className: "warn" }, reason) : "")]);
  }
  for (const constant of m.constants.of(op)) {
    const pills = (m.constant.annotations[constant] || []).map((annotation) => pill(app, annotation));
    const text = `${m.text(m.constant.role[constant])}: ${m.text(m.constant.name[constant])} ${m.text(m.constant.dtype[constant])} ${m.text(m.constant.shape[constant])} `;
    const reason = m.text(m.constant.reason[constant]);
    rows.push([m.constant.slot[constant], tableRow(`${m.constant.slot[constant]}`, text, ...pills, sideMark(app, m.side.constant[constant]), reason ? el("div", { className: "warn" }, reason) : "")]);
  }
  return rows.sort((a, b) => a[0] - b[0]).map(([, row]) => row);
}

function outputRows(app, op) {
  const { m } = app, rows = [], outputs = m.ops.outputs[op], out = Array.from(m.outgoing.of(op));
  for (let port = 0; port < Math.max(outputs.length / 3, out.length ? 1 : 0); port++) {
    const readers = [...new Set(out.filter((wire) => m.wire.port[wire] === port).map((wire) => m.wire.target[wire]))];
    const kind = 3 * port < outputs.length ? outputs.slice(3 * port, 3 * port + 3).map(m.text).join(" ") : "";
    const more = readers.length > 20 ? ` and ${readers.length - 20} more` : "";
    rows.push(tableRow(`${port}`, kind, el("div", {}, ...readers.slice(0, 20).flatMap((reader) => [opLink(app, reader), " "]), more)));
  }
  return rows;
}

function groupLink(app, group) {
  return el("button", { className: "link", onclick: () => select(app, { kind: "group", group }) }, app.m.text(app.m.group.label[group]));
}

function groupPath(app, op) {
  const path = [];
  for (let group = app.m.ops.group[op]; group >= 0; group = app.m.group.parent[group]) path.unshift(groupLink(app, group));
  return path.length ? el("p", {}, "In ", ...path.flatMap((link, i) => (i ? [" › ", link] : [link]))) : "";
}

function aboutWire(app, { wire }) {
  const { m } = app, from = m.wire.source[wire], to = m.wire.target[wire];
  const outputs = m.ops.outputs[from], at = 3 * m.wire.port[wire], reason = m.text(m.wire.reason[wire]);
  const annotations = m.wire.annotations[wire] || [];
  const float = !annotations.length && m.ops.inputs[to] ? reason || m.text(m.ops.reason[to]) || (m.planned ? "no rule matches this use" : "not quantized for this op") : "";
  return [
    el("h2", {}, `${m.full(from)}:${m.wire.port[wire]}`),
    el("p", {}, at + 2 < outputs.length ? outputs.slice(at, at + 3).map(m.text).join(" ") : ""),
    sideNote(app, m.side.wire[wire]),
    table(tableRow("from", opLink(app, from)), tableRow("to", opLink(app, to), m.wire.slot[wire] < 0 ? "" : ` [${m.wire.slot[wire]}]`)),
    annotations.length ? el("p", {}, ...annotations.map((annotation) => pill(app, annotation))) : "",
    float ? el("p", { className: "warn" }, `Not quantized here: ${float}.`) : "",
  ];
}

function aboutGroup(app, { group }) {
  const { m } = app, types = new Map(), counts = [0, 0, 0, 0], collapsed = app.collapsed.has(group);
  for (let op = 0; op < m.count; op++) {
    let ancestor = m.ops.group[op];
    while (ancestor > group) ancestor = m.group.parent[ancestor];
    if (ancestor !== group) continue;
    types.set(m.type(op), (types.get(m.type(op)) || 0) + 1);
    counts[m.ops.inputs[op]]++;
  }
  const top = [...types].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
  return [
    el("h2", {}, m.text(m.group.label[group])),
    el("p", {}, `${m.group.graph[group] ? "A graph" : "A name scope"} of ${pluralize(m.groupExtents[group].ops, "op")}.`),
    el("p", {}, el("button", { onclick: () => setCollapsed(app, group, !collapsed) }, collapsed ? "Expand" : "Collapse")),
    table(tableRow("quantized", `${counts[3]}`), tableRow("partly", `${counts[2]}`), tableRow("float", `${counts[1]}`)),
    el("h3", {}, "Ops"),
    table(...top.slice(0, 12).map(([type, number]) => tableRow(type, `${number}`)), top.length > 12 ? tableRow("", `and ${pluralize(top.length - 12, "other type")}`) : ""),
  ];
}

function aboutAnnotation(app, { annotation: number }) {
  const { m } = app, annotation = m.annotations[number], open = app.unfolded.has(number);
  const scales = (annotation.scale || []).map((scale) => (scale === null ? NaN : Math.fround(scale)));
  const zeros = annotation.zero || [];
  const range = annotation.low !== undefined && annotation.high !== undefined ? `[${shortNumber(annotation.low)}, ${shortNumber(annotation.high)}]` : "";
  return [
    el("h2", {}, annotation.tensor),
    annotation.name ? el("p", {}, annotation.name) : "",
    ...changeLines(app, "annotation", number),
    sideNote(app, m.changes && m.counterparts[number] === undefined && !Object.values(m.counterparts).includes(number) ? m.side.annotation[number] : FIRST + SECOND),
    table(
      tableRow("type", annotation.dtype || "?"),
      annotation.dynamic ? tableRow("scale", "computed in each run") : "",
      scales.length === 1 ? tableRow("scale", el("output", { className: "scale" }, `${scales[0]}`)) : "",
      scales.length > 1 ? tableRow("scales", `${annotation.count}, ${annotation.ends.map((end) => (end === null ? "?" : shortNumber(end))).join(" to ")}`) : "",
      zeros.length ? tableRow("zero point", zeros[0] === zeros[1] ? `${zeros[0]}` : zeros.join(" to ")) : "",
      range ? tableRow("range", range) : "",
      annotation.axis !== undefined ? tableRow("axis", `${annotation.axis}` + (annotation.block ? `, in blocks of ${annotation.block}` : "")) : "",
      annotation.scheme ? tableRow("scheme", annotation.scheme) : "",
      annotation.rule ? tableRow("rule", annotation.rule) : "",
      annotation.why ? tableRow("why", annotation.why) : "",
      annotation.note ? tableRow("note", annotation.note) : "",
      annotation.range_note ? tableRow("", annotation.range_note) : "",
    ),
    scales.length > 1 ? channelPlot(scales, annotation.count) : "",
    ...figureRows(app, number),
    ...counterpartRows(app, number),
    ...calibrationRows(annotation),
    el("h3", {}, "Read by"),
    el("p", {}, ...m.readers[number].slice(0, 30).flatMap((reader) => [opLink(app, reader.op), " "]), m.readers[number].length > 30 ? `and ${pluralize(m.readers[number].length - 30, "more", "more")}` : ""),
    annotation.ops ? el("h3", {}, "Represents") : "",
    table(...(annotation.ops || []).map(([type, name]) => tableRow(type, name))),
    el("p", {}, el("button", { onclick: () => toggleUnfold(app, number) }, open ? "Fold" : "Unfold")),
  ];
}

/** Returns the figures of an annotation. */
function figureRows(app, number) {
  const { m } = app, values = m.heat && m.heat.values[number], note = m.heat && m.heat.notes[number];
  if (!values) return [];
  const text = (figure, column) => (figure === null ? "not known" : typeof figure === "number" ? `${figure.toFixed(2)} ${column.unit}` : figure === "equal" ? "no error" : "no signal");
  return [
    el("h3", {}, "Compared"),
    table(...m.heat.columns.map((column, i) => tableRow(column.name, el("output", { className: "figure" }, text(values[i], column)))), note ? tableRow("note", note) : ""),
  ];
}

/** Compares an annotation with its counterpart on the other side. */
function counterpartRows(app, number) {
  const { m } = app, second = m.counterparts[number] === undefined ? Object.keys(m.counterparts).find((annotation) => m.counterparts[annotation] === number) : number;
  if (second === undefined) return [];
  const old = m.annotations[m.counterparts[second]], now = m.annotations[second];
  const scale = (annotation) => (annotation.dynamic ? "of each run" : !annotation.scale ? "" : annotation.count ? annotation.ends.map((end) => (end === null ? "?" : shortNumber(end))).join(" to ") : `${Math.fround(annotation.scale[0])}`);
  const span = ([lowest, highest]) => (lowest === highest ? `${lowest}` : `${lowest} to ${highest}`);
  const change = (from, to) => (`${from}` === `${to}` ? `${to}` : `${from} → ${to}`);
  return [
    el("h3", {}, `${m.sides.titles[0]} → ${m.sides.titles[1]}`),
    table(tableRow("type", change(old.dtype || "?", now.dtype || "?")), scale(old) || scale(now) ? tableRow("scale", change(scale(old), scale(now))) : "",
      old.zero && now.zero ? tableRow("zero point", change(span(old.zero), span(now.zero))) : ""),
  ];
}

/** Plots the scale of each channel as a bar. */
function channelPlot(scales, count) {
  const width = 300, height = 90, largest = scales.reduce((a, b) => (b > a ? b : a), 0), step = width / scales.length;
  const bars = scales.map((scale, i) => `M${(i * step).toFixed(2)} ${height}v${((-scale / largest) * height).toFixed(2)}h${(step * 0.85).toFixed(2)}V${height}z`);
  return el("figure", {},
    svg("svg", { viewBox: `0 0 ${width} ${height + 2}`, role: "img", "aria-label": "scale of each channel", class: "plot" }, svg("path", { d: bars.join(""), class: "in" })),
    el("figcaption", {}, `scale of channels 0 to ${count - 1}, from 0 to ${shortNumber(largest)}`));
}

const percent = (fraction) => (fraction ? (fraction < 1e-4 ? `${(fraction * 1e6).toPrecision(2)} in a million` : `${+(fraction * 100).toPrecision(3)}%`) : "nothing");

/** Returns the calibration statistics: histogram with the range, clipped shares, cost. */
function calibrationRows(annotation) {
  const statistics = annotation.statistics;
  if (!statistics) return [];
  const clipped = annotation.below !== undefined ? `${percent(annotation.below)} below, ${percent(annotation.above)} above` : "";
  return [
    el("h3", {}, "Calibration"),
    annotation.bars ? histogram(annotation) : "",
    table(
      tableRow("values", `${statistics.count.toLocaleString("en")}` + (statistics.low === null || statistics.high === null ? "" : ` in [${shortNumber(statistics.low)}, ${shortNumber(statistics.high)}]`)),
      statistics.nan ? tableRow("NaN", `${statistics.nan}`) : "", statistics.inf ? tableRow("infinite", `${statistics.inf}`) : "",
      clipped ? tableRow("clipped", clipped) : "",
      annotation.sqnr !== undefined ? tableRow("SQNR", `${annotation.sqnr.toFixed(1)} dB, estimated`) : "",
      annotation.method ? tableRow("method", annotation.method) : "",
      ...(annotation.alternatives || []).map(([method, sqnr, cut]) => tableRow(method, `${sqnr === null ? "exact" : `${sqnr.toFixed(1)} dB`}, ${percent(cut)} clipped`)),
    ),
  ];
}

function histogram(annotation) {
  const width = 300, height = 100, step = width / annotation.bars.length, [first, last] = annotation.range;
  const path = (from, to) => annotation.bars.slice(from, to).map((bar, i) => `M${((from + i) * step).toFixed(1)} ${height}v${(-bar * height) / 100}h${step.toFixed(2)}V${height}z`).join("");
  const ticks = annotation.ticks.map(([position, label]) => svg("text", { x: Math.min(Math.max(position * width, 8), width - 12), y: height + 13, "text-anchor": "middle" }, label));
  return el("figure", {},
    svg("svg", { viewBox: `0 0 ${width} ${height + 18}`, role: "img", "aria-label": "histogram of the values, with the range", class: "plot" },
      svg("rect", { x: first * step, y: 0, width: (last - first) * step, height: height, class: "band" }),
      svg("path", { d: path(0, first) + path(last), class: "out" }), svg("path", { d: path(first, last), class: "in" }), ...ticks),
    el("figcaption", {}, "counts on a log scale; the band is the range; values outside are clipped"));
}
