"use strict";
// The viewer of a model: what graphquant/view/payload.py packed, drawn on a canvas. One plain script, nothing fetched.
//
// Sections: data, scene (what is shown where), drawing, finding what is under the pointer, selection and panel,
// search and filters, view and input, start. Names come out of models: they are set as text, never as HTML.

const BOX = 52; // height of a box
const GAP = 58; // room above a row of boxes, for wires and badges
const OPENED = 64; // more room above a row where a badge is unfolded
const NEAR = 0.5; // from this zoom on, words are drawn
const MIDDLE = 0.16; // from this one, wires as curves and badges as dots
const ROUND = 0.35; // from this one, boxes with an outline and their type
const RESULTS = 100; // results of a search that are listed
const STATES = ["computes on no float", "float", "partly quantized", "quantized"];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const counted = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

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

// -- data ---------------------------------------------------------------------------------------

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
  };
  m.constants = ranges(m.constant.op, count);
  m.short = (op) => {
    const name = m.name(op), cut = name.lastIndexOf("/", name.length - 2) + 1;
    return name.slice(cut);
  };
  m.groupOps = groupOps(m);
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

// -- scene: what is shown where -----------------------------------------------------------------

/** The scene for the groups that are collapsed and the badges that are unfolded. Takes time in proportion to both. */
function scene(m, collapsed, unfolded) {
  const { parent, count } = m.group;
  const hiding = new Int32Array(count).fill(-1);
  for (let group = 0; group < count; group++) {
    const outer = parent[group] < 0 ? -1 : hiding[parent[group]];
    hiding[group] = outer >= 0 ? outer : collapsed.has(group) ? group : -1;
  }
  const s = { hiding, x: m.x, boxes: new Map(), rowBoxes: new Map(), filled: new Uint8Array(m.rows) };
  s.behind = (op) => (m.ops.group[op] < 0 ? -1 : hiding[m.ops.group[op]]);
  if (collapsed.size) {
    for (let group = 0; group < count; group++) if (hiding[group] === group && m.groupOps[group].ops) putBox(m, s, group);
  }
  for (let op = 0; op < m.count; op++) if (s.behind(op) < 0) s.filled[m.layer[op]] = 1;
  for (const [row, boxes] of s.rowBoxes) {
    s.filled[row] = 1;
    s.x = makeRoom(m, s, row, boxes);
  }
  s.top = rowTops(m, s, unfolded);
  s.height = s.top[m.rows];
  s.boxTop = (row) => s.top[row + 1] - BOX;
  const end = (op, side) => {
    const group = s.behind(op), row = group < 0 ? m.layer[op] : s.boxes.get(group).row;
    return { node: group < 0 ? op : -1 - group, x: group < 0 ? s.x[op] : s.boxes.get(group).x, row, side };
  };
  route(m, s, end);
  return s;
}

function putBox(m, s, group) {
  const one = m.groupOps[group];
  const width = Math.min(240, Math.max(110, m.text(m.group.label[group]).length * 7 + 40));
  const box = { group, row: one.top, x: (one.left + one.right) / 2, width };
  s.boxes.set(group, box);
  if (!s.rowBoxes.has(box.row)) s.rowBoxes.set(box.row, []);
  s.rowBoxes.get(box.row).push(box);
}

/** Moves what stands in a row beside boxes of groups to the right, as far as it overlaps. */
function makeRoom(m, s, row, boxes) {
  const x = s.x === m.x ? m.x.slice() : s.x;
  const all = boxes.map((box) => ({ x: box.x, half: box.width / 2, put: (to) => { box.x = to; } }));
  for (const op of m.inRow.of(row)) {
    if (s.behind(op) < 0) all.push({ x: x[op], half: m.ops.width[op] / 2, put: (to) => { x[op] = to; } });
  }
  all.sort((a, b) => a.x - b.x);
  let right = -Infinity;
  for (const one of all) {
    const at = Math.max(one.x, right + 24 + one.half);
    one.put(at);
    right = at + one.half;
  }
  return x;
}

/** Where each row begins: with the room above its boxes; rows without any take none. */
function rowTops(m, s, unfolded) {
  const more = new Uint8Array(m.rows);
  for (const badge of unfolded) {
    for (const one of m.readers[badge]) if (s.behind(one.op) < 0) more[m.layer[one.op]] = 1;
  }
  const top = new Float64Array(m.rows + 1);
  for (let row = 0; row < m.rows; row++) top[row + 1] = top[row] + (s.filled[row] ? BOX + GAP + more[row] * OPENED : 0);
  return top;
}

/** Pieces of wires between neighbouring rows, by the row that they end at, and those that run past rows. */
function route(m, s, end) {
  const { source, target, tensor, slot, lanes, count } = m.wire;
  const row = [], x0 = [], x1 = [], wire = [], last = [];
  s.far = [];
  const seen = new Set(), led = new Map();
  for (let i = 0; i < count; i++) {
    const from = end(source[i]), to = end(target[i]);
    if (from.node === to.node && from.node < 0) continue;
    const layers = m.layer[target[i]] - m.layer[source[i]];
    const trunk = m.trunks[tensor[i]];
    if (from.node < 0 || to.node < 0 || lanes[tensor[i]] !== undefined || layers < 1) {
      const key = from.node < 0 || to.node < 0 ? `${from.node} ${to.node}` : i;
      if (!seen.has(key)) s.far.push({ wire: i, from, to, lane: lanes[tensor[i]] });
      seen.add(key);
      continue;
    }
    const moved = s.x[target[i]] - m.x[target[i]];
    for (let k = led.get(tensor[i]) || 0; k < layers - 1; k++) {
      row.push(m.layer[source[i]] + k + 1);
      x0.push(k ? trunk[k - 1] : from.x);
      x1.push(trunk[k]);
      wire.push(i);
      last.push(0);
    }
    led.set(tensor[i], Math.max(led.get(tensor[i]) || 0, layers - 1));
    row.push(m.layer[target[i]]);
    x0.push(layers > 1 ? trunk[layers - 2] : from.x);
    x1.push(m.portX[i] + moved);
    wire.push(i);
    last.push(slot[i] < 0 ? 2 : 1);
  }
  s.pieces = { x0: Float32Array.from(x0), x1: Float32Array.from(x1), wire: Int32Array.from(wire), last: Uint8Array.from(last) };
  s.intoRow = ranges(row, m.rows);
}

// -- drawing ------------------------------------------------------------------------------------

const FONTS = { type: "600 12px system-ui,sans-serif", name: "10px system-ui,sans-serif", badge: "10px ui-monospace,monospace" };

function palette() {
  const names = ["ink", "soft", "line", "back", "box", "io", "quant", "part", "float", "frame", "accent", "wire", "onbadge", "b4", "b8", "b16", "b32", "f8"];
  return Object.fromEntries(names.map((name) => [name, css(`--${name}`)]));
}

