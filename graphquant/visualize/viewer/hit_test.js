// Hit tests.

/** Returns the item at a point: an annotation, a frame's label, a box or a wire. */
function hitTest(app, pane, x, y) {
  const { m, s, view } = app;
  for (let i = pane.hits.length - 1; i >= 0; i--) {
    const hit = pane.hits[i];
    if (x >= hit.x && x <= hit.right && y >= hit.y && y <= hit.bottom) {
      return hit.annotation !== undefined ? { kind: "annotation", annotation: hit.annotation } : { kind: "group", group: hit.frame };
    }
  }
  const row = rowAt(s.top, y, m.rows);
  if (m.rows && s.filled[row] && y >= s.boxTop(row)) {
    for (const box of s.rowBoxes.get(row) || []) {
      if (Math.abs(x - box.x) <= box.width / 2) return { kind: "group", group: box.group };
    }
    const inRow = m.inRow.of(row);
    for (let i = firstFrom(s.x, inRow, x - MAX_BOX); i < inRow.length && s.x[inRow[i]] <= x + MAX_BOX; i++) {
      const op = inRow[i];
      if (s.hiddenBy(op) < 0 && m.side.op[op] & pane.side && Math.abs(x - s.x[op]) <= m.ops.width[op] / 2) return { kind: "op", op };
    }
  }
  return wireAt(app, pane, row, x, y, 6 / view.k);
}

function wireAt(app, pane, row, x, y, reach) {
  const { m, s } = app, { x0, x1, wire, last, side } = s.pieces;
  const above = s.top[row], below = s.entry(row), end = s.boxTop(row);
  let best = reach, nearest = null;
  for (const i of m.rows ? s.intoRow.of(row) : []) {
    if (!(side[i] & pane.side)) continue;
    if (y > below) {
      if ((!last[i] || y < end) && Math.abs(x - x1[i]) < best) [best, nearest] = [Math.abs(x - x1[i]), wire[i]];
      continue;
    }
    for (let t = 0; t <= 1; t += 0.05) {
      const dx = x0[i] + (x1[i] - x0[i]) * t * t * (3 - 2 * t) - x;
      const distance = Math.hypot(dx, above + (below - above) * (1.5 * t * (1 - t) + t * t * t) - y);
      if (distance < best) [best, nearest] = [distance, wire[i]];
    }
  }
  return nearest === null ? null : { kind: "wire", wire: nearest };
}
