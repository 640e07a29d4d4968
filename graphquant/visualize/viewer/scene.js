// Scene: what is shown where.

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
  labelRoom(m, s);
  s.top = rowTops(m, s, unfolded);
  s.height = s.top[m.rows];
  s.boxTop = (row) => s.top[row + 1] - BOX;
  s.entry = (row) => Math.max(s.top[row], s.boxTop(row) - LABEL * s.strip[row]); // below are labels of frames
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
  for (let row = 0; row < m.rows; row++) top[row + 1] = top[row] + (s.filled[row] ? BOX + GAP + LABEL * s.strip[row] + more[row] * OPENED : 0);
  return top;
}

/** Pieces of wires between neighbouring rows, by the row that they end at, and those that run past rows. */
function route(m, s, end) {
  const { source, target, tensor, slot, lanes, count } = m.wire;
  const row = [], x0 = [], x1 = [], wire = [], last = [], side = [];
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
    if (!led.has(tensor[i])) led.set(tensor[i], []);
    const passed = led.get(tensor[i]);
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
    x1.push(m.portX[i] + moved);
    wire.push(i);
    last.push(slot[i] < 0 ? 2 : 1);
  }
  s.pieces = { x0: Float32Array.from(x0), x1: Float32Array.from(x1), wire: Int32Array.from(wire), last: Uint8Array.from(last), side: Uint8Array.from(side) };
  s.intoRow = ranges(row, m.rows);
}