function badgeColour(app, dtype) {
  const bits = /^u?int(\d+)$/.exec(dtype || "");
  if (!bits) return app.colour[dtype && dtype.startsWith("float8") ? "f8" : "b32"];
  return app.colour[+bits[1] <= 4 ? "b4" : +bits[1] <= 8 ? "b8" : +bits[1] <= 16 ? "b16" : "b32"];
}

const brief = (value) => (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4) ? +value.toPrecision(3) : value.toExponential(1)).toString();
const shortType = (dtype) => (dtype || "?").replace("uint", "u").replace("int", "i").replace("float8_", "f8 ");

/** What a badge says on the drawing. */
function badgeText(badge) {
  if (badge.dynamic) return `${shortType(badge.dtype)} dynamic`;
  if (!badge.scale) return shortType(badge.dtype);
  if (badge.count > 1) return `${shortType(badge.dtype)}[${badge.count}]`;
  const scale = brief(Math.fround(badge.scale[0]));
  const zero = badge.zero[0] ? ` z${badge.zero[0]}` : "";
  return `${shortType(badge.dtype)} ${scale}${zero}`;
}

/** The fill of an op: how much of what it computes on is quantized. */
function fillOf(app, op) {
  const { m, colour } = app, inputs = m.ops.inputs[op], kind = m.kind(op);
  if (kind === "input" || kind === "output") return colour.io;
  if (inputs === 3) return colour.quant;
  if (m.ops.multiplies[op]) return colour.float;
  return inputs === 2 ? colour.part : colour.box;
}

/** Sets the font, if it is not set already: asking the canvas for it takes long. */
function font(app, name) {
  if (app.font !== name) app.ctx.font = FONTS[name];
  app.font = name;
}

/** `text` cut so that it is at most `room` wide in the font that is set. */
function fitted(app, ctx, text, room) {
  const key = `${app.font}|${Math.round(room)}|${text}`;
  let found = app.fitted.get(key);
  if (found === undefined) {
    found = text;
    if (ctx.measureText(text).width > room) {
      let low = 0, high = Math.min(text.length, 400);
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (ctx.measureText(text.slice(0, middle) + "…").width <= room) low = middle;
        else high = middle - 1;
      }
      found = text.slice(0, low) + "…";
    }
    if (app.fitted.size > 20000) app.fitted.clear();
    app.fitted.set(key, found);
  }
  return found;
}

/** Draws what is in view. Rows outside of it are not looked at; far away, rows that share a pixel are drawn once. */
function draw(app) {
  const { canvas, ctx, s, m, view } = app;
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.fillStyle = app.colour.back;
  ctx.fillRect(0, 0, width, height);
  ctx.translate(view.x, view.y);
  ctx.scale(view.k, view.k);
  const area = { left: -view.x / view.k, right: (width - view.x) / view.k, top: -view.y / view.k, bottom: (height - view.y) / view.k };
  area.first = rowAt(s.top, area.top, m.rows);
  area.last = Math.min(m.rows - 1, rowAt(s.top, area.bottom, m.rows) + 1);
  app.hits = [];
  app.font = "";
  drawFrames(app, area);
  drawWires(app, area);
  drawBoxes(app, area);
  if (view.k >= MIDDLE) drawBadges(app, area);
  drawMap(app, area);
}

/** The row that `y` is in. */
function rowAt(top, y, rows) {
  let low = 0, high = rows;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (top[middle + 1] <= y) low = middle + 1;
    else high = middle;
  }
  return Math.min(low, Math.max(rows - 1, 0));
}

/** Where the frame of a group is, with room for those in it. */
function frameOf(app, group) {
  const { m, s } = app, one = m.groupOps[group], pad = 6 + 7 * one.deep;
  return { x: one.left - pad, y: s.boxTop(one.top) - 14 - 13 * one.deep, right: one.right + pad, bottom: s.top[one.bottom + 1] + pad };
}

function drawFrames(app, area) {
  const { ctx, m, s, view, colour } = app;
  ctx.strokeStyle = colour.line;
  ctx.lineWidth = 1 / view.k;
  for (let group = 0; group < m.group.count; group++) {
    const one = m.groupOps[group];
    if (!one.ops || s.hiding[group] >= 0 || one.bottom < area.first || one.top > area.last) continue;
    const frame = frameOf(app, group);
    if (frame.right < area.left || frame.x > area.right || (frame.bottom - frame.y) * view.k < 6) continue;
    ctx.fillStyle = colour.frame;
    ctx.fillRect(frame.x, frame.y, frame.right - frame.x, frame.bottom - frame.y);
    ctx.setLineDash(m.group.graph[group] ? [6, 4] : []);
    ctx.strokeRect(frame.x, frame.y, frame.right - frame.x, frame.bottom - frame.y);
    ctx.setLineDash([]);
    if (view.k < NEAR * 0.6) continue;
    font(app, "name");
    ctx.fillStyle = colour.soft;
    const label = fitted(app, ctx, `− ${m.text(m.group.label[group])}`, Math.max(60, frame.right - frame.x - 8));
    const y = Math.min(Math.max(frame.y, area.top + 2 + 13 * one.level), frame.bottom - 12);
    ctx.textAlign = "left";
    ctx.fillText(label, frame.x + 4, y + 11);
    app.hits.push({ x: frame.x, y, right: frame.x + ctx.measureText(label).width + 8, bottom: y + 15, frame: group });
  }
}

/** The middle of a piece is a curve that leaves and arrives upright. */
function curve(ctx, x0, y0, x1, y1) {
  const middle = (y0 + y1) / 2;
  ctx.moveTo(x0, y0);
  if (x0 === x1) ctx.lineTo(x1, y1);
  else ctx.bezierCurveTo(x0, middle, x1, middle, x1, y1);
}

function drawWires(app, area) {
  const { ctx, m, s, view, colour } = app;
  const bright = new Set(app.selected ? wiresOf(app, app.selected) : []);
  const paths = { plain: new Path2D(), dashed: new Path2D(), bright: new Path2D(), dim: new Path2D() };
  const marked = new Map();
  const stride = Math.max(1, Math.floor(4 / (view.k * (BOX + GAP)))); // from afar, some say as much as all
  const { x0, x1, wire, last } = s.pieces;
  for (let row = area.first - (area.first % stride); row <= Math.min(area.last + 1, m.rows - 1); row += stride) {
    const above = s.top[row], below = s.boxTop(row) > above ? s.boxTop(row) : above;
    for (const i of s.intoRow.of(row)) {
      if (Math.max(x0[i], x1[i]) < area.left || Math.min(x0[i], x1[i]) > area.right) continue;
      const badges = last[i] ? m.wire.badges[wire[i]] : undefined;
      let path = last[i] === 2 ? paths.dashed : paths.plain;
      if (app.matched && !app.matched[m.wire.target[wire[i]]]) path = paths.dim;
      else if (badges) {
        const dye = badgeColour(app, m.badges[badges[badges.length - 1]].dtype);
        if (!marked.has(dye)) marked.set(dye, new Path2D());
        path = marked.get(dye);
      }
      if (bright.has(wire[i])) path = paths.bright;
      if (view.k < MIDDLE) {
        path.moveTo(x0[i], above);
        path.lineTo(x1[i], below);
      } else curve(path, x0[i], above, x1[i], below);
      if (!last[i]) path.lineTo(x1[i], s.top[row + 1]);
    }
  }
  drawFar(app, area, paths, bright);
  const wide = Math.max(1.2, 0.7 / view.k);
  const stroke = (path, style, width, dash = []) => {
    ctx.strokeStyle = style;
    ctx.lineWidth = width;
    ctx.setLineDash(dash);
    ctx.stroke(path);
  };
  ctx.globalAlpha = 0.2;
  stroke(paths.dim, colour.wire, wide);
  ctx.globalAlpha = 1;
  stroke(paths.plain, colour.wire, wide);
  stroke(paths.dashed, colour.wire, wide, [5, 4]);
  for (const [dye, path] of marked) stroke(path, dye, wide * 1.5);
  stroke(paths.bright, colour.accent, wide * 2);
  ctx.setLineDash([]);
}

