// Drawing of the canvas.

const FONTS = { type: "600 15px system-ui,sans-serif", name: "13px system-ui,sans-serif", annotation: "13px ui-monospace,monospace" };

function palette() {
  const names = ["ink", "soft", "line", "back", "box", "io", "quant", "part", "float", "frame", "accent", "wire", "onannotation", "b4", "b8", "b16", "b32", "f8", "added", "removed", "changed", "addedbox", "removedbox", "changedbox", "h0", "h1", "h2", "h3", "h4", "l0", "l1", "l2", "l3", "l4"];
  return Object.fromEntries(names.map((name) => [name, css(`--${name}`)]));
}

function badgeColor(app, dtype) {
  const bits = /^u?int(\d+)$/.exec(dtype || "");
  if (!bits) return app.color[dtype && dtype.startsWith("float8") ? "f8" : "b32"];
  return app.color[+bits[1] <= 4 ? "b4" : +bits[1] <= 8 ? "b8" : +bits[1] <= 16 ? "b16" : "b32"];
}

const shortNumber = (value) => (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4) ? +value.toPrecision(4) : value.toExponential(3)).toString();
const shortType = (dtype) => (dtype || "?").replace("uint", "u").replace("int", "i").replace("float8_", "f8 ");

/** Returns a changed scale as "old → new", else "". */
function scaleText(m, number) {
  const annotation = m.annotations[number], before = m.annotations[m.counterparts[number]];
  const scaleOf = (side) => (side.scale && !side.count ? shortNumber(Math.fround(side.scale[0])) : "");
  return before && scaleOf(before) && scaleOf(annotation) && scaleOf(before) !== scaleOf(annotation) ? `${scaleOf(before)} → ${scaleOf(annotation)}` : "";
}

/** Returns the label of an annotation: its figure in a heatmap, else type, scale and zero point. */
function annotationLabel(app, number) {
  const annotation = app.m.annotations[number], figure = showsHeatmap(app) ? figureOf(app, number) : undefined;
  if (figure !== undefined) return `${shortType(annotation.dtype)} ${figureText(app, figure)}`;
  const scales = app.by === "changes" ? scaleText(app.m, number) : "";
  return scales ? `${shortType(annotation.dtype)} ${scales}` : annotationText(annotation);
}

/** Returns type, scale and zero point of an annotation. */
function annotationText(annotation) {
  if (annotation.dynamic) return `${shortType(annotation.dtype)} dynamic`;
  if (!annotation.scale) return shortType(annotation.dtype);
  if (annotation.count > 1) return `${shortType(annotation.dtype)}[${annotation.count}]`;
  const scale = shortNumber(Math.fround(annotation.scale[0]));
  const zero = annotation.zero[0] ? ` z${annotation.zero[0]}` : "";
  return `${shortType(annotation.dtype)} ${scale}${zero}`;
}

/** Returns the color of an annotation and its wire: by type, figure or change. */
function annotationColor(app, number, as = "h") {
  if (showsHeatmap(app)) return heatColor(app, figureOf(app, number), as) || app.color.b32;
  if (app.by === "changes") return app.color[changeStatus(app, "annotation", number)] || app.color.b32;
  return badgeColor(app, app.m.annotations[number].dtype);
}

const firstSideBox = (app, op) => (app.side === FIRST && app.m.firstBoxes[op]) || null; // the op's box on the first side, if different
const inputState = (app, op) => { const old = firstSideBox(app, op); return old ? old.inputs : app.m.ops.inputs[op]; };

/** Returns the fill of a box: by quantized inputs, change, or worst figure. */
function boxFill(app, op) {
  const { m, color } = app, inputs = inputState(app, op), kind = m.kind(op);
  if (showsHeatmap(app)) return heatColor(app, worstFigure(app, op)) || color.box;
  if (app.by === "changes") return color[`${changeStatus(app, "op", op)}box`] || color.box;
  if (kind === "input" || kind === "output") return color.io;
  if (inputs === 3) return color.quant;
  if (m.ops.weighted[op]) return color.float;
  return inputs === 2 ? color.part : color.box;
}

/** Sets the font if it differs; the getter of the canvas is slow. */
function setFont(app, name) {
  if (app.font !== name) app.ctx.font = FONTS[name];
  app.font = name;
}

