// Selection, and the panel that tells of it.

/** The wires that belong to what is selected. */
function wiresOf(app, what) {
  const { m } = app;
  if (what.kind === "op") return [...m.incoming.of(what.op), ...m.outgoing.of(what.op)];
  if (what.kind === "wire") return [what.wire];
  if (what.kind === "badge") return m.readers[what.badge].flatMap((one) => (one.wire === undefined ? [] : [one.wire]));
  return [];
}

/** The op to look at for what is selected. */
function opOf(app, what) {
  const { m } = app;
  if (what.kind === "op") return what.op;
  if (what.kind === "wire") return m.wire.target[what.wire];
  return what.kind === "badge" && m.readers[what.badge].length ? m.readers[what.badge][0].op : -1;
}

/** Selects something, tells about it, and moves it into view if asked. */
function select(app, what, { move = false, link = true } = {}) {
  app.selected = what;
  const op = what ? opOf(app, what) : -1;
  if (move && op >= 0) {
    for (let group = app.m.ops.group[op]; group >= 0; group = app.m.group.parent[group]) app.collapsed.delete(group);
    rebuild(app);
    lookAt(app, op);
  }
  if (link) {
    const name = what && op >= 0 ? `#op=${encodeURIComponent(app.m.full(op))}` : "#";
    app.linked = name;
    if (location.hash !== name && (name !== "#" || location.hash)) location.hash = name;
  }
  app.panel.replaceChildren(...told(app, what));
  app.panel.scrollTop = 0;
  app.redraw();
}

/** What something is called, all of it: shown where the pointer is, for the drawing cuts long names. */
function nameOf(app, what) {
  const { m } = app;
  if (what.kind === "op") return `${m.type(what.op)} ${m.full(what.op)}`;
  if (what.kind === "wire") return `${m.full(m.wire.source[what.wire])}:${m.wire.port[what.wire]}`;
  if (what.kind === "group") return m.text(m.group.label[what.group]);
  const badge = m.badges[what.badge];
  return `${badge.name || badge.tensor}: ${badgeSays(app, what.badge)}`;
}

function told(app, what) {
  if (!what) return aboutModel(app);
  return { op: aboutOp, wire: aboutWire, badge: aboutBadge, group: aboutGroup }[what.kind](app, what);
}

const goto = (app, op, said) => el("button", { className: "link", onclick: () => select(app, { kind: "op", op }, { move: true }) }, said || app.m.full(op));
const rowOf = (label, ...what) => el("tr", {}, el("th", { scope: "row" }, label), el("td", {}, ...what));
const table = (...rows) => el("table", {}, ...rows.filter(Boolean));
const pill = (app, badge) => {
  const made = el("button", { className: "pill", onclick: () => select(app, { kind: "badge", badge }) }, badgeText(app.m.badges[badge]));
  made.style.background = badgeColour(app, app.m.badges[badge].dtype);
  return made;
};

