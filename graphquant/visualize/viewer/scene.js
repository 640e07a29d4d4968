// Scene: positions for the current folding.

/** Builds the scene for collapsed groups and unfolded annotations, in linear time. */
function scene(m, collapsed, unfolded) {
  const { parent, count } = m.group;
  const hidingGroup = new Int32Array(count).fill(-1);
  for (let group = 0; group < count; group++) {
    const outer = parent[group] < 0 ? -1 : hidingGroup[parent[group]];
    hidingGroup[group] = outer >= 0 ? outer : collapsed.has(group) ? group : -1;
  }
  const s = { hidingGroup, x: m.x, boxes: new Map(), rowBoxes: new Map(), filled: new Uint8Array(m.rows) };
  s.hiddenBy = (op) => (m.ops.group[op] < 0 ? -1 : hidingGroup[m.ops.group[op]]);
  if (collapsed.size) {
    for (let group = 0; group < count; group++) if (hidingGroup[group] === group && m.groupExtents[group].ops) addGroupBox(m, s, group);
  }
  for (let op = 0; op < m.count; op++) if (s.hiddenBy(op) < 0) s.filled[m.layer[op]] = 1;
  for (const [row, boxes] of s.rowBoxes) {
    s.filled[row] = 1;
    s.x = shiftRow(m, s, row, boxes);
  }
  reserveLabels(m, s);
  s.bands = placeAnnotations(m, s, unfolded);
  s.top = rowTops(m, s);
  s.height = s.top[m.rows];
  s.boxTop = (row) => s.top[row + 1] - BOX_HEIGHT;
  s.bandBottom = (row) => s.boxTop(row) - LABEL_HEIGHT * s.strip[row]; // frame labels are below
  s.entry = (row) => Math.max(s.top[row], s.bandBottom(row) - (s.bands.has(row) ? s.bands.get(row).height : 0));
  const end = (op, side) => {
    const group = s.hiddenBy(op), row = group < 0 ? m.layer[op] : s.boxes.get(group).row;
    return { node: group < 0 ? op : -1 - group, x: group < 0 ? s.x[op] : s.boxes.get(group).x, row, side };
  };
  routeWires(m, s, end);
  return s;
}

function addGroupBox(m, s, group) {
  const extent = m.groupExtents[group];
  const width = Math.min(240, Math.max(110, m.text(m.group.label[group]).length * 7 + 40));
  const box = { group, row: extent.top, x: (extent.left + extent.right) / 2, width };
  s.boxes.set(group, box);
  if (!s.rowBoxes.has(box.row)) s.rowBoxes.set(box.row, []);
  s.rowBoxes.get(box.row).push(box);
}

/** Shifts the boxes of a row to the right until none overlaps a group box. */
function shiftRow(m, s, row, boxes) {
  const x = s.x === m.x ? m.x.slice() : s.x;
  const all = boxes.map((box) => ({ x: box.x, half: box.width / 2, moveTo: (to) => { box.x = to; } }));
  for (const op of m.inRow.of(row)) {
    if (s.hiddenBy(op) < 0) all.push({ x: x[op], half: m.ops.width[op] / 2, moveTo: (to) => { x[op] = to; } });
  }
  all.sort((a, b) => a.x - b.x);
  let right = -Infinity;
  for (const box of all) {
    const position = Math.max(box.x, right + 24 + box.half);
    box.moveTo(position);
    right = position + box.half;
  }
  return x;
}

/** Returns the top of each row, with the room above its boxes; empty rows have no height. */
function rowTops(m, s) {
  const top = new Float64Array(m.rows + 1);
  for (let row = 0; row < m.rows; row++) {
    const band = s.bands.get(row);
    top[row + 1] = top[row] + (s.filled[row] ? BOX_HEIGHT + ROW_GAP + LABEL_HEIGHT * s.strip[row] + (band ? band.height : 0) : 0);
  }
  return top;
}

/** Returns the ops of an annotation, as type and name; the first ones are counted if there are many. */
function representedOps(m, number) {
  const annotation = m.annotations[number], planned = [["quantize", ""], ["dequantize", ""]];
  const all = annotation.ops || (m.planned ? planned : [[annotation.dtype, annotation.name || ""]]);
  return all.length > 4 ? [[`${all.length - 3} more`, "in the panel"], ...all.slice(-3)] : all;
}

/** Returns the size of an annotation on a wire: its label, which may also be a figure, or its ops if it is unfolded. */
function annotationSize(m, number, unfolded) {
  const ops = unfolded ? representedOps(m, number) : null;
  if (ops) return { ops, width: OP_WIDTH, height: OP_HEIGHT * ops.length };
  const annotation = m.annotations[number], change = m.twoSides ? shortType(annotation.dtype).length + 1 + scaleText(m, number).length : 0;
  const letters = Math.max(annotationText(annotation).length, change, m.heat ? 13 : 0);
  return { width: Math.min(MAX_PILL, 12 + PILL_DIGIT * letters), height: PILL_HEIGHT };
}