/** Truncates text to a width in the current font. */
function fitText(app, ctx, text, room) {
  const key = `${app.font}|${Math.round(room)}|${text}`;
  let result = app.fittedTexts.get(key);
  if (result === undefined) {
    result = text;
    if (ctx.measureText(text).width > room) {
      let low = 0, high = Math.min(text.length, 400);
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (ctx.measureText(text.slice(0, middle) + "…").width <= room) low = middle;
        else high = middle - 1;
      }
      result = text.slice(0, low) + "…";
    }
    if (app.fittedTexts.size > 20000) app.fittedTexts.clear();
    app.fittedTexts.set(key, result);
  }
  return result;
}

/** Draws all visible sides, and the viewport on the minimap. */
function draw(app) {
  for (const pane of app.panes) {
    if (pane.canvas.hidden) continue;
    Object.assign(app, { ctx: pane.ctx, side: pane.side });
    app.hits = pane.hits = [];
    drawPane(app, pane.canvas);
  }
}

/** Draws the viewport. Rows outside are skipped; at low zoom, rows on the same pixel are drawn once. */
function drawPane(app, canvas) {
  const { ctx, s, m, view } = app;
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.fillStyle = app.color.back;
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
  if (view.k >= CURVE_ZOOM) drawAnnotations(app, area);
  if (view.k >= TEXT_ZOOM * 0.6) drawLabels(app, area, frames);
  drawMap(app, area);
}

/** Returns the row at `y`. */
function rowAt(top, y, rows) {
  let low = 0, high = rows;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (top[middle + 1] <= y) low = middle + 1;
    else high = middle;
  }
  return Math.min(low, Math.max(rows - 1, 0));
}

/** Adds a curve that starts and ends vertically. */
function curve(ctx, x0, y0, x1, y1) {
  const middle = (y0 + y1) / 2;
  ctx.moveTo(x0, y0);
  if (x0 === x1) ctx.lineTo(x1, y1);
  else ctx.bezierCurveTo(x0, middle, x1, middle, x1, y1);
}

const NONE = [];

/** Returns the annotations on the current side. */
function onSide(app, annotations) {
  if (!annotations) return NONE;
  return app.m.twoSides ? annotations.filter((annotation) => app.m.side.annotation[annotation] & app.side) : annotations;
}

function drawWires(app, area) {
  const { ctx, m, s, view, color } = app;
  const bright = new Set(app.selected ? connectedWires(app, app.selected) : []);
  const paths = { plain: new Path2D(), dashed: new Path2D(), bright: new Path2D(), dim: new Path2D() };
  const colored = new Map();
  const stride = Math.max(1, Math.floor(4 / (view.k * (BOX_HEIGHT + ROW_GAP)))); // at low zoom, a sample of the wires looks like all of them
  const { x0, x1, wire, last, side } = s.pieces;
  for (let row = area.first - (area.first % stride); row <= Math.min(area.last + 1, m.rows - 1); row += stride) {
    const above = s.top[row], below = s.entry(row), end = Math.max(s.boxTop(row), above);
    for (const i of s.intoRow.of(row)) {
      if (!(side[i] & app.side)) continue;
      if (Math.max(x0[i], x1[i]) < area.left || Math.min(x0[i], x1[i]) > area.right) continue;
      const annotations = last[i] ? onSide(app, m.wire.annotations[wire[i]]) : NONE;
      const lineColor = annotations.length ? annotationColor(app, annotations[annotations.length - 1], "l") : app.by === "changes" && side[i] !== FIRST + SECOND ? color[changeStatus(app, "wire", wire[i])] : "";
      let path = last[i] === 2 ? paths.dashed : paths.plain;
      if (app.matched && !app.matched[m.wire.target[wire[i]]]) path = paths.dim;
      else if (lineColor) {
        if (!colored.has(lineColor)) colored.set(lineColor, new Path2D());
        path = colored.get(lineColor);
      }
      if (bright.has(wire[i])) path = paths.bright;
      if (view.k < CURVE_ZOOM) {
        path.moveTo(x0[i], above);
        path.lineTo(x1[i], end);
      } else {
        curve(path, x0[i], above, x1[i], below);
        if (below < end) path.lineTo(x1[i], end);
      }
      if (!last[i]) path.lineTo(x1[i], s.top[row + 1]);
    }
  }
  drawLongWires(app, area, paths, bright);
  const lineWidth = Math.max(1.2, 0.7 / view.k);
  const stroke = (path, style, width, dash = []) => {
    ctx.strokeStyle = style;
    ctx.lineWidth = width;
    ctx.setLineDash(dash);
    ctx.stroke(path);
  };
  ctx.globalAlpha = 0.2;
  stroke(paths.dim, color.wire, lineWidth);
  ctx.globalAlpha = 1;
  stroke(paths.plain, color.wire, lineWidth);
  stroke(paths.dashed, color.wire, lineWidth, [5, 4]);
  for (const [lineColor, path] of colored) stroke(path, lineColor, lineWidth * 1.5);
  stroke(paths.bright, color.accent, lineWidth * 2);
  ctx.setLineDash([]);
}