/** Wires that run past rows: to and from collapsed groups, along lanes, and back up. */
function drawFar(app, area, paths, bright) {
  const { m, s } = app;
  for (const one of s.far) {
    const y0 = s.top[one.from.row + 1], y1 = s.boxTop(one.to.row);
    if (Math.max(y0, y1) < area.top || Math.min(y0, y1) > area.bottom) continue;
    let path = m.wire.slot[one.wire] < 0 ? paths.dashed : paths.plain;
    if (app.matched && !app.matched[m.wire.target[one.wire]]) path = paths.dim;
    if (bright.has(one.wire)) path = paths.bright;
    const x1 = one.to.node < 0 ? one.to.x : m.portX[one.wire] + s.x[one.to.node] - m.x[one.to.node];
    if (one.lane !== undefined && y1 > y0) {
      curve(path, one.from.x, y0, one.lane, y0 + GAP);
      path.lineTo(one.lane, y1 - GAP);
      curve(path, one.lane, y1 - GAP, x1, y1);
    } else if (y1 > y0) curve(path, one.from.x, y0, x1, y1);
    else {
      path.moveTo(one.from.x, y0);
      const side = Math.max(one.from.x, x1) + 90;
      path.bezierCurveTo(one.from.x, y0 + 50, side, y0 + 50, side, (y0 + y1) / 2);
      path.bezierCurveTo(side, y1 - 50, x1, y1 - 50, x1, y1);
    }
  }
}

function drawBoxes(app, area) {
  const { m, s, view } = app, seen = [];
  const stride = Math.max(1, Math.floor(0.7 / (view.k * (BOX + GAP))));
  for (let row = area.first - (area.first % stride); row <= area.last; row += stride) {
    if (!s.filled[row]) continue;
    const y = s.boxTop(row), inRow = m.inRow.of(row);
    let pixel = -Infinity;
    for (let i = firstFrom(s.x, inRow, area.left - 130); i < inRow.length && s.x[inRow[i]] < area.right + 130; i++) {
      const op = inRow[i];
      if (s.behind(op) >= 0) continue;
      if (view.k < MIDDLE && s.x[op] * view.k < pixel) continue; // another one is drawn on this pixel
      pixel = s.x[op] * view.k + 1;
      seen.push({ op, y });
    }
  }
  const parts = view.k < ROUND ? [drawSpot] : view.k < NEAR ? [drawBox, drawType] : [drawBox, drawType, drawName, drawChips];
  for (const part of parts) for (const one of seen) part(app, one.op, one.y); // each part has one font
  for (const [row, boxes] of s.rowBoxes) {
    if (row >= area.first && row <= area.last) for (const box of boxes) drawGroup(app, box, s.boxTop(row));
  }
  app.ctx.globalAlpha = 1;
}

/** The first of `items`, which are ordered by x, at or right of `left`; boxes of groups may have moved some a little. */
function firstFrom(x, items, left) {
  let low = 0, high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[items[middle]] < left) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

/** An op from afar. */
function drawSpot(app, op, y) {
  const { ctx, m, s, view, colour } = app, width = m.ops.width[op], fill = app.fills[op];
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.fillStyle = fill === colour.box ? colour.wire : fill;
  ctx.fillRect(s.x[op] - width / 2, y, Math.max(width, 1.5 / view.k), Math.max(BOX, 1 / view.k));
}

function drawBox(app, op, y) {
  const { ctx, m, s, colour } = app, width = m.ops.width[op];
  const chosen = app.selected && app.selected.kind === "op" && app.selected.op === op;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.fillStyle = app.fills[op];
  ctx.strokeStyle = chosen ? colour.accent : colour.line;
  ctx.lineWidth = chosen ? 3 : 1;
  ctx.beginPath();
  ctx.roundRect(s.x[op] - width / 2, y, width, BOX, 6);
  ctx.fill();
  ctx.stroke();
}

function drawType(app, op, y) {
  const { ctx, m, s, colour } = app;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.textAlign = "center";
  ctx.fillStyle = colour.ink;
  font(app, "type");
  ctx.fillText(fitted(app, ctx, m.type(op), m.ops.width[op] - 10), s.x[op], y + 16);
}

/** The last part of an op's name, and the shape it makes where no quantized constants are shown. */
function drawName(app, op, y) {
  const { ctx, m, s, colour } = app, room = m.ops.width[op] - 10;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.fillStyle = colour.soft;
  font(app, "name");
  ctx.fillText(fitted(app, ctx, m.short(op), room), s.x[op], y + 30);
  if (!chipsOf(app, op).length && m.ops.outputs[op].length) {
    ctx.fillText(fitted(app, ctx, m.text(m.ops.outputs[op][2]), room), s.x[op], y + 44);
  }
}

/** The quantized constants of an op, and badges of its own. */
function chipsOf(app, op) {
  const { m } = app, chips = [];
  for (const one of m.constants.of(op)) {
    const marked = m.constant.badges[one];
    if (marked) chips.push({ text: m.text(m.constant.role[one])[0].toUpperCase(), badge: marked[marked.length - 1] });
  }
  for (const badge of m.ops.badges[op] || []) chips.push({ text: "", badge });
  return chips;
}

function drawChips(app, op, y) {
  const { ctx, m, s, colour } = app, width = m.ops.width[op], x = s.x[op] - width / 2, chips = chipsOf(app, op);
  if (!chips.length) return;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.textAlign = "center";
  const room = (width - 8) / chips.length, own = chips.length === 1 && !chips[0].text;
  font(app, "badge");
  chips.forEach((chip, i) => {
    const badge = m.badges[chip.badge], left = x + 4 + room * i;
    const said = own ? badgeText(badge) : `${chip.text} ${shortType(badge.dtype)}`.trim();
    ctx.fillStyle = badgeColour(app, badge.dtype);
    ctx.beginPath();
    ctx.roundRect(left + 1, y + 35, room - 2, 14, 4);
    ctx.fill();
    ctx.fillStyle = colour.onbadge;
    ctx.fillText(fitted(app, ctx, said, room - 4), left + room / 2, y + 45.5);
    app.hits.push({ x: left, y: y + 34, right: left + room, bottom: y + 50, badge: chip.badge });
  });
}

