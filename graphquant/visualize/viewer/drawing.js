// Drawing.

const FONTS = { type: "600 12px system-ui,sans-serif", name: "10px system-ui,sans-serif", badge: "10px ui-monospace,monospace" };

function palette() {
  const names = ["ink", "soft", "line", "back", "box", "io", "quant", "part", "float", "frame", "accent", "wire", "onbadge", "b4", "b8", "b16", "b32", "f8", "added", "removed", "changed", "addedbox", "removedbox", "changedbox", "h0", "h1", "h2", "h3", "h4", "l0", "l1", "l2", "l3", "l4"];
  return Object.fromEntries(names.map((name) => [name, css(`--${name}`)]));
}

function badgeColour(app, dtype) {
  const bits = /^u?int(\d+)$/.exec(dtype || "");
  if (!bits) return app.colour[dtype && dtype.startsWith("float8") ? "f8" : "b32"];
  return app.colour[+bits[1] <= 4 ? "b4" : +bits[1] <= 8 ? "b8" : +bits[1] <= 16 ? "b16" : "b32"];
}

const brief = (value) => (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4) ? +value.toPrecision(3) : value.toExponential(1)).toString();
const shortType = (dtype) => (dtype || "?").replace("uint", "u").replace("int", "i").replace("float8_", "f8 ");

/** A scale in words, with the old one before it where the other side has another. */
function scaleText(app, number) {
  const badge = app.m.badges[number], before = app.m.badges[app.m.twins[number]];
  const one = (which) => (which.scale && !which.count ? brief(Math.fround(which.scale[0])) : "");
  return before && one(before) && one(badge) && one(before) !== one(badge) ? `${one(before)} → ${one(badge)}` : "";
}

/** What a badge says: its figure where heat is shown, type, scale and zero point else. */
function badgeSays(app, number) {
  const badge = app.m.badges[number], figure = heated(app) ? figureOf(app, number) : undefined;
  if (figure !== undefined) return `${shortType(badge.dtype)} ${figureText(app, figure)}`;
  const scales = app.by === "changes" ? scaleText(app, number) : "";
  return scales ? `${shortType(badge.dtype)} ${scales}` : badgeText(badge);
}

/** What a badge says on the drawing. */
function badgeText(badge) {
  if (badge.dynamic) return `${shortType(badge.dtype)} dynamic`;
  if (!badge.scale) return shortType(badge.dtype);
  if (badge.count > 1) return `${shortType(badge.dtype)}[${badge.count}]`;
  const scale = brief(Math.fround(badge.scale[0]));
  const zero = badge.zero[0] ? ` z${badge.zero[0]}` : "";
  return `${shortType(badge.dtype)} ${scale}${zero}`;
}

/** The colour of a badge and of its wire: that of its type, of its figure, or of what changed. */
function dyeOf(app, number, as = "h") {
  if (heated(app)) return heatColour(app, figureOf(app, number), as) || app.colour.b32;
  if (app.by === "changes") return app.colour[statusOf(app, "badge", number)] || app.colour.b32;
  return badgeColour(app, app.m.badges[number].dtype);
}

const looks = (app, op) => (app.side === FIRST && app.m.was[op]) || null; // how an op looked on the first side
const inputsOf = (app, op) => { const was = looks(app, op); return was ? was.inputs : app.m.ops.inputs[op]; };