/** Draws wires that cross rows: to and from collapsed groups, along lanes, and back edges. */
function drawLongWires(app, area, paths, bright) {
  const { m, s } = app;
  for (const line of s.longWires) {
    if (!(m.side.wire[line.wire] & app.side)) continue;
    const y0 = s.top[line.from.row + 1], y1 = s.boxTop(line.to.row);
    if (Math.max(y0, y1) < area.top || Math.min(y0, y1) > area.bottom) continue;
    let path = m.wire.slot[line.wire] < 0 ? paths.dashed : paths.plain;
    if (app.matched && !app.matched[m.wire.target[line.wire]]) path = paths.dim;
    if (bright.has(line.wire)) path = paths.bright;
    const entry = line.to.node < 0 ? y1 : s.entry(line.to.row);
    const x1 = line.to.node < 0 ? line.to.x : m.portX[line.wire] + s.x[line.to.node] - m.x[line.to.node];
    if (line.lane !== undefined && y1 > y0) {
      curve(path, line.from.x, y0, line.lane, y0 + ROW_GAP);
      path.lineTo(line.lane, entry - ROW_GAP);
      curve(path, line.lane, entry - ROW_GAP, x1, entry);
      path.lineTo(x1, y1);
    } else if (y1 > y0) {
      curve(path, line.from.x, y0, x1, entry);
      path.lineTo(x1, y1);
    } else {
      path.moveTo(line.from.x, y0);
      const side = Math.max(line.from.x, x1) + 90;
      path.bezierCurveTo(line.from.x, y0 + 50, side, y0 + 50, side, (y0 + y1) / 2);
      path.bezierCurveTo(side, y1 - 50, x1, y1 - 50, x1, y1);
    }
  }
}

/** Draws control edges: execution order without data flow. */
function drawControls(app, area) {
  const { ctx, m, s, view, color } = app, { source, target } = m.control, path = new Path2D();
  for (let i = 0; i < source.length; i++) {
    const from = source[i], to = target[i];
    if (s.hiddenBy(from) >= 0 || s.hiddenBy(to) >= 0 || !(m.side.op[from] & m.side.op[to] & app.side)) continue;
    const y0 = s.top[m.layer[from] + 1], y1 = s.boxTop(m.layer[to]);
    if (Math.max(y0, y1) < area.top || Math.min(y0, y1) > area.bottom) continue;
    curve(path, s.x[from] + m.ops.width[from] / 2 - 8, y0, s.x[to] + m.ops.width[to] / 2 - 8, y1);
  }
  ctx.strokeStyle = color.soft;
  ctx.lineWidth = Math.max(1, 0.6 / view.k);
  ctx.setLineDash([2, 4]);
  ctx.stroke(path);
  ctx.setLineDash([]);
}

function drawBoxes(app, area) {
  const { m, s, view } = app, visible = [];
  const stride = Math.max(1, Math.floor(0.7 / (view.k * (BOX_HEIGHT + ROW_GAP))));
  for (let row = area.first - (area.first % stride); row <= area.last; row += stride) {
    if (!s.filled[row]) continue;
    const y = s.boxTop(row), inRow = m.inRow.of(row);
    let pixel = -Infinity;
    for (let i = firstFrom(s.x, inRow, area.left - MAX_BOX); i < inRow.length && s.x[inRow[i]] < area.right + MAX_BOX; i++) {
      const op = inRow[i];
      if (s.hiddenBy(op) >= 0 || !(m.side.op[op] & app.side)) continue;
      if (view.k < CURVE_ZOOM && s.x[op] * view.k < pixel) continue; // a box on this pixel is drawn already
      pixel = s.x[op] * view.k + 1;
      visible.push({ op, y });
    }
  }
  const layers = view.k < OUTLINE_ZOOM ? [drawDistantBox] : view.k < TEXT_ZOOM ? [drawBox, drawType] : [drawBox, drawType, drawName, drawChips];
  for (const layer of layers) for (const box of visible) layer(app, box.op, box.y); // layer by layer, because changing the font is slow
  for (const [row, boxes] of s.rowBoxes) {
    if (row >= area.first && row <= area.last) for (const box of boxes) drawGroup(app, box, s.boxTop(row));
  }
  app.ctx.globalAlpha = 1;
}