function drawGroup(app, box, y) {
  const { ctx, m, view, colour } = app, x = box.x - box.width / 2;
  ctx.globalAlpha = 1;
  ctx.fillStyle = colour.frame;
  const chosen = app.selected && app.selected.kind === "group" && app.selected.group === box.group;
  ctx.strokeStyle = chosen ? colour.accent : colour.soft;
  ctx.lineWidth = chosen ? 3 : 1.5;
  for (const shift of [4, 0]) {
    ctx.beginPath();
    ctx.roundRect(x + shift, y - shift, box.width, BOX, 6);
    ctx.fill();
    ctx.stroke();
  }
  if (view.k < NEAR * 0.7) return;
  ctx.textAlign = "center";
  ctx.fillStyle = colour.ink;
  font(app, "type");
  ctx.fillText(fitted(app, ctx, `+ ${m.text(m.group.label[box.group])}`, box.width - 10), box.x, y + 22);
  ctx.fillStyle = colour.soft;
  font(app, "name");
  ctx.fillText(counted(m.groupOps[box.group].ops, "op"), box.x, y + 38);
}

/** Badges on the last pieces of wires: words, dots from afar, or the ops they stand for where they are unfolded. */
function drawBadges(app, area) {
  const { m, s } = app, { x0, x1, wire, last } = s.pieces;
  for (let row = area.first; row <= Math.min(area.last + 1, m.rows - 1); row++) {
    const above = s.top[row], below = s.boxTop(row), lanes = new Map();
    for (const i of s.intoRow.of(row)) {
      const marked = last[i] ? m.wire.badges[wire[i]] : undefined;
      if (!marked || Math.max(x0[i], x1[i]) < area.left - 60 || Math.min(x0[i], x1[i]) > area.right + 60) continue;
      const target = m.wire.target[wire[i]];
      for (const badge of marked) {
        const lane = lanes.get(target) || 0;
        lanes.set(target, lane + 1);
        drawBadge(app, badge, target, { x0: x0[i], x1: x1[i], above, below }, [0.7, 0.36, 0.88][lane % 3]);
      }
    }
    for (const op of app.unfolded.size ? m.inRow.of(row) : []) if (s.behind(op) < 0) drawConstants(app, op, below);
  }
  app.ctx.globalAlpha = 1;
}

function drawBadge(app, number, target, piece, t) {
  const { ctx, m, view, colour } = app, badge = m.badges[number];
  const x = piece.x0 + (piece.x1 - piece.x0) * t * t * (3 - 2 * t);
  const y = piece.above + (piece.below - piece.above) * (1.5 * t * (1 - t) + t * t * t);
  ctx.globalAlpha = app.matched && !app.matched[target] ? 0.2 : 1;
  if (app.unfolded.has(number)) return drawPair(app, number, x, (piece.above + piece.below) / 2);
  const chosen = app.selected && app.selected.badge === number;
  ctx.fillStyle = badgeColour(app, badge.dtype);
  if (view.k < NEAR) {
    ctx.beginPath();
    ctx.arc(x, y, 7, 0, 2 * Math.PI);
    ctx.fill();
    app.hits.push({ x: x - 7, y: y - 7, right: x + 7, bottom: y + 7, badge: number });
    return;
  }
  font(app, "badge");
  const text = fitted(app, ctx, badgeText(badge), 120), half = ctx.measureText(text).width / 2 + 5;
  ctx.beginPath();
  ctx.roundRect(x - half, y - 8, 2 * half, 16, 8);
  ctx.fill();
  if (chosen) {
    ctx.strokeStyle = colour.accent;
    ctx.lineWidth = 3;
    ctx.stroke();
  }
  ctx.textAlign = "center";
  ctx.fillStyle = colour.onbadge;
  ctx.fillText(text, x, y + 3.5);
  app.hits.push({ x: x - half, y: y - 8, right: x + half, bottom: y + 8, badge: number });
}

/** The ops that an unfolded badge stands for, one below the other; a plan's will get names when they are inserted. */
function drawPair(app, number, x, y) {
  const { ctx, m, colour } = app, badge = m.badges[number];
  const ops = (badge.ops || (m.planned ? [["quantize", ""], ["dequantize", ""]] : [[badge.dtype, badge.name || ""]])).slice(-4), tall = 26;
  ctx.textAlign = "center";
  ops.forEach(([type, name], i) => {
    const top = y + (i - ops.length / 2) * (tall + 4);
    ctx.fillStyle = colour.back;
    ctx.strokeStyle = badgeColour(app, badge.dtype);
    ctx.lineWidth = 1.5;
    ctx.beginPath();
    ctx.roundRect(x - 62, top, 124, tall, 5);
    ctx.fill();
    ctx.stroke();
    ctx.fillStyle = colour.ink;
    font(app, "name");
    ctx.fillText(fitted(app, ctx, type, 118), x, top + 11);
    ctx.fillStyle = colour.soft;
    ctx.fillText(fitted(app, ctx, name.split("/").pop() || badgeText(badge), 118), x, top + 22);
    app.hits.push({ x: x - 62, y: top, right: x + 62, bottom: top + tall, badge: number });
  });
}

/** The constants of an op whose badges are unfolded, above its left end. */
function drawConstants(app, op, below) {
  const { ctx, m, s, colour } = app, open = [];
  for (const one of m.constants.of(op)) {
    const marked = m.constant.badges[one];
    if (marked && marked.some((badge) => app.unfolded.has(badge))) open.push({ one, badge: marked[marked.length - 1] });
  }
  const x = Math.min(s.x[op] - m.ops.width[op] / 2, s.x[op] - 76); // left of the ops of an unfolded badge
  ctx.textAlign = "left";
  font(app, "name");
  open.slice(0, 4).forEach(({ one, badge }, i) => {
    const y = below - 26 - i * 22;
    ctx.fillStyle = colour.back;
    ctx.strokeStyle = badgeColour(app, m.badges[badge].dtype);
    ctx.lineWidth = 1.5;
    ctx.beginPath();
    ctx.moveTo(x, y + 9);
    ctx.lineTo(x + 6, y + 9);
    ctx.lineTo(s.x[op] - m.ops.width[op] / 2 + 8, below);
    ctx.stroke();
    ctx.beginPath();
    ctx.roundRect(x - 130, y, 130, 18, 4);
    ctx.fill();
    ctx.stroke();
    ctx.fillStyle = colour.ink;
    const said = `${m.text(m.constant.role[one])} ${shortType(m.badges[badge].dtype)} ${m.text(m.constant.shape[one])}`;
    ctx.fillText(fitted(app, ctx, said, 122), x - 126, y + 12);
    app.hits.push({ x: x - 130, y, right: x, bottom: y + 18, badge });
  });
}

