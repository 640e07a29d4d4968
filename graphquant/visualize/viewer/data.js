// The page's data as packed by graphquant/visualize/viewer_data.py, with decoded columns. That module concatenates these
// files to one plain script in the order given there; the page loads nothing.
// Names come from models: they are set as text, never as HTML.

const BOX_HEIGHT = 60; // height of a box
const ROW_GAP = 30; // room for the curves of wires above a row of boxes and its annotations
const PILL_HEIGHT = 20, PILL_DIGIT = 8, MAX_PILL = 190; // an annotation: its height, the width of a character, the largest width
const OP_WIDTH = 160, OP_HEIGHT = 36; // an op of an unfolded annotation
const CONSTANT_HEIGHT = 22; // an unfolded constant
const TIER_GAP = 8; // room between annotations
const READABLE_ZOOM = 12 / 13; // from this zoom on, the smallest text has 12 pixels
const MAX_BOX = 280; // the largest width of a box, as in viewer_data.py
const TEXT_ZOOM = 0.5; // from this zoom on, text is drawn
const CURVE_ZOOM = 0.16; // from this zoom on, wires are curves and annotations dots
const OUTLINE_ZOOM = 0.35; // from this zoom on, boxes have an outline and their type
const LABEL_HEIGHT = 18; // height of a frame's label, reserved above the row in which the frame begins
const MAX_RESULTS = 100; // listed search results
const MAX_CONTROLS = 60; // control edges are drawn initially up to this number
const FIRST = 1, SECOND = 2; // bits of the sides of a page of two models; parts on both sides, or of one model, have the sum
const STATES = ["no float inputs", "float", "partly quantized", "quantized"];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const pluralize = (number, noun, plural = `${noun}s`) => `${number.toLocaleString("en")} ${number === 1 ? noun : plural}`;

/** Creates an element with properties, listeners ("onclick") and children; strings become text. */
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}

function svg(tag, props, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}


