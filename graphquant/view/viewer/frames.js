// Frames: around the ops of a name scope or a nested graph, and around no others.

const TALL = 64; // rows of a block of a frame that is no rectangle, at most

/**
 * For each group the parts of its frame. A part is a rectangle, or where that would hold ops of others, several blocks
 * of rows one below the other; where others stand between its ops, it is in several parts.
 */
function outlines(m) {
  const { parent, count } = m.group, own = Array.from({ length: count }, () => new Map());
  for (let op = 0; op < m.count; op++) {
    const half = m.ops.width[op] / 2, left = m.x[op] - half, right = m.x[op] + half, row = m.layer[op];
    for (let group = m.ops.group[op]; group >= 0; group = parent[group]) {
      const here = own[group].get(row);
      if (!here) own[group].set(row, { left, right, ops: 1 });
      else Object.assign(here, { left: Math.min(here.left, left), right: Math.max(here.right, right), ops: here.ops + 1 });
    }
  }
  return own.map((rows, group) => (rows.size ? partsOf(m, rows, m.groupOps[group]) : []));
}

/** How many ops of a row reach into a stretch. */
function within(m, row, left, right) {
  const items = m.inRow.of(row);
  let found = 0;
  for (let i = firstFrom(m.x, items, left - WIDEST / 2); i < items.length && m.x[items[i]] < right + WIDEST / 2; i++) {
    const half = m.ops.width[items[i]] / 2;
    if (m.x[items[i]] + half > left && m.x[items[i]] - half < right) found++;
  }
  return found;
}

function partsOf(m, rows, { top, bottom, left, right }) {
  const free = (row, from, to) => within(m, row, from, to) === (rows.has(row) ? rows.get(row).ops : 0);
  let whole = bottom - top < 2 * rows.size + TALL;
  for (let row = top; whole && row <= bottom; row++) whole = free(row, left, right);
  if (whole) return [{ top, bottom, blocks: [{ top, bottom, left, right }] }];
  const parts = [];
  let block = null;
  for (const [row, one] of [...rows].sort((a, b) => a[0] - b[0])) {
    const joined = block && { top: block.top, bottom: row, left: Math.min(block.left, one.left), right: Math.max(block.right, one.right) };
    const near = block && row - block.bottom <= TALL, grown = joined && (joined.left < block.left || joined.right > block.right);
    let fits = near && row - block.top <= TALL;
    for (let here = grown ? block.top : near ? block.bottom + 1 : row; fits && here <= row; here++) fits = free(here, joined.left, joined.right);
    if (fits) Object.assign(block, joined);
    else {
      const touching = block && row === block.bottom + 1 && one.left < block.right && one.right > block.left;
      block = { top: row, bottom: row, left: one.left, right: one.right };
      if (touching) parts[parts.length - 1].blocks.push(block);
      else parts.push({ blocks: [block] });
    }
  }
  return parts.map(({ blocks }) => ({ top: blocks[0].top, bottom: blocks[blocks.length - 1].bottom, blocks }));
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