/** The fill of an op: how much of what it computes on is quantized, what changed, or the worst figure around it. */
function fillOf(app, op) {
  const { m, colour } = app, inputs = inputsOf(app, op), kind = m.kind(op);
  if (heated(app)) return heatColour(app, worstOf(app, op)) || colour.box;
  if (app.by === "changes") return colour[`${statusOf(app, "op", op)}box`] || colour.box;
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

/** Draws all sides that are shown, and the frame of the view on the small map. */
function draw(app) {
  for (const pane of app.panes) {
    if (pane.canvas.hidden) continue;
    Object.assign(app, { ctx: pane.ctx, side: pane.side });
    app.hits = pane.hits = [];
    drawPane(app, pane.canvas);
  }
}

/** Draws what is in view. Rows outside of it are not looked at; far away, rows that share a pixel are drawn once. */
function drawPane(app, canvas) {
  const { ctx, s, m, view } = app;
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
  app.font = "";
  const frames = framesIn(app, area);
  drawFrames(app, frames);
  drawWires(app, area);
  if (app.controls) drawControls(app, area);
  drawBoxes(app, area);
  if (view.k >= MIDDLE) drawBadges(app, area);
  if (view.k >= NEAR * 0.6) drawLabels(app, area, frames);
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

/** The middle of a piece is a curve that leaves and arrives upright. */
function curve(ctx, x0, y0, x1, y1) {
  const middle = (y0 + y1) / 2;
  ctx.moveTo(x0, y0);
  if (x0 === x1) ctx.lineTo(x1, y1);
  else ctx.bezierCurveTo(x0, middle, x1, middle, x1, y1);
}

const NONE = [];

/** Those of some badges that are on the side that is drawn. */
function shown(app, badges) {
  if (!badges) return NONE;
  return app.m.two ? badges.filter((badge) => app.m.side.badge[badge] & app.side) : badges;
}

function drawWires(app, area) {
  const { ctx, m, s, view, colour } = app;
  const bright = new Set(app.selected ? wiresOf(app, app.selected) : []);
  const paths = { plain: new Path2D(), dashed: new Path2D(), bright: new Path2D(), dim: new Path2D() };
  const marked = new Map();
  const stride = Math.max(1, Math.floor(4 / (view.k * (BOX + GAP)))); // from afar, some say as much as all
  const { x0, x1, wire, last, side } = s.pieces;
  for (let row = area.first - (area.first % stride); row <= Math.min(area.last + 1, m.rows - 1); row += stride) {
    const above = s.top[row], below = s.entry(row), end = Math.max(s.boxTop(row), above);
    for (const i of s.intoRow.of(row)) {
      if (!(side[i] & app.side)) continue;
      if (Math.max(x0[i], x1[i]) < area.left || Math.min(x0[i], x1[i]) > area.right) continue;
      const badges = last[i] ? shown(app, m.wire.badges[wire[i]]) : NONE;
      const dye = badges.length ? dyeOf(app, badges[badges.length - 1], "l") : app.by === "changes" && side[i] !== FIRST + SECOND ? colour[statusOf(app, "wire", wire[i])] : "";
      let path = last[i] === 2 ? paths.dashed : paths.plain;
      if (app.matched && !app.matched[m.wire.target[wire[i]]]) path = paths.dim;
      else if (dye) {
        if (!marked.has(dye)) marked.set(dye, new Path2D());
        path = marked.get(dye);
      }
      if (bright.has(wire[i])) path = paths.bright;
      if (view.k < MIDDLE) {
        path.moveTo(x0[i], above);
        path.lineTo(x1[i], end);
      } else {
        curve(path, x0[i], above, x1[i], below);
        if (below < end) path.lineTo(x1[i], end);
      }
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
    if (!(m.side.wire[one.wire] & app.side)) continue;
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

/** Control edges: what runs before what without being read by it. */
function drawControls(app, area) {
  const { ctx, m, s, view, colour } = app, { source, target } = m.control, path = new Path2D();
  for (let i = 0; i < source.length; i++) {
    const from = source[i], to = target[i];
    if (s.behind(from) >= 0 || s.behind(to) >= 0 || !(m.side.op[from] & m.side.op[to] & app.side)) continue;
    const y0 = s.top[m.layer[from] + 1], y1 = s.boxTop(m.layer[to]);
    if (Math.max(y0, y1) < area.top || Math.min(y0, y1) > area.bottom) continue;
    curve(path, s.x[from] + m.ops.width[from] / 2 - 8, y0, s.x[to] + m.ops.width[to] / 2 - 8, y1);
  }
  ctx.strokeStyle = colour.soft;
  ctx.lineWidth = Math.max(1, 0.6 / view.k);
  ctx.setLineDash([2, 4]);
  ctx.stroke(path);
  ctx.setLineDash([]);
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
      if (s.behind(op) >= 0 || !(m.side.op[op] & app.side)) continue;
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
  const { ctx, m, s, view, colour } = app, width = m.ops.width[op], fill = app.fills[app.side][op];
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.fillStyle = fill === colour.box ? colour.wire : fill;
  ctx.fillRect(s.x[op] - width / 2, y, Math.max(width, 1.5 / view.k), Math.max(BOX, 1 / view.k));
}

function drawBox(app, op, y) {
  const { ctx, m, s, colour } = app, width = m.ops.width[op];
  const chosen = app.selected && app.selected.kind === "op" && app.selected.op === op;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  const x = s.x[op] - width / 2, inputs = inputsOf(app, op), float = m.ops.multiplies[op] && inputs && inputs < 3;
  ctx.fillStyle = app.fills[app.side][op];
  ctx.strokeStyle = chosen ? colour.accent : float ? colour.ink : colour.line;
  ctx.lineWidth = chosen ? 3 : 1;
  if (float) ctx.setLineDash([4, 3]); // multiplies in float, at least in part: also told without colours
  ctx.beginPath();
  ctx.roundRect(x, y, width, BOX, 6);
  ctx.fill();
  ctx.stroke();
  if (float) ctx.setLineDash([]);
  if (inputs >= 2) { // a bar at the left: computes on quantized tensors; half of it: on some
    ctx.fillStyle = colour.b8;
    ctx.fillRect(x + 1, y + 6, 4, (BOX - 12) / (inputs === 3 ? 1 : 2));
  }
  const status = app.by === "changes" ? statusOf(app, "op", op) : "";
  if (status) {
    ctx.strokeStyle = colour[status];
    ctx.lineWidth = 2;
    ctx.beginPath();
    ctx.roundRect(x, y, width, BOX, 6);
    ctx.stroke();
  }
}

function drawType(app, op, y) {
  const { ctx, m, s, colour } = app;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.textAlign = "center";
  ctx.fillStyle = colour.ink;
  font(app, "type");
  const was = looks(app, op), sign = app.by === "changes" ? SIGNS[statusOf(app, "op", op)] || "" : "";
  ctx.fillText(fitted(app, ctx, sign + (was ? was.type : m.type(op)), m.ops.width[op] - 10), s.x[op], y + 16);
}

/** The last part of an op's name, and the shape it makes where no quantized constants are shown. */
function drawName(app, op, y) {
  const { ctx, m, s, colour } = app, room = m.ops.width[op] - 10;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.fillStyle = colour.soft;
  font(app, "name");
  const was = looks(app, op);
  ctx.fillText(fitted(app, ctx, was ? m.last(was.name) : m.short(op), room), s.x[op], y + 30);
  if (!chipsOf(app, op).length && m.ops.outputs[op].length) {
    ctx.fillText(fitted(app, ctx, was ? was.shape : m.text(m.ops.outputs[op][2]), room), s.x[op], y + 44);
  }
}

/** The quantized constants of an op, and badges of its own. */
function chipsOf(app, op) {
  const { m } = app, chips = [];
  for (const one of m.constants.of(op)) {
    const marked = shown(app, m.constant.badges[one]);
    if (marked.length) chips.push({ text: m.text(m.constant.role[one])[0].toUpperCase(), badge: marked[marked.length - 1] });
  }
  for (const badge of shown(app, m.ops.badges[op])) chips.push({ text: "", badge });
  return chips;
}

function drawChips(app, op, y) {
  const { ctx, m, s, colour } = app, width = m.ops.width[op], x = s.x[op] - width / 2, chips = chipsOf(app, op);
  if (!chips.length) return;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.textAlign = "center";
  const from = inputsOf(app, op) >= 2 ? 7 : 4, room = (width - 4 - from) / chips.length, own = chips.length === 1 && !chips[0].text;
  font(app, "badge");
  chips.forEach((chip, i) => {
    const badge = m.badges[chip.badge], left = x + from + room * i;
    const figure = heated(app) ? figureOf(app, chip.badge) : undefined;
    const word = figure === undefined ? shortType(badge.dtype) : figureText(app, figure, true);
    const said = own ? badgeSays(app, chip.badge) : `${chip.text} ${word}`.trim();
    ctx.fillStyle = dyeOf(app, chip.badge);
    ctx.beginPath();
    ctx.roundRect(left + 1, y + 35, room - 2, 14, 4);
    ctx.fill();
    ctx.fillStyle = heated(app) && figure !== undefined ? colour.ink : colour.onbadge;
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
    const above = s.top[row], below = s.entry(row), lanes = new Map();
    for (const i of s.intoRow.of(row)) {
      const marked = last[i] ? shown(app, m.wire.badges[wire[i]]) : NONE;
      if (!marked.length || Math.max(x0[i], x1[i]) < area.left - 60 || Math.min(x0[i], x1[i]) > area.right + 60) continue;
      const target = m.wire.target[wire[i]];
      for (const badge of marked) {
        const lane = lanes.get(target) || 0;
        lanes.set(target, lane + 1);
        drawBadge(app, badge, target, { x0: x0[i], x1: x1[i], above, below }, [0.7, 0.36, 0.88][lane % 3]);
      }
    }
    for (const op of app.unfolded.size ? m.inRow.of(row) : []) if (s.behind(op) < 0 && m.side.op[op] & app.side) drawConstants(app, op, below);
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
  ctx.fillStyle = dyeOf(app, number);
  if (view.k < NEAR) {
    ctx.beginPath();
    ctx.arc(x, y, 7, 0, 2 * Math.PI);
    ctx.fill();
    app.hits.push({ x: x - 7, y: y - 7, right: x + 7, bottom: y + 7, badge: number });
    return;
  }
  font(app, "badge");
  const text = fitted(app, ctx, badgeSays(app, number), 150), half = ctx.measureText(text).width / 2 + 5;
  ctx.beginPath();
  ctx.roundRect(x - half, y - 8, 2 * half, 16, 8);
  ctx.fill();
  if (chosen) {
    ctx.strokeStyle = colour.accent;
    ctx.lineWidth = 3;
    ctx.stroke();
  }
  ctx.textAlign = "center";
  ctx.fillStyle = heated(app) && figureOf(app, number) !== undefined ? colour.ink : colour.onbadge;
  ctx.fillText(text, x, y + 3.5);
  app.hits.push({ x: x - half, y: y - 8, right: x + half, bottom: y + 8, badge: number });
}

/** The ops that an unfolded badge stands for, one below the other; a plan's will get names when they are inserted. */
function drawPair(app, number, x, y) {
  const { ctx, m, colour } = app, badge = m.badges[number];
  const all = badge.ops || (m.planned ? [["quantize", ""], ["dequantize", ""]] : [[badge.dtype, badge.name || ""]]), tall = 26;
  const ops = all.length > 4 ? [[`${all.length - 3} more`, "in the panel"], ...all.slice(-3)] : all;
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
    const marked = shown(app, m.constant.badges[one]);
    if (marked.some((badge) => app.unfolded.has(badge))) open.push({ one, badge: marked[marked.length - 1] });
  }
  const x = Math.min(s.x[op] - m.ops.width[op] / 2, s.x[op] - 76); // left of the ops of an unfolded badge
  ctx.textAlign = "left";
  font(app, "name");
  if (open.length > 4) open.splice(3, open.length, { more: open.length - 3 });
  open.forEach(({ one, badge, more }, i) => {
    const y = below - 26 - i * 22;
    ctx.fillStyle = colour.back;
    ctx.strokeStyle = more ? colour.line : badgeColour(app, m.badges[badge].dtype);
    ctx.lineWidth = 1.5;
    ctx.beginPath();
    ctx.moveTo(x, y + 9);
    ctx.lineTo(x + 6, y + 9);
    ctx.lineTo(s.x[op] - m.ops.width[op] / 2 + 8, s.boxTop(m.layer[op]));
    ctx.stroke();
    ctx.beginPath();
    ctx.roundRect(x - 130, y, 130, 18, 4);
    ctx.fill();
    ctx.stroke();
    ctx.fillStyle = colour.ink;
    const said = more ? `and ${more} more` : `${m.text(m.constant.role[one])} ${shortType(m.badges[badge].dtype)} ${m.text(m.constant.shape[one])}`;
    ctx.fillText(fitted(app, ctx, said, 122), x - 126, y + 12);
    if (!more) app.hits.push({ x: x - 130, y, right: x, bottom: y + 18, badge });
  });
}