// -- the small map ------------------------------------------------------------------------------

/** Draws all ops once, each at least a pixel; `drawMap` lays the frame of the view over it. */
function makeMap(app) {
  const { m, s, map, colour } = app, ratio = window.devicePixelRatio || 1;
  const width = map.clientWidth, height = map.clientHeight;
  app.mapped = null;
  if (!width || !height) return; // hidden on paper and on small screens
  map.width = Math.round(width * ratio);
  map.height = Math.round(height * ratio);
  const made = new OffscreenCanvas(map.width, map.height), ctx = made.getContext("2d");
  const kx = (map.width - 8) / Math.max(m.width, 1), ky = (map.height - 8) / Math.max(s.height, 1);
  const wide = Math.min(kx, ky * 6), tall = Math.min(ky, kx * 6);
  app.mapped = { made, kx: wide / ratio, ky: tall / ratio, x: (width - (m.width * wide) / ratio) / 2, y: (height - (s.height * tall) / ratio) / 2 };
  const left = app.mapped.x * ratio, top = app.mapped.y * ratio;
  let before = -1, row = -1;
  for (let op = 0; op < m.count; op++) {
    if (s.behind(op) >= 0) continue;
    const x = Math.round(left + (s.x[op] - m.ops.width[op] / 2) * wide), y = Math.round(top + s.boxTop(m.layer[op]) * tall);
    if (x === before && y === row) continue;
    before = x;
    row = y;
    const fill = app.fills[op];
    ctx.fillStyle = app.matched ? (app.matched[op] ? colour.accent : colour.line) : fill === colour.box ? colour.wire : fill;
    ctx.fillRect(x, y, Math.max(1, m.ops.width[op] * wide), Math.max(1, BOX * tall));
  }
  for (const box of s.boxes.values()) {
    ctx.fillStyle = colour.soft;
    ctx.fillRect(left + (box.x - box.width / 2) * wide, top + s.boxTop(box.row) * tall, Math.max(2, box.width * wide), Math.max(2, BOX * tall));
  }
}

function drawMap(app, area) {
  if (!app.mapped) return;
  const { map, mapped, colour } = app, ctx = map.getContext("2d"), ratio = window.devicePixelRatio || 1;
  ctx.setTransform(1, 0, 0, 1, 0, 0);
  ctx.clearRect(0, 0, map.width, map.height);
  ctx.drawImage(mapped.made, 0, 0);
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.strokeStyle = colour.accent;
  ctx.lineWidth = 1.5;
  const clamp = (value, most) => Math.min(Math.max(value, 1), most - 1);
  const x0 = clamp(mapped.x + area.left * mapped.kx, map.clientWidth), x1 = clamp(mapped.x + area.right * mapped.kx, map.clientWidth);
  const y0 = clamp(mapped.y + area.top * mapped.ky, map.clientHeight), y1 = clamp(mapped.y + area.bottom * mapped.ky, map.clientHeight);
  ctx.strokeRect(x0, y0, Math.max(3, x1 - x0), Math.max(3, y1 - y0));
}

// -- finding what is under the pointer ----------------------------------------------------------

/** What is at a point of the drawing: a badge, a frame's name, a box, or a wire. */
function under(app, x, y) {
  const { m, s, view } = app;
  for (let i = app.hits.length - 1; i >= 0; i--) {
    const one = app.hits[i];
    if (x >= one.x && x <= one.right && y >= one.y && y <= one.bottom) {
      return one.badge !== undefined ? { kind: "badge", badge: one.badge } : { kind: "group", group: one.frame };
    }
  }
  const row = rowAt(s.top, y, m.rows);
  if (m.rows && s.filled[row] && y >= s.boxTop(row)) {
    for (const box of s.rowBoxes.get(row) || []) {
      if (Math.abs(x - box.x) <= box.width / 2) return { kind: "group", group: box.group };
    }
    const inRow = m.inRow.of(row);
    for (let i = firstFrom(s.x, inRow, x - 130); i < inRow.length && s.x[inRow[i]] <= x + 130; i++) {
      const op = inRow[i];
      if (s.behind(op) < 0 && Math.abs(x - s.x[op]) <= m.ops.width[op] / 2) return { kind: "op", op };
    }
  }
  return wireAt(app, row, x, y, 6 / view.k);
}

function wireAt(app, row, x, y, reach) {
  const { m, s } = app, { x0, x1, wire, last } = s.pieces;
  const above = s.top[row], below = s.boxTop(row);
  let best = reach, found = null;
  for (const i of m.rows ? s.intoRow.of(row) : []) {
    if (y > below) {
      if (!last[i] && Math.abs(x - x1[i]) < best) [best, found] = [Math.abs(x - x1[i]), wire[i]];
      continue;
    }
    for (let t = 0; t <= 1; t += 0.05) {
      const dx = x0[i] + (x1[i] - x0[i]) * t * t * (3 - 2 * t) - x;
      const far = Math.hypot(dx, above + (below - above) * (1.5 * t * (1 - t) + t * t * t) - y);
      if (far < best) [best, found] = [far, wire[i]];
    }
  }
  return found === null ? null : { kind: "wire", wire: found };
}

// -- selection and panel ------------------------------------------------------------------------

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
  const rules = new Map(), by = [0, 0, 0, 0];
  for (const badge of m.badges) if (badge.rule) rules.set(badge.rule, (rules.get(badge.rule) || 0) + 1);
  for (const inputs of m.ops.inputs) by[inputs]++;
  const swatch = (name, said) => {
    const made = el("span", { className: "swatch" });
    made.style.background = app.colour[name];
    return el("div", {}, made, said);
  };
  return [
    el("h2", {}, m.title),
    el("p", {}, `${m.format}, ${counted(m.count, "op")}, ${counted(m.badges.length, m.planned ? "site" : "quantized tensor")}.`),
    m.planned ? el("p", {}, "This is a plan: badges are what insert would put there.") : "",
    ...m.notes.map((note) => el("p", { className: "warn" }, note)),
    el("h3", {}, "Colours"),
    swatch("quant", `computes on quantized tensors (${by[3].toLocaleString("en")})`),
    swatch("part", `on some (${by[2].toLocaleString("en")})`),
    swatch("float", "multiplies in float"),
    swatch("box", "all else"),
    swatch("b8", "8 bits"), swatch("b16", "16 bits"), swatch("b4", "4 bits or fewer"), swatch("f8", "float8"), swatch("b32", "32 bits, bias"),
    rules.size ? el("h3", {}, "Rules") : "",
    table(...[...rules].map(([rule, number]) => rowOf(rule, counted(number, "tensor")))),
    el("h3", {}, "Keys"),
    table(
      rowOf("/", "search"), rowOf("n  p", "next, previous result"), rowOf("arrows", "to what an op reads, to who reads it, along its row"),
      rowOf("+  −  0  1", "nearer, farther, all, full size"), rowOf("u", "unfold or fold the selected badge, or all"),
      rowOf("c  e", "collapse the group around, expand all"), rowOf("Esc", "clear"), rowOf("wheel", "moves; with Ctrl it zooms"),
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
    m.ops.reason[op] ? el("p", { className: "warn" }, `Float: ${m.text(m.ops.reason[op])}.`) : "",
    rule ? el("p", {}, `Made by ${rule}.`) : "",
    groupPath(app, op),
    (m.ops.badges[op] || []).length ? el("p", {}, ...m.ops.badges[op].map((badge) => pill(app, badge))) : "",
    el("h3", {}, "Inputs"),
    table(...inputRows(app, op)),
    el("h3", {}, "Outputs"),
    table(...outputRows(app, op)),
    (m.ops.calls[op] || []).length ? el("p", {}, "Runs ", ...m.ops.calls[op].map((group) => groupLink(app, group))) : "",
    attrs.length ? el("h3", {}, "Attributes") : "",
    table(...attrs.map(([name, ...value]) => rowOf(name, value.join(" = ")))),
  ];
}

