// The data of the page: what graphquant/view/payload.py packed, with its columns undone. These files are joined to one
// plain script when a page is written (graphquant/view/html.py), in the order that is given there; nothing is fetched.
// Names come out of models: they are set as text, never as HTML.

const BOX = 52; // height of a box
const GAP = 58; // room above a row of boxes, for wires and badges
const OPENED = 64; // more room above a row where a badge is unfolded
const NEAR = 0.5; // from this zoom on, words are drawn
const MIDDLE = 0.16; // from this one, wires as curves and badges as dots
const ROUND = 0.35; // from this one, boxes with an outline and their type
const LABEL = 15; // height of a frame's label; frames that begin in a row have room above it
const RESULTS = 100; // results of a search that are listed
const CONTROLS = 60; // up to so many control edges they are drawn from the beginning
const FIRST = 1, SECOND = 2; // the sides of a page of two models; what is on both, or of one model, is their sum
const STATES = ["computes on no float", "float", "partly quantized", "quantized"];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const counted = (number, what, several = `${what}s`) => `${number.toLocaleString("en")} ${number === 1 ? what : several}`;

/** An element with properties, listeners ("onclick") and children; strings become text. */
function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

function svg(tag, props, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}


async function unpacked() {
  const text = atob(document.getElementById("data").textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** Undoes differences. */
function summed(steps) {
  const found = new Int32Array(steps.length);
  for (let i = 0, sum = 0; i < steps.length; i++) found[i] = sum += steps[i];
  return found;
}

/** For each of `count` owners where its entries of `owner` begin, with the entries in order. */
function ranges(owner, count) {
  const start = new Int32Array(count + 1);
  for (const one of owner) start[one + 1]++;
  for (let i = 0; i < count; i++) start[i + 1] += start[i];
  const at = start.slice(), items = new Int32Array(owner.length);
  for (let i = 0; i < owner.length; i++) items[at[owner[i]]++] = i;
  return { start, items, of: (one) => items.subarray(start[one], start[one + 1]) };
}

/** The packed data with its columns undone, and what is looked up again and again. */
function model(data) {
  const { texts, ops, wires, constants, groups, badges } = data;
  const count = ops.name.length, layer = summed(ops.layer), x = Float32Array.from(summed(ops.x));
  const source = summed(wires.source), target = source.map((from, i) => from + wires.target[i]);
  const tensor = new Int32Array(source.length);
  for (let i = 0; i < tensor.length; i++) {
    const same = i && source[i] === source[i - 1] && wires.port[i] === wires.port[i - 1];
    tensor[i] = i ? tensor[i - 1] + !same : 0;
  }
  const rows = layer.reduce((most, one) => Math.max(most, one + 1), 0);
  const inRow = ranges(layer, rows);
  for (let row = 0; row < rows; row++) inRow.of(row).sort((a, b) => x[a] - x[b]);
  const trunks = Object.fromEntries(Object.entries(wires.trunks).map(([key, steps]) => [key, summed(steps)]));
  const m = {
    ...data, count, layer, x, rows, inRow, trunks,
    text: (number) => texts[number],
    name: (op) => texts[ops.name[op]],
    type: (op) => texts[ops.type[op]],
    kind: (op) => texts[ops.kind[op]],
    full: (op) => (ops.graph[op] ? `${texts[ops.graph[op]]}/` : "") + texts[ops.name[op]],
    wire: { ...wires, source, target, tensor, count: source.length },
    outgoing: ranges(source, count),
    incoming: ranges(target, count),
    constant: { ...constants, op: summed(constants.op) },
    group: { ...groups, count: groups.label.length },
    control: { source: summed(data.controls[0]), target: summed(data.controls[1]) },
    two: Boolean(data.sides),
    side: sides(data, count, source.length),
    twins: data.sides ? data.sides.twins : {},
    heat: data.heat || null,
    changes: data.changes || null,
  };
  const was = data.sides ? data.sides.was : {};
  for (const [op, [graph, name, type, inputs, reason, shape]] of Object.entries(was)) {
    was[op] = { full: (graph ? `${texts[graph]}/` : "") + texts[name], name: texts[name], type: texts[type], inputs, reason: texts[reason], shape: texts[shape] };
  }
  m.was = was;
  m.constants = ranges(m.constant.op, count);
  m.last = (name) => name.slice(name.lastIndexOf("/", name.length - 2) + 1);
  m.short = (op) => m.last(m.name(op));
  m.groupOps = groupOps(m);
  m.parts = outlines(m);
  m.portX = ports(m);
  m.readers = badges.map(() => []);
  const mark = (marked, readers) => marked.forEach((badge) => m.readers[badge].push(readers));
  for (const [wire, marked] of Object.entries(wires.badges)) mark(marked, { op: target[wire], wire: +wire });
  for (const [one, marked] of Object.entries(constants.badges)) mark(marked, { op: m.constant.op[one], constant: +one });
  for (const [op, marked] of Object.entries(ops.badges)) mark(marked, { op: +op });
  m.opBadges = ranges(m.readers.flatMap((all) => all.map((one) => one.op)), count);
  const flat = m.readers.flatMap((all, badge) => all.map(() => badge));
  m.badgesOf = (op) => [...new Set(Array.from(m.opBadges.of(op), (i) => flat[i]))];
  return m;
}

/** The sides that ops, wires, constants and badges are on. */
function sides(data, ops, wires) {
  const { sides: told, constants, badges } = data;
  const of = (count, alone) => {
    const found = new Uint8Array(count).fill(FIRST + SECOND);
    for (const [one, side] of Object.entries(alone || {})) found[one] = side;
    return found;
  };
  const badge = of(badges.length);
  if (told) badge.fill(FIRST, 0, told.split).fill(SECOND, told.split);
  const [boxes, between, held] = told ? [told.boxes, told.wires, told.constants] : [];
  return { op: of(ops, boxes), wire: of(wires, between), constant: of(constants.op.length, held), badge };
}

/** How many ops each group holds, those of groups in it too, and the rows and columns they take. */
function groupOps(m) {
  const { parent, count } = m.group;
  const found = Array.from({ length: count }, () => ({ ops: 0, deep: 0, level: 0, top: Infinity, bottom: -1, left: Infinity, right: -Infinity }));
  for (let op = 0; op < m.count; op++) {
    const group = m.ops.group[op];
    if (group < 0) continue;
    const one = found[group], half = m.ops.width[op] / 2;
    one.ops++;
    one.top = Math.min(one.top, m.layer[op]);
    one.bottom = Math.max(one.bottom, m.layer[op]);
    one.left = Math.min(one.left, m.x[op] - half);
    one.right = Math.max(one.right, m.x[op] + half);
  }
  for (let group = 0; group < count; group++) if (parent[group] >= 0) found[group].level = found[parent[group]].level + 1;
  for (let group = count - 1; group >= 0; group--) {
    if (parent[group] < 0) continue;
    const one = found[group], outer = found[parent[group]];
    outer.ops += one.ops;
    outer.deep = Math.max(outer.deep, one.deep + 1);
    outer.top = Math.min(outer.top, one.top);
    outer.bottom = Math.max(outer.bottom, one.bottom);
    outer.left = Math.min(outer.left, one.left);
    outer.right = Math.max(outer.right, one.right);
  }
  return found;
}

/** Where on its target each wire ends: side by side, in the order in which they come. */
function ports(m) {
  const found = new Float32Array(m.wire.count);
  const from = (wire) => {
    const trunk = m.trunks[m.wire.tensor[wire]];
    const passed = m.layer[m.wire.target[wire]] - m.layer[m.wire.source[wire]] - 1;
    return trunk && passed > 0 ? trunk[Math.min(passed, trunk.length) - 1] : m.x[m.wire.source[wire]];
  };
  for (let op = 0; op < m.count; op++) {
    const read = m.incoming.of(op);
    if (read.length > 1) read.sort((a, b) => from(a) - from(b) || a - b);
    const apart = Math.min(26, (m.ops.width[op] - 16) / read.length);
    read.forEach((wire, i) => { found[wire] = m.x[op] + (i - (read.length - 1) / 2) * apart; });
  }
  return found;
}