function aboutModel(app) {
  const { m } = app;
  const rules = new Map();
  for (const badge of m.badges) if (badge.rule) rules.set(badge.rule, (rules.get(badge.rule) || 0) + 1);
  return [
    el("h2", {}, m.title),
    el("p", {}, `${m.format}, ${counted(m.count, "op")}, ${counted(m.badges.length, m.planned ? "site" : "quantized tensor")}.`),
    m.planned ? el("p", {}, "This is a plan: badges are what insert would put there.") : "",
    ...m.notes.map((note) => el("p", { className: "warn" }, note)),
    ...(m.heat ? m.heat.says.map((said) => el("p", {}, said)) : []),
    ...legend(app),
    rules.size ? el("h3", {}, "Rules") : "",
    table(...[...rules].map(([rule, number]) => rowOf(rule, counted(number, "tensor")))),
    el("h3", {}, "Keys"),
    table(
      rowOf("/", "search"), rowOf("n  p", m.heat || m.changes ? "next, previous result, or entry of the list" : "next, previous result"), rowOf("arrows", "to what an op reads, to who reads it, along its row"),
      rowOf("+  −  0  1", "nearer, farther, all, full size"), rowOf("u", "unfold or fold the selected badge, or all"),
      rowOf("c  e", "collapse the group around, expand all"),
      colourings(m).length > 1 ? rowOf("h", "other colours") : "",
      m.two ? rowOf("v", "both sides, the first, the second") : "",
      m.control.source.length ? rowOf("d", "control edges on or off") : "",
      rowOf("?", "this"), rowOf("Esc", "clear"), rowOf("wheel", "moves; with Ctrl it zooms"),
    ),
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
    ...changesOf(app, "op", op),
    onlyIn(app, m.side.op[op]),
    m.was[op] && m.was[op].full !== m.full(op) ? el("p", {}, `In ${m.sides.titles[0]} it is ${m.was[op].full}, ${m.was[op].type}.`) : "",
    m.ops.reason[op] ? el("p", { className: "warn" }, `Float: ${m.text(m.ops.reason[op])}.`) : "",
    rule ? el("p", {}, `Made by ${rule}.`) : "",
    groupPath(app, op),
    (m.ops.badges[op] || []).length ? el("p", {}, ...m.ops.badges[op].map((badge) => pill(app, badge))) : "",
    el("h3", {}, "Inputs"),
    table(...inputRows(app, op)),
    el("h3", {}, "Outputs"),
    table(...outputRows(app, op)),
    ...runsAfter(app, op),
    (m.ops.calls[op] || []).length ? el("p", {}, "Runs ", ...m.ops.calls[op].map((group) => groupLink(app, group))) : "",
    attrs.length ? el("h3", {}, "Attributes") : "",
    table(...attrs.map(([name, ...value]) => rowOf(name, value.join(" = ")))),
  ];
}

/** What must run before an op though it reads nothing of it. */
function runsAfter(app, op) {
  const { source, target } = app.m.control, before = Array.from(source).filter((_, i) => target[i] === op);
  const more = before.length > 20 ? ` and ${counted(before.length - 20, "more", "more")}` : "";
  return before.length ? [el("p", {}, "Runs after ", ...before.slice(0, 20).flatMap((one) => [goto(app, one), " "]), more)] : [];
}

/** What changed about something. */
function changesOf(app, kind, number) {
  return ((app.changed[kind] && app.changed[kind].get(number)) || []).map((change) => el("p", { className: `is-${statusOf(app, kind, number) || "changed"}` }, `${change.sign} ${change.kind}: ${change.says}`));
}

/** Which side alone something is on. */
function onlyIn(app, side) {
  return app.m.two && side !== FIRST + SECOND ? el("p", {}, `Only in ${app.m.sides.titles[side - 1]}.`) : "";
}

/** Tells apart what of an input is on which side. */
const sideMark = (app, side) => (app.m.two && side !== FIRST + SECOND ? el("small", {}, ` (${app.m.sides.titles[side - 1]})`) : "");

function inputRows(app, op) {
  const { m } = app, found = [];
  for (const wire of m.incoming.of(op)) {
    const pills = (m.wire.badges[wire] || []).map((badge) => pill(app, badge));
    const reason = m.text(m.wire.reason[wire]);
    const into = m.wire.slot[wire] < 0;
    const outputs = m.ops.outputs[m.wire.source[wire]], at = 3 * m.wire.port[wire];
    const kind = at + 2 < outputs.length ? `${m.text(outputs[at + 1])} ${m.text(outputs[at + 2])}` : "";
    found.push([m.wire.slot[wire], rowOf(into ? "↳" : `${m.wire.slot[wire]}`, goto(app, m.wire.source[wire]), ` ${kind} `, ...pills, sideMark(app, m.side.wire[wire]), reason ? el("div", { className: "warn" }, reason) : "")]);
  }
  for (const one of m.constants.of(op)) {
    const pills = (m.constant.badges[one] || []).map((badge) => pill(app, badge));
    const said = `${m.text(m.constant.role[one])}: ${m.text(m.constant.name[one])} ${m.text(m.constant.dtype[one])} ${m.text(m.constant.shape[one])} `;
    const reason = m.text(m.constant.reason[one]);
    found.push([m.constant.slot[one], rowOf(`${m.constant.slot[one]}`, said, ...pills, sideMark(app, m.side.constant[one]), reason ? el("div", { className: "warn" }, reason) : "")]);
  }
  return found.sort((a, b) => a[0] - b[0]).map(([, row]) => row);
}