/**
 * Places annotations in a band above the row of their reader: those of a wire above its end, one above the other in
 * the order of the wire, and unfolded constants left of their op. Items whose extents in x overlap are in different
 * tiers; tier 0 is the lowest one.
 */
function placeAnnotations(m, s, unfolded) {
  const bands = new Map(), lists = new Map();
  const add = (op, item) => {
    const row = m.layer[op];
    if (!bands.has(row)) bands.set(row, { items: [], height: 0 });
    bands.get(row).items.push({ op, ...item });
  };
  for (const [wire, annotations] of Object.entries(m.wire.annotations)) {
    const op = m.wire.target[wire];
    if (s.hiddenBy(op) >= 0) continue;
    for (let i = annotations.length - 1; i >= 0; i--) {
      const annotation = annotations[i], size = annotationSize(m, annotation, unfolded.has(annotation));
      add(op, { annotation, side: m.side.annotation[annotation], ...size, left: m.portX[wire] + s.x[op] - m.x[op] - size.width / 2 });
    }
  }
  for (const annotation of unfolded) {
    const side = m.side.annotation[annotation];
    for (const { op, constant } of m.readers[annotation]) {
      const key = `${op} ${side}`;
      if (constant === undefined || s.hiddenBy(op) >= 0) continue;
      if (!lists.has(key)) lists.set(key, { op, side, constants: [] });
      lists.get(key).constants.push({ annotation, constant });
    }
  }
  for (const { op, side, constants } of lists.values()) {
    if (constants.length > 4) constants.splice(0, constants.length - 3, { more: constants.length - 3 });
    const left = s.x[op] - Math.max(m.ops.width[op], OP_WIDTH) / 2 - OP_WIDTH - TIER_GAP;
    add(op, { side, constants, left, width: OP_WIDTH, height: CONSTANT_HEIGHT * constants.length });
  }
  for (const band of bands.values()) placeTiers(band);
  return bands;
}

/** Sets the tier of each item of a band, so that none overlap, and `up`, from the band's bottom to the item's top. */
function placeTiers(band) {
  const tiers = [];
  for (const item of band.items.sort((a, b) => a.left + a.width / 2 - b.left - b.width / 2)) {
    const taken = (tier) => [FIRST, SECOND].some((side) => item.side & side && tier.right[side] + TIER_GAP > item.left);
    let number = tiers.findIndex((tier) => !taken(tier));
    if (number < 0) number = tiers.push({ right: { [FIRST]: -Infinity, [SECOND]: -Infinity }, height: 0 }) - 1;
    for (const side of [FIRST, SECOND]) if (item.side & side) tiers[number].right[side] = Math.max(tiers[number].right[side], item.left + item.width);
    tiers[number].height = Math.max(tiers[number].height, item.height);
    item.tier = number;
  }
  const bottoms = tiers.map(({ height }) => (band.height += height + TIER_GAP) - height);
  for (const item of band.items) item.up = bottoms[item.tier] + item.height;
}

/** Splits wires into pieces between adjacent rows, by end row; collects wires that cross rows. */
function routeWires(m, s, end) {
  const { source, target, tensor, slot, lanes, count } = m.wire;
  const row = [], x0 = [], x1 = [], wire = [], last = [], side = [];
  s.longWires = [];
  const pairs = new Set(), trunkPieces = new Map();
  for (let i = 0; i < count; i++) {
    const from = end(source[i]), to = end(target[i]);
    if (from.node === to.node && from.node < 0) continue;
    const layers = m.layer[target[i]] - m.layer[source[i]];
    const trunk = m.trunks[tensor[i]];
    if (from.node < 0 || to.node < 0 || lanes[tensor[i]] !== undefined || layers < 1) {
      const key = from.node < 0 || to.node < 0 ? `${from.node} ${to.node}` : i;
      if (!pairs.has(key)) s.longWires.push({ wire: i, from, to, lane: lanes[tensor[i]] });
      pairs.add(key);
      continue;
    }
    const shift = s.x[target[i]] - m.x[target[i]];
    if (!trunkPieces.has(tensor[i])) trunkPieces.set(tensor[i], []);
    const passed = trunkPieces.get(tensor[i]);
    for (let k = 0; k < Math.min(passed.length, layers - 1); k++) side[passed[k]] |= m.side.wire[i];
    for (let k = passed.length; k < layers - 1; k++) {
      passed.push(row.length);
      side.push(m.side.wire[i]);
      row.push(m.layer[source[i]] + k + 1);
      x0.push(k ? trunk[k - 1] : from.x);
      x1.push(trunk[k]);
      wire.push(i);
      last.push(0);
    }
    side.push(m.side.wire[i]);
    row.push(m.layer[target[i]]);
    x0.push(layers > 1 ? trunk[layers - 2] : from.x);
    x1.push(m.portX[i] + shift);
    wire.push(i);
    last.push(slot[i] < 0 ? 2 : 1);
  }
  s.pieces = { x0: Float32Array.from(x0), x1: Float32Array.from(x1), wire: Int32Array.from(wire), last: Uint8Array.from(last), side: Uint8Array.from(side) };
  s.intoRow = groupByOwner(row, m.rows);
}
