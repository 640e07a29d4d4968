// Frames around the ops of a name scope or a nested graph, without other ops.

const MAX_BLOCK_ROWS = 24; // maximum number of rows of a block in a frame that is not a rectangle

/**
 * Returns the parts of each group's frame. A part is a rectangle, or several blocks of rows below each other if the
 * rectangle would contain other ops. A frame has several parts if other ops are between its ops.
 */
function frameParts(m) {
  const rows = groupRows(m);
  return m.groupExtents.map((extent, group) => splitFrame(m, rows, rows.start[group], rows.start[group + 1], extent));
}

/** Returns the rows of each group: row, number of ops, and index of the first and last op. */
function groupRows(m) {
  const { parent, count } = m.group, { start, items } = m.inRow;
  const forEachOp = (act) => {
    const at = new Int32Array(count).fill(-1);
    for (let row = 0; row < m.rows; row++) {
      for (let i = start[row]; i < start[row + 1]; i++) {
        for (let group = m.ops.group[items[i]]; group >= 0; group = parent[group]) {
          act(group, row, i, at[group] !== row);
          at[group] = row;
        }
      }
    }
  };
  const counts = new Int32Array(count + 1);
  forEachOp((group, row, i, first) => { counts[group + 1] += first; });
  for (let group = 0; group < count; group++) counts[group + 1] += counts[group];
  const rows = { start: counts, row: new Int32Array(counts[count]), ops: new Int32Array(counts[count]), first: new Int32Array(counts[count]), last: new Int32Array(counts[count]) };
  const next = counts.slice();
  forEachOp((group, row, i, first) => {
    if (first) {
      rows.row[next[group]] = row;
      rows.first[next[group]++] = i;
    }
    rows.ops[next[group] - 1]++;
    rows.last[next[group] - 1] = i;
  });
  return rows;
}

const leftOf = (m, i) => m.x[m.inRow.items[i]] - m.ops.width[m.inRow.items[i]] / 2;
const rightOf = (m, i) => m.x[m.inRow.items[i]] + m.ops.width[m.inRow.items[i]] / 2;

/** Returns true if no other op is between `left` and `right` in a row of the group; `k` indexes `rows`. */
function free(m, rows, k, left, right) {
  const { start } = m.inRow, row = rows.row[k], first = rows.first[k], last = rows.last[k];
  if (last - first + 1 !== rows.ops[k]) return false;
  if (first > start[row] && rightOf(m, first - 1) > left) return false;
  return last + 1 >= start[row + 1] || leftOf(m, last + 1) >= right;
}

/** Returns true if no op is between `left` and `right` in a row. */
function empty(m, row, left, right) {
  const { start, items } = m.inRow, end = start[row + 1];
  let low = start[row], high = end;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (m.x[items[middle]] + m.ops.width[items[middle]] / 2 <= left) low = middle + 1;
    else high = middle;
  }
  return low >= end || leftOf(m, low) >= right;
}

function splitFrame(m, rows, from, to, { top, bottom, left, right }) {
  if (from === to) return [];
  let rectangular = bottom - top < 2 * (to - from) + MAX_BLOCK_ROWS;
  for (let row = top, k = from; rectangular && row <= bottom; row++) {
    if (rows.row[k] === row) rectangular = free(m, rows, k++, left, right);
    else rectangular = empty(m, row, left, right);
  }
  if (rectangular) return [{ top, bottom, blocks: [{ top, bottom, left, right }] }];
  const parts = [];
  let block = null;
  for (let k = from; k < to; k++) {
    if (block && widenBlock(m, rows, block, k)) continue;
    const row = rows.row[k], start = leftOf(m, rows.first[k]), end = rightOf(m, rows.last[k]);
    const touching = block && row === block.bottom + 1 && start < block.right && end > block.left;
    block = { from: k, top: row, bottom: row, left: start, right: end };
    if (touching) parts[parts.length - 1].push(block);
    else parts.push([block]);
  }
  return parts.map((blocks) => ({ top: blocks[0].top, bottom: blocks[blocks.length - 1].bottom, blocks }));
}

/** Extends a block to the group's next row and to its width, unless it would contain other ops. */
function widenBlock(m, rows, block, k) {
  const row = rows.row[k], left = Math.min(block.left, leftOf(m, rows.first[k])), right = Math.max(block.right, rightOf(m, rows.last[k]));
  if (row - block.top > MAX_BLOCK_ROWS || !free(m, rows, k, left, right)) return false;
  for (let current = block.bottom + 1; current < row; current++) if (!empty(m, current, left, right)) return false;
  if (left < block.left || right > block.right) {
    for (let current = block.top, i = block.from; current <= block.bottom; current++) {
      if (!(rows.row[i] === current ? free(m, rows, i++, left, right) : empty(m, current, left, right))) return false;
    }
  }
  Object.assign(block, { bottom: row, left, right });
  return true;
}