function outputRows(app, op) {
  const { m } = app, found = [], outputs = m.ops.outputs[op], out = Array.from(m.outgoing.of(op));
  for (let port = 0; port < Math.max(outputs.length / 3, out.length ? 1 : 0); port++) {
    const readers = [...new Set(out.filter((wire) => m.wire.port[wire] === port).map((wire) => m.wire.target[wire]))];
    const kind = 3 * port < outputs.length ? outputs.slice(3 * port, 3 * port + 3).map(m.text).join(" ") : "";
    const more = readers.length > 20 ? ` and ${readers.length - 20} more` : "";
    found.push(rowOf(`${port}`, kind, el("div", {}, ...readers.slice(0, 20).flatMap((one) => [goto(app, one), " "]), more)));
  }
  return found;
}

function groupLink(app, group) {
  return el("button", { className: "link", onclick: () => select(app, { kind: "group", group }) }, app.m.text(app.m.group.label[group]));
}

function groupPath(app, op) {
  const path = [];
  for (let group = app.m.ops.group[op]; group >= 0; group = app.m.group.parent[group]) path.unshift(groupLink(app, group));
  return path.length ? el("p", {}, "In ", ...path.flatMap((one, i) => (i ? [" › ", one] : [one]))) : "";
}

function aboutWire(app, { wire }) {
  const { m } = app, from = m.wire.source[wire], to = m.wire.target[wire];
  const outputs = m.ops.outputs[from], at = 3 * m.wire.port[wire], reason = m.text(m.wire.reason[wire]);
  const badges = m.wire.badges[wire] || [];
  const float = !badges.length && m.ops.inputs[to] ? reason || m.text(m.ops.reason[to]) || (m.planned ? "no rule matches this use" : "nothing quantizes it for this op") : "";
  return [
    el("h2", {}, `${m.full(from)}:${m.wire.port[wire]}`),
    el("p", {}, at + 2 < outputs.length ? outputs.slice(at, at + 3).map(m.text).join(" ") : ""),
    onlyIn(app, m.side.wire[wire]),
    table(rowOf("from", goto(app, from)), rowOf("to", goto(app, to), m.wire.slot[wire] < 0 ? "" : ` [${m.wire.slot[wire]}]`)),
    badges.length ? el("p", {}, ...badges.map((badge) => pill(app, badge))) : "",
    float ? el("p", { className: "warn" }, `Not quantized here: ${float}.`) : "",
  ];
}

function aboutGroup(app, { group }) {
  const { m } = app, types = new Map(), by = [0, 0, 0, 0], shut = app.collapsed.has(group);
  for (let op = 0; op < m.count; op++) {
    let here = m.ops.group[op];
    while (here > group) here = m.group.parent[here];
    if (here !== group) continue;
    types.set(m.type(op), (types.get(m.type(op)) || 0) + 1);
    by[m.ops.inputs[op]]++;
  }
  const top = [...types].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
  return [
    el("h2", {}, m.text(m.group.label[group])),
    el("p", {}, `${m.group.graph[group] ? "A graph" : "A name scope"} of ${counted(m.groupOps[group].ops, "op")}.`),
    el("p", {}, el("button", { onclick: () => collapse(app, group, !shut) }, shut ? "Expand" : "Collapse")),
    table(rowOf("quantized", `${by[3]}`), rowOf("partly", `${by[2]}`), rowOf("float", `${by[1]}`)),
    el("h3", {}, "Ops"),
    table(...top.slice(0, 12).map(([type, number]) => rowOf(type, `${number}`)), top.length > 12 ? rowOf("", `and ${counted(top.length - 12, "other type")}`) : ""),
  ];
}