function inputRows(app, op) {
  const { m } = app, found = [];
  for (const wire of m.incoming.of(op)) {
    const pills = (m.wire.badges[wire] || []).map((badge) => pill(app, badge));
    const reason = m.text(m.wire.reason[wire]);
    const into = m.wire.slot[wire] < 0;
    const outputs = m.ops.outputs[m.wire.source[wire]], at = 3 * m.wire.port[wire];
    const kind = at + 2 < outputs.length ? `${m.text(outputs[at + 1])} ${m.text(outputs[at + 2])}` : "";
    found.push([m.wire.slot[wire], rowOf(into ? "↳" : `${m.wire.slot[wire]}`, goto(app, m.wire.source[wire]), ` ${kind} `, ...pills, reason ? el("div", { className: "warn" }, reason) : "")]);
  }
  for (const one of m.constants.of(op)) {
    const pills = (m.constant.badges[one] || []).map((badge) => pill(app, badge));
    const said = `${m.text(m.constant.role[one])}: ${m.text(m.constant.name[one])} ${m.text(m.constant.dtype[one])} ${m.text(m.constant.shape[one])} `;
    const reason = m.text(m.constant.reason[one]);
    found.push([m.constant.slot[one], rowOf(`${m.constant.slot[one]}`, said, ...pills, reason ? el("div", { className: "warn" }, reason) : "")]);
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
    table(...top.slice(0, 12).map(([type, number]) => rowOf(type, `${number}`))),
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
    ...seenBy(badge),
    el("h3", {}, "Read by"),
    el("p", {}, ...m.readers[number].slice(0, 30).flatMap((one) => [goto(app, one.op), " "])),
    badge.ops ? el("h3", {}, "Stands for") : "",
    table(...(badge.ops || []).map(([type, name]) => rowOf(type, name))),
    el("p", {}, el("button", { onclick: () => unfold(app, number) }, open ? "Fold" : "Unfold")),
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

// -- search and filters -------------------------------------------------------------------------

/** What is searched, made when it is first needed: names and types of ops, and of what badges stand for. */
function searched(app) {
  const { m } = app;
  app.words ||= {
    ops: Array.from({ length: m.count }, (_, op) => `${m.full(op)} ${m.type(op)}`.toLowerCase()),
    badges: m.badges.map((one) => [one.tensor, one.name, one.rule, one.dtype, ...(one.ops || []).flat()].join(" ").toLowerCase()),
  };
  return app.words;
}

/** Ops and badges that pass the filters and have the text; what is called exactly that comes first. */
function search(app) {
  const { m } = app, { text, state, rule, kind, sqnr } = app.asked, words = searched(app), low = text.trim().toLowerCase();
  const badge = (one) => (!rule || m.badges[one].rule === rule) && (sqnr === null || (m.badges[one].sqnr !== undefined && m.badges[one].sqnr < sqnr));
  const passes = (op) =>
    (!state || (state === "reason" ? m.ops.reason[op] > 0 : state === "unquantized" ? m.ops.inputs[op] === 1 || m.ops.inputs[op] === 2 : m.ops.inputs[op] === 3)) &&
    (!kind || m.kind(op) === kind) && ((!rule && sqnr === null) || m.badgesOf(op).some(badge));
  const found = [], matched = new Uint8Array(m.count);
  const rank = (name) => (name === low ? 0 : name.startsWith(low) || name.startsWith(`${low}:`) ? 1 : 2);
  words.badges.forEach((said, one) => {
    if ((low && !said.includes(low)) || !badge(one)) return;
    const ops = m.readers[one].map((reader) => reader.op).filter(passes);
    if (!ops.length) return;
    for (const op of ops) matched[op] = 1;
    found.push({ what: { kind: "badge", badge: one }, rank: rank((m.badges[one].name || m.badges[one].tensor).toLowerCase()) });
  });
  if (sqnr !== null) found.sort((a, b) => m.badges[a.what.badge].sqnr - m.badges[b.what.badge].sqnr);
  for (let op = 0; op < m.count; op++) {
    if ((low && !words.ops[op].includes(low)) || !passes(op)) continue;
    matched[op] = 1;
    found.push({ what: { kind: "op", op }, rank: rank(m.full(op).toLowerCase()) });
  }
  if (sqnr === null) found.sort((a, b) => a.rank - b.rank);
  app.found = found.map((one) => one.what);
  const any = low || state || rule || kind || sqnr !== null;
  app.matched = any ? matched : null;
  app.at = -1;
  listResults(app, Boolean(any));
  app.mapLater();
  app.redraw();
}

function listResults(app, any) {
  const { m, results, found } = app;
  results.hidden = !any;
  const line = (what, i) => {
    const badge = what.kind === "badge" ? m.badges[what.badge] : null;
    const scale = badge && badge.scale && !badge.count ? ` ${Math.fround(badge.scale[0])}` : "";
    const sqnr = badge && badge.sqnr !== undefined ? `, ${badge.sqnr.toFixed(1)} dB` : "";
    const said = badge ? `${badge.dtype || "?"}${scale || (badge.scale ? `[${badge.count}]` : "")}${sqnr}` : m.type(what.op);
    return el("li", {}, el("button", { onclick: () => pick(app, i) }, el("span", {}, badge ? badge.name || badge.tensor : m.full(what.op)), el("small", {}, said)));
  };
  const more = found.length > RESULTS ? [el("li", { className: "more" }, `and ${(found.length - RESULTS).toLocaleString("en")} more`)] : [];
  results.replaceChildren(el("li", { className: "more" }, counted(found.length, "result")), ...found.slice(0, RESULTS).map(line), ...more);
}

/** Goes to result `i`. */
function pick(app, i) {
  if (!app.found.length) return;
  app.at = (i + app.found.length) % app.found.length;
  const buttons = app.results.querySelectorAll("button");
  buttons.forEach((button, j) => button.classList.toggle("here", j === app.at));
  if (buttons[app.at]) buttons[app.at].scrollIntoView({ block: "nearest" });
  select(app, app.found[app.at], { move: true });
}

// -- view and input -----------------------------------------------------------------------------

/** Makes the scene anew after something was folded. */
function rebuild(app) {
  app.s = scene(app.m, app.collapsed, app.unfolded);
  app.mapLater();
  app.redraw();
}

function lookAt(app, op) {
  const { s, m, view, canvas } = app;
  view.k = Math.max(view.k, 0.8);
  const covered = app.results.hidden ? 0 : app.results.offsetWidth;
  view.x = (canvas.clientWidth + covered) / 2 - s.x[op] * view.k;
  view.y = canvas.clientHeight / 2 - (s.boxTop(m.layer[op]) + BOX / 2) * view.k;
}

function collapse(app, group, shut) {
  if (shut) app.collapsed.add(group);
  else app.collapsed.delete(group);
  const before = app.s.boxTop(app.m.groupOps[group].top);
  rebuild(app);
  app.view.y += (before - app.s.boxTop(app.m.groupOps[group].top)) * app.view.k;
  select(app, { kind: "group", group }, { link: false });
}

/** Unfolds or folds one badge, or all of them. */
function unfold(app, badge = -1) {
  if (badge >= 0) app.unfolded[app.unfolded.has(badge) ? "delete" : "add"](badge);
  else if (app.unfolded.size) app.unfolded.clear();
  else app.m.badges.forEach((_, one) => app.unfolded.add(one));
  const op = app.selected ? opOf(app, app.selected) : -1, before = op < 0 ? 0 : app.s.boxTop(app.m.layer[op]);
  rebuild(app);
  if (op >= 0) app.view.y += (before - app.s.boxTop(app.m.layer[op])) * app.view.k;
  if (app.selected) select(app, app.selected, { link: false });
}

function zoom(app, factor, x = app.canvas.clientWidth / 2, y = app.canvas.clientHeight / 2) {
  const { view } = app, k = Math.min(4, Math.max(0.002, view.k * factor));
  view.x = x - ((x - view.x) * k) / view.k;
  view.y = y - ((y - view.y) * k) / view.k;
  view.k = k;
  app.redraw();
}

/** All of the model, or its beginning at a zoom at which it can be read. */
function fit(app, whole) {
  const { m, s, view, canvas } = app, width = canvas.clientWidth, height = canvas.clientHeight;
  const k = Math.min(1, (width - 40) / Math.max(m.width, 1), (height - 40) / Math.max(s.height, 1));
  view.k = whole || k > 0.4 ? Math.max(k, 0.002) : 0.75;
  const top = m.rows && view.k > k ? Array.from(m.inRow.of(0)) : [], read = top.filter((op) => m.outgoing.of(op).length);
  const first = read.length ? read : top;  // inputs that nobody reads say little
  const middle = first.length ? (s.x[first[0]] + s.x[first[first.length - 1]]) / 2 : m.width / 2;
  view.x = width / 2 - middle * view.k;
  view.y = view.k > k ? 10 : Math.max(10, (height - s.height * view.k) / 2);
  app.redraw();
}

/** The op beside the selected one: what it reads, who reads it, or its neighbour in the row. */
function step(app, key) {
  const { m } = app, op = app.selected ? opOf(app, app.selected) : -1;
  const { view } = app;
  if (op < 0) {
    view.x += { ArrowLeft: 80, ArrowRight: -80 }[key] || 0;
    view.y += { ArrowUp: 80, ArrowDown: -80 }[key] || 0;
    return app.redraw();
  }
  const row = Array.from(m.inRow.of(m.layer[op])), at = row.indexOf(op);
  const next = {
    ArrowUp: () => Array.from(m.incoming.of(op), (wire) => m.wire.source[wire])[0],
    ArrowDown: () => Array.from(m.outgoing.of(op), (wire) => m.wire.target[wire])[0],
    ArrowLeft: () => row[at - 1],
    ArrowRight: () => row[at + 1],
  }[key]();
  if (next !== undefined) select(app, { kind: "op", op: next }, { move: true });
}

function onKey(app, event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape") {
    for (const one of app.bar.querySelectorAll("input,select")) one.value = "";
    app.asked = { text: "", state: "", rule: "", kind: "", sqnr: null };
    search(app);
    select(app, null);
    app.canvas.focus();
    return;
  }
  if (typing) {
    const move = { Enter: event.shiftKey ? -1 : 1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.target === app.query && move) {
      event.preventDefault();
      pick(app, app.at + move);
    }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {
    "/": () => app.query.focus(),
    n: () => pick(app, app.at + 1),
    p: () => pick(app, app.at - 1),
    "+": () => zoom(app, 1.3),
    "=": () => zoom(app, 1.3),
    "-": () => zoom(app, 1 / 1.3),
    0: () => fit(app, true),
    1: () => zoom(app, 1 / app.view.k),
    u: () => unfold(app, app.selected && app.selected.kind === "badge" ? app.selected.badge : -1),
    c: () => {
      const group = app.selected && app.selected.kind === "group" ? app.selected.group : app.selected ? app.m.ops.group[opOf(app, app.selected)] : -1;
      if (group >= 0) collapse(app, group, !app.collapsed.has(group));
    },
    e: () => { app.collapsed.clear(); rebuild(app); },
    "?": () => select(app, null),
  };
  const act = event.key.startsWith("Arrow") ? () => step(app, event.key) : keys[event.key];
  if (!act || (event.key.startsWith("Arrow") && event.target !== document.body && event.target !== app.canvas)) return;
  event.preventDefault();
  act();
}

/** Dragging moves, two fingers zoom, a click selects, two clicks on a group open or shut it. */
function onPointer(app) {
  const { canvas, view } = app, down = new Map();
  let moved = 0;
  const at = (event) => ({ x: event.offsetX, y: event.offsetY });
  const here = (event) => under(app, (event.offsetX - view.x) / view.k, (event.offsetY - view.y) / view.k);
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, at(event));
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId), now = at(event);
    if (!before) {
      const what = here(event);
      canvas.style.cursor = what ? "pointer" : "grab";
      return;
    }
    const other = [...down].find(([id]) => id !== event.pointerId);
    if (other) {
      const far = (one) => Math.hypot(one.x - other[1].x, one.y - other[1].y) || 1;
      zoom(app, far(now) / far(before), other[1].x, other[1].y);
    } else {
      view.x += now.x - before.x;
      view.y += now.y - before.y;
    }
    moved += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
    down.set(event.pointerId, now);
    app.redraw();
  });
  const up = (event) => {
    const known = down.delete(event.pointerId);
    if (known && event.type === "pointerup" && moved < 5) select(app, here(event));
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("dblclick", (event) => {
    const what = here(event);
    if (what && what.kind === "group") collapse(app, what.group, !app.collapsed.has(what.group));
    if (what && what.kind === "badge") unfold(app, what.badge);
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const unit = event.deltaMode ? 20 : 1;
    if (event.ctrlKey || event.metaKey) return zoom(app, Math.exp(-event.deltaY * unit * 0.004), event.offsetX, event.offsetY);
    view.x -= (event.shiftKey ? event.deltaY : event.deltaX) * unit;
    view.y -= (event.shiftKey ? 0 : event.deltaY) * unit;
    app.redraw();
  }, { passive: false });
  const jump = (event) => {
    if (!event.buttons || !app.mapped) return;
    view.x = canvas.clientWidth / 2 - ((event.offsetX - app.mapped.x) / app.mapped.kx) * view.k;
    view.y = canvas.clientHeight / 2 - ((event.offsetY - app.mapped.y) / app.mapped.ky) * view.k;
    app.redraw();
  };
  app.map.addEventListener("pointerdown", jump);
  app.map.addEventListener("pointermove", jump);
}

