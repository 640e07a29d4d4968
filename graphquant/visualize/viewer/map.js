// The small map.

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
    const fill = app.fills[m.two ? SECOND : FIRST + SECOND][op];
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