function aboutBadge(app, { badge: number }) {
  const { m } = app, badge = m.badges[number], open = app.unfolded.has(number);
  const scales = (badge.scale || []).map((one) => (one === null ? NaN : Math.fround(one)));
  const zeros = badge.zero || [];
  const range = badge.low !== undefined && badge.high !== undefined ? `[${brief(badge.low)}, ${brief(badge.high)}]` : "";
  return [
    el("h2", {}, badge.tensor),
    badge.name ? el("p", {}, badge.name) : "",
    ...changesOf(app, "badge", number),
    onlyIn(app, m.changes && m.twins[number] === undefined && !Object.values(m.twins).includes(number) ? m.side.badge[number] : FIRST + SECOND),
    table(
      rowOf("type", badge.dtype || "?"),
      badge.dynamic ? rowOf("scale", "computed in each run") : "",
      scales.length === 1 ? rowOf("scale", el("output", { className: "scale" }, `${scales[0]}`)) : "",
      scales.length > 1 ? rowOf("scales", `${badge.count}, ${badge.ends.map((one) => (one === null ? "?" : brief(one))).join(" to ")}`) : "",
      zeros.length ? rowOf("zero point", zeros[0] === zeros[1] ? `${zeros[0]}` : zeros.join(" to ")) : "",
      range ? rowOf("range", range) : "",
      badge.axis !== undefined ? rowOf("axis", `${badge.axis}` + (badge.block ? `, in blocks of ${badge.block}` : "")) : "",
      badge.scheme ? rowOf("scheme", badge.scheme) : "",
      badge.rule ? rowOf("rule", badge.rule) : "",
      badge.why ? rowOf("why", badge.why) : "",
      badge.note ? rowOf("note", badge.note) : "",
      badge.picked ? rowOf("", badge.picked) : "",
    ),
    scales.length > 1 ? channelPlot(scales, badge.count) : "",
    ...figuresOf(app, number),
    ...beforeOf(app, number),
    ...seenBy(badge),
    el("h3", {}, "Read by"),
    el("p", {}, ...m.readers[number].slice(0, 30).flatMap((one) => [goto(app, one.op), " "]), m.readers[number].length > 30 ? `and ${counted(m.readers[number].length - 30, "more", "more")}` : ""),
    badge.ops ? el("h3", {}, "Stands for") : "",
    table(...(badge.ops || []).map(([type, name]) => rowOf(type, name))),
    el("p", {}, el("button", { onclick: () => unfold(app, number) }, open ? "Fold" : "Unfold")),
  ];
}

/** The figures of a badge, each with its colour. */
function figuresOf(app, number) {
  const { m } = app, found = m.heat && m.heat.of[number], note = m.heat && m.heat.notes[number];
  if (!found) return [];
  const said = (figure, column) => (figure === null ? "not known" : typeof figure === "number" ? `${figure.toFixed(2)} ${column.unit}` : figure === "equal" ? "no error" : "nothing is left");
  return [
    el("h3", {}, "Compared"),
    table(...m.heat.columns.map((column, i) => rowOf(column.name, el("output", { className: "figure" }, said(found[i], column)))), note ? rowOf("note", note) : ""),
  ];
}