/** Computes the stacked frame labels above each row, and the position of each part's label. */
function reserveLabels(m, s) {
  const { parent, count } = m.group, lifts = new Map(), drops = new Map();
  s.strip = new Uint8Array(m.rows);
  s.lift = Array.from({ length: count }, () => []);
  s.drop = Array.from({ length: count }, () => []);
  const place = (depths, group, row) => {
    const deep = 1 + (depths.get(group * m.rows + row) || 0), outer = parent[group] * m.rows + row;
    if (parent[group] >= 0) depths.set(outer, Math.max(depths.get(outer) || 0, deep));
    return deep;
  };
  for (let group = count - 1; group >= 0; group--) {
    if (s.hidingGroup[group] >= 0) continue;
    for (const { top, bottom } of m.frameParts[group]) {
      s.lift[group].push(place(lifts, group, top));
      s.drop[group].push(place(drops, group, bottom));
      s.strip[top] = Math.max(s.strip[top], s.lift[group][s.lift[group].length - 1]);
    }
  }
}

/** Returns the visible parts of frames with their corners and label positions. */
function framesIn(app, area) {
  const { m, s, view } = app, frames = [];
  for (let group = 0; group < m.group.count; group++) {
    const extent = m.groupExtents[group];
    if (s.hidingGroup[group] >= 0 || extent.bottom < area.first || extent.top > area.last) continue;
    if (extent.right < area.left || extent.left > area.right) continue;
    const pad = 6 + 6 * extent.deep;
    m.frameParts[group].forEach(({ top, bottom, blocks }, i) => {
      if (bottom < area.first || top > area.last) return;
      const y = s.boxTop(top) - LABEL_HEIGHT * s.lift[group][i], end = s.top[bottom + 1] + 2 + 4 * s.drop[group][i];
      if ((end - y) * view.k < 6) return;
      const left = blocks[0].left - pad, right = blocks[0].right + pad;
      frames.push({ group, x: left, y, right, bottom: end, corners: cornersOf(s, blocks, pad, y, end) });
    });
  }
  return frames;
}

/** Returns the corners of a part: down the right of its blocks, up their left. */
function cornersOf(s, blocks, pad, y, end) {
  const down = [], up = [];
  blocks.forEach((block, i) => {
    const above = i ? s.top[block.top] + 3 : y, below = i < blocks.length - 1 ? s.top[block.bottom + 1] + 3 : end;
    down.push([block.right + pad, above], [block.right + pad, below]);
    up.push([block.left - pad, above], [block.left - pad, below]);
  });
  return [...down, ...up.reverse()];
}

function drawFrames(app, frames) {
  const { ctx, m, view, color } = app;
  ctx.strokeStyle = color.line;
  ctx.fillStyle = color.frame;
  ctx.lineWidth = 1 / view.k;
  for (const frame of frames) {
    ctx.beginPath();
    for (const [x, y] of frame.corners) ctx.lineTo(x, y);
    ctx.closePath();
    ctx.fill();
    ctx.setLineDash(m.group.graph[frame.group] ? [6, 4] : []);
    ctx.stroke();
  }
  ctx.setLineDash([]);
}

/** Draws frame labels on top; they stay visible while most of their frame is. */
function drawLabels(app, area, frames) {
  const { ctx, m, color } = app;
  setFont(app, "name");
  ctx.textAlign = "left";
  for (const frame of frames) {
    const label = fitText(app, ctx, `− ${m.text(m.group.label[frame.group])}`, Math.max(60, frame.right - frame.x - 8));
    const pinned = area.top + 2 + LABEL_HEIGHT * m.groupExtents[frame.group].level, sticks = frame.bottom - pinned > 2 * (BOX_HEIGHT + ROW_GAP);
    const y = sticks ? Math.max(frame.y, pinned) : frame.y;
    const right = frame.x + ctx.measureText(label).width + 8;
    ctx.fillStyle = color.back;
    ctx.globalAlpha = 0.85;
    ctx.fillRect(frame.x + 1, y + 1, right - frame.x - 2, LABEL_HEIGHT - 3);
    ctx.globalAlpha = 1;
    ctx.fillStyle = color.soft;
    ctx.fillText(label, frame.x + 4, y + 13);
    app.hits.push({ x: frame.x, y, right, bottom: y + LABEL_HEIGHT, frame: frame.group });
  }
}