/** Follows a link: `#op=NAME` is an op, or a tensor by its name. */
function follow(app) {
  const found = /^#op=(.*)$/s.exec(location.hash);
  if (!found || location.hash === app.linked) return;
  let name = found[1];
  try {
    name = decodeURIComponent(name);
  } catch {
    // a % that is no escape is part of the name
  }
  const { m } = app;
  app.linked = location.hash;
  for (let op = 0; op < m.count; op++) if (m.full(op) === name) return select(app, { kind: "op", op }, { move: true, link: false });
  const badge = m.badges.findIndex((one) => one.tensor === name || one.name === name || (one.ops || []).some(([, made]) => made === name));
  if (badge >= 0) return select(app, { kind: "badge", badge }, { move: true, link: false });
  app.panel.replaceChildren(el("h2", {}, "Not found"), el("p", { className: "warn" }, `Nothing here is called ${name}.`));
}

// -- start --------------------------------------------------------------------------------------

function choice(app, key, title, entries) {
  const set = (event) => {
    app.asked[key] = event.target.value;
    search(app);
  };
  return el("select", { title, "aria-label": title, id: `by-${key}`, onchange: set }, el("option", { value: "" }, title), ...entries.map(([value, said]) => el("option", { value }, said)));
}

/** The bar at the top: name, search, filters, buttons. */
function bar(app) {
  const { m } = app, tally = (names) => {
    const found = new Map();
    for (const name of names) if (name) found.set(name, (found.get(name) || 0) + 1);
    return [...found].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([name, number]) => [name, `${name} (${number})`]);
  };
  const ask = (key, value) => {
    app.asked[key] = value;
    search(app);
  };
  app.query = el("input", { type: "search", placeholder: "Search ops and tensors ( / )", "aria-label": "Search ops and tensors", id: "query", oninput: (event) => ask("text", event.target.value) });
  const button = (said, title, act) => el("button", { title, "aria-label": title, onclick: act }, said);
  const judged = m.badges.some((badge) => badge.sqnr !== undefined);
  return el("header", {},
    el("strong", {}, m.title),
    app.query,
    choice(app, "state", "all ops", [["unquantized", "unquantized"], ["reason", "float, with a reason"], ["quantized", "quantized"]]),
    choice(app, "rule", "any rule", tally(m.badges.map((badge) => badge.rule))),
    choice(app, "kind", "any kind", tally(m.ops.kind.map((kind) => m.text(kind)))),
    judged ? el("input", { type: "number", step: "1", placeholder: "SQNR below dB", "aria-label": "SQNR below, in dB", id: "by-sqnr", oninput: (event) => ask("sqnr", event.target.value === "" ? null : +event.target.value) }) : "",
    button("fold", "Unfold or fold all badges (u)", () => unfold(app)),
    button("collapse", "Collapse all groups", () => {
      m.group.parent.forEach((parent, group) => parent < 0 && app.collapsed.add(group));
      rebuild(app);
    }),
    button("expand", "Expand all groups (e)", () => { app.collapsed.clear(); rebuild(app); }),
    button("−", "Farther (−)", () => zoom(app, 1 / 1.3)),
    button("+", "Nearer (+)", () => zoom(app, 1.3)),
    button("all", "Show all (0)", () => fit(app, true)),
    button("◐", "Light or dark", () => theme(app, dark() ? "light" : "dark")),
    button("?", "About this model, and keys (?)", () => select(app, null)),
  );
}