/** What stands in a badge's place on the other side. */
function beforeOf(app, number) {
  const { m } = app, one = m.twins[number] === undefined ? Object.keys(m.twins).find((badge) => m.twins[badge] === number) : number;
  if (one === undefined) return [];
  const old = m.badges[m.twins[one]], now = m.badges[one];
  const scale = (badge) => (badge.dynamic ? "of each run" : !badge.scale ? "" : badge.count ? badge.ends.map((end) => (end === null ? "?" : brief(end))).join(" to ") : `${Math.fround(badge.scale[0])}`);
  const span = ([least, most]) => (least === most ? `${least}` : `${least} to ${most}`);
  const change = (from, to) => (`${from}` === `${to}` ? `${to}` : `${from} → ${to}`);
  return [
    el("h3", {}, `${m.sides.titles[0]} → ${m.sides.titles[1]}`),
    table(rowOf("type", change(old.dtype || "?", now.dtype || "?")), scale(old) || scale(now) ? rowOf("scale", change(scale(old), scale(now))) : "",
      old.zero && now.zero ? rowOf("zero point", change(span(old.zero), span(now.zero))) : ""),
  ];
}

/** One bar for each channel's scale, from 0 up. */
function channelPlot(scales, count) {
  const width = 300, tall = 90, most = scales.reduce((a, b) => (b > a ? b : a), 0), step = width / scales.length;
  const bars = scales.map((one, i) => `M${(i * step).toFixed(2)} ${tall}v${((-one / most) * tall).toFixed(2)}h${(step * 0.85).toFixed(2)}V${tall}z`);
  return el("figure", {},
    svg("svg", { viewBox: `0 0 ${width} ${tall + 2}`, role: "img", "aria-label": "scale of each channel", class: "plot" }, svg("path", { d: bars.join(""), class: "in" })),
    el("figcaption", {}, `scale of channels 0 to ${count - 1}, from 0 to ${brief(most)}`));
}

const share = (part) => (part ? (part < 1e-4 ? `${(part * 1e6).toPrecision(2)} in a million` : `${+(part * 100).toPrecision(3)}%`) : "nothing");

/** What calibration saw of the tensor: a histogram with the range, what that clips, what it costs. */
function seenBy(badge) {
  const seen = badge.seen;
  if (!seen) return [];
  const clipped = badge.below !== undefined ? `${share(badge.below)} below, ${share(badge.above)} above` : "";
  return [
    el("h3", {}, "Calibration"),
    badge.bars ? histogram(badge) : "",
    table(
      rowOf("values", `${seen.count.toLocaleString("en")}` + (seen.low === null || seen.high === null ? "" : ` in [${brief(seen.low)}, ${brief(seen.high)}]`)),
      seen.nan ? rowOf("NaN", `${seen.nan}`) : "", seen.inf ? rowOf("infinite", `${seen.inf}`) : "",
      clipped ? rowOf("clipped", clipped) : "",
      badge.sqnr !== undefined ? rowOf("SQNR", `${badge.sqnr.toFixed(1)} dB, estimated`) : "",
      badge.method ? rowOf("method", badge.method) : "",
      ...(badge.others || []).map(([method, sqnr, cut]) => rowOf(method, `${sqnr === null ? "exact" : `${sqnr.toFixed(1)} dB`}, ${share(cut)} clipped`)),
    ),
  ];
}

function histogram(badge) {
  const width = 300, tall = 100, step = width / badge.bars.length, [first, last] = badge.range;
  const path = (from, to) => badge.bars.slice(from, to).map((one, i) => `M${((from + i) * step).toFixed(1)} ${tall}v${(-one * tall) / 100}h${step.toFixed(2)}V${tall}z`).join("");
  const ticks = badge.ticks.map(([place, label]) => svg("text", { x: Math.min(Math.max(place * width, 8), width - 12), y: tall + 13, "text-anchor": "middle" }, label));
  return el("figure", {},
    svg("svg", { viewBox: `0 0 ${width} ${tall + 18}`, role: "img", "aria-label": "histogram of the values, with the range", class: "plot" },
      svg("rect", { x: first * step, y: 0, width: (last - first) * step, height: tall, class: "band" }),
      svg("path", { d: path(0, first) + path(last), class: "out" }), svg("path", { d: path(first, last), class: "in" }), ...ticks),
    el("figcaption", {}, "counts on a log scale; the band is the range, what is outside is clipped"));
}