/** Returns the first item at or right of `left`, by binary search; group boxes may have shifted items slightly. */
function firstFrom(x, items, left) {
  let low = 0, high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[items[middle]] < left) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

/** Draws an op at low zoom. */
function drawDistantBox(app, op, y) {
  const { ctx, m, s, view, color } = app, width = m.ops.width[op], fill = app.fills[app.side][op];
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.fillStyle = fill === color.box ? color.wire : fill;
  ctx.fillRect(s.x[op] - width / 2, y, Math.max(width, 1.5 / view.k), Math.max(BOX_HEIGHT, 1 / view.k));
}

function drawBox(app, op, y) {
  const { ctx, m, s, color } = app, width = m.ops.width[op];
  const selected = app.selected && app.selected.kind === "op" && app.selected.op === op;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  const x = s.x[op] - width / 2, inputs = inputState(app, op), float = m.ops.weighted[op] && inputs && inputs < 3;
  ctx.fillStyle = app.fills[app.side][op];
  ctx.strokeStyle = selected ? color.accent : float ? color.ink : color.line;
  ctx.lineWidth = selected ? 3 : 1;
  if (float) ctx.setLineDash([4, 3]); // weighted op in float: dashed, so that it is visible without color
  ctx.beginPath();
  ctx.roundRect(x, y, width, BOX_HEIGHT, 6);
  ctx.fill();
  ctx.stroke();
  if (float) ctx.setLineDash([]);
  if (inputs >= 2) { // bar at the left: all inputs are quantized; half a bar: some
    ctx.fillStyle = color.b8;
    ctx.fillRect(x + 1, y + 6, 4, (BOX_HEIGHT - 12) / (inputs === 3 ? 1 : 2));
  }
  const status = app.by === "changes" ? changeStatus(app, "op", op) : "";
  if (status) {
    ctx.strokeStyle = color[status];
    ctx.lineWidth = 2;
    ctx.beginPath();
    ctx.roundRect(x, y, width, BOX_HEIGHT, 6);
    ctx.stroke();
  }
}

function drawType(app, op, y) {
  const { ctx, m, s, color } = app;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.textAlign = "center";
  ctx.fillStyle = color.ink;
  setFont(app, "type");
  const old = firstSideBox(app, op), sign = app.by === "changes" ? SIGNS[changeStatus(app, "op", op)] || "" : "";
  ctx.fillText(fitText(app, ctx, sign + (old ? old.type : m.type(op)), m.ops.width[op] - 10), s.x[op], y + 19);
}

/** Draws the name with the shape of the weight, and the output shape: right of the chips of quantized constants if there is room. */
function drawName(app, op, y) {
  const { ctx, m, s, color } = app, room = m.ops.width[op] - 10;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.fillStyle = color.soft;
  ctx.textAlign = "center";
  setFont(app, "name");
  const old = firstSideBox(app, op);
  const label = old && old.name !== m.name(op) ? m.last(old.name) : m.short(op);
  const weight = m.constants.of(op).find((constant) => m.text(m.constant.role[constant]) === "weight" && m.side.constant[constant] & app.side);
  const name = weight === undefined || !m.text(m.constant.shape[weight]) ? label : [label, m.text(m.constant.shape[weight])].filter(Boolean).join(" · ");
  ctx.fillText(fitText(app, ctx, ctx.measureText(name).width > room ? label : name, room), s.x[op], y + 36);
  const shape = m.ops.outputs[op].length ? (old ? old.shape : m.text(m.ops.outputs[op][2])) : "", chips = chipsOf(app, op);
  if (!chips.length) ctx.fillText(fitText(app, ctx, shape, room), s.x[op], y + (name ? 53 : 42));
  else if (shape && shapeRoom(app, op, chips)) {
    ctx.textAlign = "right";
    ctx.fillText(shape, s.x[op] + m.ops.width[op] / 2 - 6, y + 53);
  }
}

