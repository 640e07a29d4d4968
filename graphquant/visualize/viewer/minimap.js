// Minimap.

/** Draws all ops once, at least one pixel each; `drawMap` adds the viewport. */
function makeMap(app) {
  const { m, s, map, color } = app, ratio = window.devicePixelRatio || 1;
  const width = map.clientWidth, height = map.clientHeight;
  app.mapped = null;
  if (!width || !height) return; // hidden in print and on small screens
  map.width = Math.round(width * ratio);
  map.height = Math.round(height * ratio);
  const picture = new OffscreenCanvas(map.width, map.height), ctx = picture.getContext("2d");
  const kx = (map.width - 8) / Math.max(m.width, 1), ky = (map.height - 8) / Math.max(s.height, 1);
  const scaleX = Math.min(kx, ky * 6), scaleY = Math.min(ky, kx * 6);
  app.mapped = { picture, kx: scaleX / ratio, ky: scaleY / ratio, x: (width - (m.width * scaleX) / ratio) / 2, y: (height - (s.height * scaleY) / ratio) / 2 };
  const left = app.mapped.x * ratio, top = app.mapped.y * ratio;
  let before = -1, row = -1;
  for (let op = 0; op < m.count; op++) {
    if (s.hiddenBy(op) >= 0) continue;
    const x = Math.round(left + (s.x[op] - m.ops.width[op] / 2) * scaleX), y = Math.round(top + s.boxTop(m.layer[op]) * scaleY);
    if (x === before && y === row) continue;
    before = x;
    row = y;
    const fill = app.fills[m.twoSides ? SECOND : FIRST + SECOND][op];
    ctx.fillStyle = app.matched ? (app.matched[op] ? color.accent : color.line) : fill === color.box ? color.wire : fill;
    ctx.fillRect(x, y, Math.max(1, m.ops.width[op] * scaleX), Math.max(1, BOX_HEIGHT * scaleY));
  }
  for (const box of s.boxes.values()) {
    ctx.fillStyle = color.soft;
    ctx.fillRect(left + (box.x - box.width / 2) * scaleX, top + s.boxTop(box.row) * scaleY, Math.max(2, box.width * scaleX), Math.max(2, BOX_HEIGHT * scaleY));
  }
}

function drawMap(app, area) {
  if (!app.mapped) return;
  const { map, mapped, color } = app, ctx = map.getContext("2d"), ratio = window.devicePixelRatio || 1;
  ctx.setTransform(1, 0, 0, 1, 0, 0);
  ctx.clearRect(0, 0, map.width, map.height);
  ctx.drawImage(mapped.picture, 0, 0);
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.strokeStyle = color.accent;
  ctx.lineWidth = 1.5;
  const clamp = (value, limit) => Math.min(Math.max(value, 1), limit - 1);
  const x0 = clamp(mapped.x + area.left * mapped.kx, map.clientWidth), x1 = clamp(mapped.x + area.right * mapped.kx, map.clientWidth);
  const y0 = clamp(mapped.y + area.top * mapped.ky, map.clientHeight), y1 = clamp(mapped.y + area.bottom * mapped.ky, map.clientHeight);
  ctx.strokeRect(x0, y0, Math.max(3, x1 - x0), Math.max(3, y1 - y0));
}