async function unpackData() {
  const text = atob(document.getElementById("data").textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** Returns cumulative sums: the inverse of differences. */
function cumulative(steps) {
  const result = new Int32Array(steps.length);
  for (let i = 0, sum = 0; i < steps.length; i++) result[i] = sum += steps[i];
  return result;
}

/** Groups entries by owner: the start of each of `count` owners, and the entries in order. */
function groupByOwner(owner, count) {
  const start = new Int32Array(count + 1);
  for (const index of owner) start[index + 1]++;
  for (let i = 0; i < count; i++) start[i + 1] += start[i];
  const next = start.slice(), items = new Int32Array(owner.length);
  for (let i = 0; i < owner.length; i++) items[next[owner[i]]++] = i;
  return { start, items, of: (index) => items.subarray(start[index], start[index + 1]) };
}

/** Decodes the packed data and builds lookup tables. */
function model(data) {
  const { texts, ops, wires, constants, groups, annotations } = data;
  const count = ops.name.length, layer = cumulative(ops.layer), x = Float32Array.from(cumulative(ops.x));
  const source = cumulative(wires.source), target = source.map((from, i) => from + wires.target[i]);
  const tensor = new Int32Array(source.length);
  for (let i = 0; i < tensor.length; i++) {
    const continues = i && source[i] === source[i - 1] && wires.port[i] === wires.port[i - 1];
    tensor[i] = i ? tensor[i - 1] + !continues : 0;
  }
  const rows = layer.reduce((count, row) => Math.max(count, row + 1), 0);
  const inRow = groupByOwner(layer, rows);
  for (let row = 0; row < rows; row++) inRow.of(row).sort((a, b) => x[a] - x[b]);
  const trunks = Object.fromEntries(Object.entries(wires.trunks).map(([key, steps]) => [key, cumulative(steps)]));
  const m = {
    ...data, count, layer, x, rows, inRow, trunks,
    text: (number) => texts[number],
    name: (op) => texts[ops.name[op]],
    type: (op) => texts[ops.type[op]],
    kind: (op) => texts[ops.kind[op]],
    full: (op) => (ops.graph[op] ? `${texts[ops.graph[op]]}/` : "") + texts[ops.name[op]],
    wire: { ...wires, source, target, tensor, count: source.length },
    outgoing: groupByOwner(source, count),
    incoming: groupByOwner(target, count),
    constant: { ...constants, op: cumulative(constants.op) },
    group: { ...groups, count: groups.label.length },
    control: { source: cumulative(data.controls[0]), target: cumulative(data.controls[1]) },
    twoSides: Boolean(data.sides),
    side: sides(data, count, source.length),
    counterparts: data.sides ? data.sides.counterparts : {},
    heat: data.heat || null,
    changes: data.changes || null,
  };
  const was = data.sides ? data.sides.first_boxes : {};
  for (const [op, [graph, name, type, inputs, reason, shape]] of Object.entries(was)) {
    was[op] = { full: (graph ? `${texts[graph]}/` : "") + texts[name], name: texts[name], type: texts[type], inputs, reason: texts[reason], shape: texts[shape] };
  }
  m.firstBoxes = was;
  m.constants = groupByOwner(m.constant.op, count);
  m.last = (name) => name.slice(name.lastIndexOf("/", name.length - 2) + 1);
  m.short = (op) => (ops.labels[op] === undefined ? m.last(m.name(op)) : texts[ops.labels[op]]);
  m.groupExtents = groupExtents(m);
  m.frameParts = frameParts(m);
  m.portX = portPositions(m);
  m.readers = annotations.map(() => []);
  const addReader = (marked, reader) => marked.forEach((annotation) => m.readers[annotation].push(reader));
  for (const [wire, marked] of Object.entries(wires.annotations)) addReader(marked, { op: target[wire], wire: +wire });
  for (const [constant, marked] of Object.entries(constants.annotations)) addReader(marked, { op: m.constant.op[constant], constant: +constant });
  for (const [op, marked] of Object.entries(ops.annotations)) addReader(marked, { op: +op });
  m.opAnnotations = groupByOwner(m.readers.flatMap((all) => all.map((reader) => reader.op)), count);
  const annotationOf = m.readers.flatMap((all, annotation) => all.map(() => annotation));
  m.annotationsOf = (op) => [...new Set(Array.from(m.opAnnotations.of(op), (i) => annotationOf[i]))];
  return m;
}

/** Returns the side bits of ops, wires, constants and annotations. */
function sides(data, ops, wires) {
  const { sides: packed, constants, annotations } = data;
  const of = (count, oneSided) => {
    const result = new Uint8Array(count).fill(FIRST + SECOND);
    for (const [index, side] of Object.entries(oneSided || {})) result[index] = side;
    return result;
  };
  const annotation = of(annotations.length);
  if (packed) annotation.fill(FIRST, 0, packed.split).fill(SECOND, packed.split);
  const [boxSides, wireSides, constantSides] = packed ? [packed.boxes, packed.wires, packed.constants] : [];
  return { op: of(ops, boxSides), wire: of(wires, wireSides), constant: of(constants.op.length, constantSides), annotation };
}

/** Returns the number of ops in each group, nested ones included, and their extent in rows and x. */
function groupExtents(m) {
  const { parent, count } = m.group;
  const result = Array.from({ length: count }, () => ({ ops: 0, deep: 0, level: 0, top: Infinity, bottom: -1, left: Infinity, right: -Infinity }));
  for (let op = 0; op < m.count; op++) {
    const group = m.ops.group[op];
    if (group < 0) continue;
    const extent = result[group], half = m.ops.width[op] / 2;
    extent.ops++;
    extent.top = Math.min(extent.top, m.layer[op]);
    extent.bottom = Math.max(extent.bottom, m.layer[op]);
    extent.left = Math.min(extent.left, m.x[op] - half);
    extent.right = Math.max(extent.right, m.x[op] + half);
  }
  for (let group = 0; group < count; group++) if (parent[group] >= 0) result[group].level = result[parent[group]].level + 1;
  for (let group = count - 1; group >= 0; group--) {
    if (parent[group] < 0) continue;
    const extent = result[group], outer = result[parent[group]];
    outer.ops += extent.ops;
    outer.deep = Math.max(outer.deep, extent.deep + 1);
    outer.top = Math.min(outer.top, extent.top);
    outer.bottom = Math.max(outer.bottom, extent.bottom);
    outer.left = Math.min(outer.left, extent.left);
    outer.right = Math.max(outer.right, extent.right);
  }
  return result;
}

/** Returns the x at which each wire ends on its target, in the order of their origins. */
function portPositions(m) {
  const result = new Float32Array(m.wire.count);
  const from = (wire) => {
    const trunk = m.trunks[m.wire.tensor[wire]];
    const passed = m.layer[m.wire.target[wire]] - m.layer[m.wire.source[wire]] - 1;
    return trunk && passed > 0 ? trunk[Math.min(passed, trunk.length) - 1] : m.x[m.wire.source[wire]];
  };
  for (let op = 0; op < m.count; op++) {
    const read = m.incoming.of(op);
    if (read.length > 1) read.sort((a, b) => from(a) - from(b) || a - b);
    const spacing = Math.min(48, (m.ops.width[op] - 16) / read.length);
    read.forEach((wire, i) => { result[wire] = m.x[op] + (i - (read.length - 1) / 2) * spacing; });
  }
  return result;
}