/** Returns the width of the shape right of the chips, or 0 if it does not fit there. */
function shapeRoom(app, op, chips) {
  const { m } = app, shape = m.ops.outputs[op].length ? m.text(m.ops.outputs[op][2]) : "";
  if (!shape || chips.some((chip) => !chip.text)) return 0;
  const width = shape.length * SHAPE_DIGIT + 8;
  return m.ops.width[op] - width >= chips.length * CHIP_WIDTH + 8 ? width : 0;
}

const CHIP_WIDTH = 46, SHAPE_DIGIT = 7.6; // the least width of a chip, and the width of a digit, as in viewer_data.py

/** Returns labels for the quantized constants of an op and its own annotations. */
function chipsOf(app, op) {
  const { m } = app, chips = [];
  for (const constant of m.constants.of(op)) {
    const marked = onSide(app, m.constant.annotations[constant]);
    if (marked.length) chips.push({ text: m.text(m.constant.role[constant])[0].toUpperCase(), annotation: marked[marked.length - 1] });
  }
  for (const annotation of onSide(app, m.ops.annotations[op])) chips.push({ text: "", annotation });
  return chips;
}

function drawChips(app, op, y) {
  const { ctx, m, s, color } = app, width = m.ops.width[op], x = s.x[op] - width / 2, chips = chipsOf(app, op);
  if (!chips.length) return;
  ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
  ctx.textAlign = "center";
  const from = inputState(app, op) >= 2 ? 7 : 4, shape = shapeRoom(app, op, chips), room = (width - (shape ? 8 : 4) - from - shape) / chips.length, single = chips.length === 1 && !chips[0].text;
  setFont(app, "annotation");
  chips.forEach((chip, i) => {
    const annotation = m.annotations[chip.annotation], left = x + from + room * i;
    const figure = showsHeatmap(app) ? figureOf(app, chip.annotation) : undefined;
    const value = figure === undefined ? shortType(annotation.dtype) : figureText(app, figure, true);
    const label = single ? annotationLabel(app, chip.annotation) : `${chip.text} ${value}`.trim();
    ctx.fillStyle = annotationColor(app, chip.annotation);
    ctx.beginPath();
    ctx.roundRect(left + 1, y + 41, room - 2, 16, 4);
    ctx.fill();
    ctx.fillStyle = showsHeatmap(app) && figure !== undefined ? color.ink : color.onannotation;
    ctx.fillText(fitText(app, ctx, label, room - 4), left + room / 2, y + 53);
    app.hits.push({ x: left, y: y + 40, right: left + room, bottom: y + 58, annotation: chip.annotation });
  });
}

function drawGroup(app, box, y) {
  const { ctx, m, view, color } = app, x = box.x - box.width / 2;
  ctx.globalAlpha = 1;
  ctx.fillStyle = color.frame;
  const selected = app.selected && app.selected.kind === "group" && app.selected.group === box.group;
  ctx.strokeStyle = selected ? color.accent : color.soft;
  ctx.lineWidth = selected ? 3 : 1.5;
  for (const shift of [4, 0]) {
    ctx.beginPath();
    ctx.roundRect(x + shift, y - shift, box.width, BOX_HEIGHT, 6);
    ctx.fill();
    ctx.stroke();
  }
  if (view.k < TEXT_ZOOM * 0.7) return;
  ctx.textAlign = "center";
  ctx.fillStyle = color.ink;
  setFont(app, "type");
  ctx.fillText(fitText(app, ctx, `+ ${m.text(m.group.label[box.group])}`, box.width - 10), box.x, y + 26);
  ctx.fillStyle = color.soft;
  setFont(app, "name");
  ctx.fillText(pluralize(m.groupExtents[box.group].ops, "op"), box.x, y + 46);
}