/** The colours of the scheme that is on, and the fill of each op. */
function coloured(app) {
  app.colour = palette();
  app.fills = Array.from({ length: app.m.count }, (_, op) => fillOf(app, op));
}

const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function theme(app, name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  coloured(app);
  app.panel.replaceChildren(...told(app, app.selected));
  app.mapLater();
  app.redraw();
}

/** On paper everything is light, and the drawing is what was in view. */
function onPrint(app) {
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    theme(app, "light");
    draw(app);
  });
  addEventListener("afterprint", () => theme(app, before));
}

async function start() {
  const m = model(await unpacked());
  const canvas = el("canvas", { id: "graph", tabIndex: 0, role: "application", "aria-label": "The model's graph; keys are listed under ?" });
  const map = el("canvas", { id: "map", "aria-hidden": "true" });
  const app = {
    m, canvas, map, ctx: canvas.getContext("2d", { alpha: false }), fitted: new Map(),
    view: { x: 0, y: 0, k: 1 }, collapsed: new Set(), unfolded: new Set(), selected: null, hits: [], mapped: null,
    found: [], at: -1, matched: null, asked: { text: "", state: "", rule: "", kind: "", sqnr: null }, linked: "",
  };
  let waiting = false, mapping = false;
  app.redraw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw(app);
    });
  };
  app.mapLater = () => {
    if (mapping) return;
    mapping = true;
    setTimeout(() => {
      mapping = false;
      makeMap(app);
      app.redraw();
    });
  };
  app.panel = el("aside", { id: "panel", "aria-live": "polite" });
  app.results = el("ol", { id: "results", hidden: true });
  coloured(app);
  app.bar = bar(app);
  document.body.append(app.bar, el("main", {}, canvas, app.results, map, app.panel));
  app.s = scene(m, app.collapsed, app.unfolded);
  app.panel.replaceChildren(...aboutModel(app));
  fit(app, false);
  follow(app);
  draw(app);
  onPointer(app);
  onPrint(app);
  addEventListener("keydown", (event) => onKey(app, event));
  addEventListener("hashchange", () => follow(app));
  new ResizeObserver(() => { app.mapLater(); app.redraw(); }).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(app, document.documentElement.dataset.theme));
  requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("drawn")));
  app.mapLater();
  window.viewer = app; // for the console, and for tests
}

start().catch((error) => {
  document.body.append(el("p", { className: "warn" }, `This page cannot be drawn: ${error}. It needs a browser of 2023 or later.`));
  throw error;
});
