// Frames: around the ops of a name scope or a nested graph, and around no others.

const TALL = 24; // rows of a block of a frame that is no rectangle, at most

/**
 * For each group the parts of its frame. A part is a rectangle, or where that would hold ops of others, several blocks
 * of rows one below the other; where others stand between its ops, it is in several parts.
 */
function outlines(m) {
  const rows = groupRows(m);
  return m.groupOps.map((one, group) => partsOf(m, rows, rows.start[group], rows.start[group + 1], one));
}

/** The rows in which each group has ops: the row, how many, and where the first and the last stand among its items. */
function groupRows(m) {
  const { parent, count } = m.group, { start, items } = m.inRow;
  const each = (act) => {
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
  const found = new Int32Array(count + 1);
  each((group, row, i, first) => { found[group + 1] += first; });
  for (let group = 0; group < count; group++) found[group + 1] += found[group];
  const rows = { start: found, row: new Int32Array(found[count]), ops: new Int32Array(found[count]), first: new Int32Array(found[count]), last: new Int32Array(found[count]) };
  const next = found.slice();
  each((group, row, i, first) => {
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

/** Whether ops of others are out of a stretch of a row in which the group has some; `k` is its number in `rows`. */
function free(m, rows, k, left, right) {
  const { start } = m.inRow, row = rows.row[k], first = rows.first[k], last = rows.last[k];
  if (last - first + 1 !== rows.ops[k]) return false;
  if (first > start[row] && rightOf(m, first - 1) > left) return false;
  return last + 1 >= start[row + 1] || leftOf(m, last + 1) >= right;
}

/** Whether no op at all is in a stretch of a row. */
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

function partsOf(m, rows, from, to, { top, bottom, left, right }) {
  if (from === to) return [];
  let whole = bottom - top < 2 * (to - from) + TALL;
  for (let row = top, k = from; whole && row <= bottom; row++) {
    if (rows.row[k] === row) whole = free(m, rows, k++, left, right);
    else whole = empty(m, row, left, right);
  }
  if (whole) return [{ top, bottom, blocks: [{ top, bottom, left, right }] }];
  const parts = [];
  let block = null;
  for (let k = from; k < to; k++) {
    if (block && widened(m, rows, block, k)) continue;
    const row = rows.row[k], one = leftOf(m, rows.first[k]), other = rightOf(m, rows.last[k]);
    const touching = block && row === block.bottom + 1 && one < block.right && other > block.left;
    block = { from: k, top: row, bottom: row, left: one, right: other };
    if (touching) parts[parts.length - 1].push(block);
    else parts.push([block]);
  }
  return parts.map((blocks) => ({ top: blocks[0].top, bottom: blocks[blocks.length - 1].bottom, blocks }));
}

/** Makes a block reach to the next row of its group and as wide as that, if that takes in nothing of others. */
function widened(m, rows, block, k) {
  const row = rows.row[k], left = Math.min(block.left, leftOf(m, rows.first[k])), right = Math.max(block.right, rightOf(m, rows.last[k]));
  if (row - block.top > TALL || !free(m, rows, k, left, right)) return false;
  for (let here = block.bottom + 1; here < row; here++) if (!empty(m, here, left, right)) return false;
  if (left < block.left || right > block.right) {
    for (let here = block.top, i = block.from; here <= block.bottom; here++) {
      if (!(rows.row[i] === here ? free(m, rows, i++, left, right) : empty(m, here, left, right))) return false;
    }
  }
  Object.assign(block, { bottom: row, left, right });
  return true;
}

/** How many labels of frames stand one above the other over each row, and which place each part's has. */
function labelRoom(m, s) {
  const { parent, count } = m.group, lifts = new Map(), drops = new Map();
  s.strip = new Uint8Array(m.rows);
  s.lift = Array.from({ length: count }, () => []);
  s.drop = Array.from({ length: count }, () => []);
  const more = (known, group, row) => {
    const deep = 1 + (known.get(group * m.rows + row) || 0), outer = parent[group] * m.rows + row;
    if (parent[group] >= 0) known.set(outer, Math.max(known.get(outer) || 0, deep));
    return deep;
  };
  for (let group = count - 1; group >= 0; group--) {
    if (s.hiding[group] >= 0) continue;
    for (const { top, bottom } of m.parts[group]) {
      s.lift[group].push(more(lifts, group, top));
      s.drop[group].push(more(drops, group, bottom));
      s.strip[top] = Math.max(s.strip[top], s.lift[group][s.lift[group].length - 1]);
    }
  }
}

/** The parts of frames that are in view, with the corners of each and where its label belongs. */
function framesIn(app, area) {
  const { m, s, view } = app, found = [];
  for (let group = 0; group < m.group.count; group++) {
    const one = m.groupOps[group];
    if (s.hiding[group] >= 0 || one.bottom < area.first || one.top > area.last) continue;
    if (one.right < area.left || one.left > area.right) continue;
    const pad = 6 + 6 * one.deep;
    m.parts[group].forEach(({ top, bottom, blocks }, i) => {
      if (bottom < area.first || top > area.last) return;
      const y = s.boxTop(top) - LABEL * s.lift[group][i], end = s.top[bottom + 1] + 2 + 4 * s.drop[group][i];
      if ((end - y) * view.k < 6) return;
      const left = blocks[0].left - pad, right = blocks[0].right + pad;
      found.push({ group, x: left, y, right, bottom: end, corners: cornersOf(s, blocks, pad, y, end) });
    });
  }
  return found;
}

/** The corners of a part: down at the right of its blocks, and up at their left. */
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
  const { ctx, m, view, colour } = app;
  ctx.strokeStyle = colour.line;
  ctx.fillStyle = colour.frame;
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

/** The names of frames, over all else; they stay in view as long as most of their frame does. */
function drawLabels(app, area, frames) {
  const { ctx, m, colour } = app;
  font(app, "name");
  ctx.textAlign = "left";
  for (const frame of frames) {
    const label = fitted(app, ctx, `− ${m.text(m.group.label[frame.group])}`, Math.max(60, frame.right - frame.x - 8));
    const under = area.top + 2 + LABEL * m.groupOps[frame.group].level, stays = frame.bottom - under > 2 * (BOX + GAP);
    const y = stays ? Math.max(frame.y, under) : frame.y;
    const right = frame.x + ctx.measureText(label).width + 8;
    ctx.fillStyle = colour.back;
    ctx.globalAlpha = 0.85;
    ctx.fillRect(frame.x + 1, y + 1, right - frame.x - 2, LABEL - 3);
    ctx.globalAlpha = 1;
    ctx.fillStyle = colour.soft;
    ctx.fillText(label, frame.x + 4, y + 11);
    app.hits.push({ x: frame.x, y, right, bottom: y + LABEL, frame: frame.group });
  }
}