/** Draws the annotations above each row: as text, as dots at low zoom, or unfolded as their ops, with constants. */
function drawAnnotations(app, area) {
  const { ctx, m, s } = app;
  for (let row = area.first; row <= Math.min(area.last + 1, m.rows - 1); row++) {
    if (!s.bands.has(row)) continue;
    const bottom = s.bandBottom(row);
    const items = s.bands.get(row).items.filter(({ side, left, width }) => side & app.side && left < area.right && left + width > area.left);
    for (const { op, constants, left, width, up, height } of items) {
      if (!constants) continue; // the lines from constants to their op are behind all boxes
      ctx.globalAlpha = app.matched && !app.matched[op] ? 0.2 : 1;
      ctx.strokeStyle = badgeColor(app, m.annotations[constants[constants.length - 1].annotation].dtype);
      ctx.lineWidth = 1.5;
      ctx.beginPath();
      ctx.moveTo(left + width, bottom - up + height - CONSTANT_HEIGHT / 2);
      ctx.lineTo(s.x[op] - m.ops.width[op] / 2 + 8, s.boxTop(row));
      ctx.stroke();
    }
    for (const item of items) {
      ctx.globalAlpha = app.matched && !app.matched[item.op] ? 0.2 : 1;
      (item.constants ? drawConstants : item.ops ? drawRepresentedOps : drawAnnotation)(app, item, bottom - item.up);
    }
  }
  ctx.globalAlpha = 1;
}

function drawAnnotation(app, { annotation: number, left, width }, top) {
  const { ctx, view, color } = app, x = left + width / 2, y = top + PILL_HEIGHT / 2;
  const selected = app.selected && app.selected.annotation === number;
  ctx.fillStyle = annotationColor(app, number);
  if (view.k < TEXT_ZOOM) {
    ctx.beginPath();
    ctx.arc(x, y, 7, 0, 2 * Math.PI);
    ctx.fill();
    app.hits.push({ x: x - 7, y: y - 7, right: x + 7, bottom: y + 7, annotation: number });
    return;
  }
  setFont(app, "annotation");
  const text = fitText(app, ctx, annotationLabel(app, number), width - 10), half = ctx.measureText(text).width / 2 + 5;
  ctx.beginPath();
  ctx.roundRect(x - half, top, 2 * half, PILL_HEIGHT, PILL_HEIGHT / 2);
  ctx.fill();
  if (selected) {
    ctx.strokeStyle = color.accent;
    ctx.lineWidth = 3;
    ctx.stroke();
  }
  ctx.textAlign = "center";
  ctx.fillStyle = showsHeatmap(app) && figureOf(app, number) !== undefined ? color.ink : color.onannotation;
  ctx.fillText(text, x, y + 4.5);
  app.hits.push({ x: x - half, y: top, right: x + half, bottom: top + PILL_HEIGHT, annotation: number });
}

function unfoldedBox(app, stroke, x, y, width, height) {
  const { ctx } = app;
  ctx.lineWidth = 1.5;
  ctx.fillStyle = app.color.back;
  ctx.strokeStyle = stroke;
  ctx.beginPath();
  ctx.roundRect(x, y, width, height, 5);
  ctx.fill();
  ctx.stroke();
  ctx.fillStyle = app.color.ink;
}

/** Draws the ops of an unfolded annotation below each other; planned ops have no names yet. */
function drawRepresentedOps(app, { annotation: number, ops, left, width }, y) {
  const { ctx, m, color } = app, annotation = m.annotations[number], middle = left + width / 2;
  ctx.textAlign = "center";
  setFont(app, "name");
  ops.forEach(([type, name], i) => {
    const top = y + i * OP_HEIGHT, height = OP_HEIGHT - 3;
    unfoldedBox(app, badgeColor(app, annotation.dtype), left, top, width, height);
    ctx.fillText(fitText(app, ctx, type, width - 8), middle, top + 14);
    ctx.fillStyle = color.soft;
    ctx.fillText(fitText(app, ctx, name.split("/").pop() || annotationText(annotation), width - 8), middle, top + 28);
    app.hits.push({ x: left, y: top, right: left + width, bottom: top + height, annotation: number });
  });
}

/** Draws the unfolded constants of an op below each other. */
function drawConstants(app, { constants, left, width }, y) {
  const { ctx, m, color } = app;
  ctx.textAlign = "left";
  setFont(app, "name");
  constants.forEach(({ constant, annotation, more }, i) => {
    const top = y + i * CONSTANT_HEIGHT, height = CONSTANT_HEIGHT - 3;
    unfoldedBox(app, more ? color.line : badgeColor(app, m.annotations[annotation].dtype), left, top, width, height);
    const label = more ? `and ${more} more` : `${m.text(m.constant.role[constant])} ${shortType(m.annotations[annotation].dtype)} ${m.text(m.constant.shape[constant])}`;
    ctx.fillText(fitText(app, ctx, label, width - 8), left + 4, top + 14);
    if (!more) app.hits.push({ x: left, y: top, right: left + width, bottom: top + height, annotation });
  });
}
