// View and input events.

/** Rebuilds the scene after folding. */
function rebuild(app) {
  app.s = scene(app.m, app.collapsed, app.unfolded);
  app.mapLater();
  app.redraw();
}

function centerOn(app, op) {
  const { s, m, view, canvas } = app;
  view.k = Math.max(view.k, READABLE_ZOOM);
  const covered = app.results.hidden ? 0 : app.results.offsetWidth;
  view.x = (canvas.clientWidth + covered) / 2 - s.x[op] * view.k;
  view.y = canvas.clientHeight / 2 - (s.boxTop(m.layer[op]) + BOX_HEIGHT / 2) * view.k;
}

/** Returns the position of an op's box, or of the box of the group that hides it, as x and row. */
function positionOf(app, op) {
  const { s, m } = app, group = s.hiddenBy(op);
  return group < 0 ? { x: s.x[op], row: m.layer[op] } : s.boxes.get(group);
}

/** Returns the first op in a group or in one of its inner groups; -1 without any. */
function firstOpIn(m, group) {
  return m.ops.group.findIndex((inner) => {
    while (inner > group) inner = m.group.parent[inner]; // a parent precedes its children
    return inner === group;
  });
}

/** Returns the op of the selection, or else the op that is nearest to the center of the view. */
function anchorOp(app) {
  const { s, m, view, canvas, selected } = app;
  const op = !selected ? -1 : selected.kind === "group" ? firstOpIn(m, selected.group) : targetOp(app, selected);
  if (op >= 0) return op;
  const x = (canvas.clientWidth / 2 - view.x) / view.k, y = (canvas.clientHeight / 2 - view.y) / view.k;
  let nearest = -1, least = Infinity;
  for (let candidate = 0; candidate < m.count; candidate++) {
    const box = positionOf(app, candidate), distance = Math.hypot(box.x - x, s.boxTop(box.row) - y);
    if (distance < least) [nearest, least] = [candidate, distance];
  }
  return nearest;
}

/** Moves the view so that an op, or the group that hides it, is in view. */
function reveal(app, op) {
  const { s, view, canvas } = app;
  if (op < 0) return fitView(app, false);
  const box = positionOf(app, op);
  const centerY = s.boxTop(box.row) + BOX_HEIGHT / 2, x = box.x * view.k + view.x, y = centerY * view.k + view.y;
  const margin = BOX_HEIGHT * view.k; // so that no edge of the box is cut off
  if (x > margin && x < canvas.clientWidth - margin && y > margin && y < canvas.clientHeight - margin) return;
  view.x = canvas.clientWidth / 2 - box.x * view.k;
  view.y = canvas.clientHeight / 2 - centerY * view.k;
  app.redraw();
}

/** Collapses all groups and keeps the selection, or what was in the center, in view. */
function collapseAll(app) {
  const op = anchorOp(app);
  app.m.group.parent.forEach((parent, group) => parent < 0 && app.collapsed.add(group));
  rebuild(app);
  reveal(app, op);
}

/** Expands all groups, likewise. */
function expandAll(app) {
  const op = anchorOp(app);
  app.collapsed.clear();
  rebuild(app);
  reveal(app, op);
}

function setCollapsed(app, group, collapsed) {
  if (collapsed) app.collapsed.add(group);
  else app.collapsed.delete(group);
  const before = app.s.boxTop(app.m.groupExtents[group].top);
  rebuild(app);
  app.view.y += (before - app.s.boxTop(app.m.groupExtents[group].top)) * app.view.k;
  reveal(app, firstOpIn(app.m, group));
  select(app, { kind: "group", group }, { link: false });
}

/** Shows one or both sides of a page of two models. */
function showSides(app, sides) {
  if (!app.m.twoSides) return;
  app.sides = sides;
  for (const pane of app.panes) pane.box.hidden = pane.canvas.hidden = !(pane.side & sides);
  app.canvas = app.panes.find((pane) => !pane.canvas.hidden).canvas;
  document.getElementById("by-side").value = `${sides}`;
  app.redraw();
}

function showControls(app, on) {
  app.controls = on && app.m.control.source.length > 0;
  const button = document.getElementById("controls");
  if (button) button.setAttribute("aria-pressed", `${app.controls}`);
  app.redraw();
}

/** Unfolds or folds one annotation, or all. */
function toggleUnfold(app, annotation = -1) {
  if (annotation >= 0) app.unfolded[app.unfolded.has(annotation) ? "delete" : "add"](annotation);
  else if (app.unfolded.size) app.unfolded.clear();
  else app.m.annotations.forEach((_, annotation) => app.unfolded.add(annotation));
  const op = app.selected ? targetOp(app, app.selected) : -1, before = op < 0 ? 0 : app.s.boxTop(app.m.layer[op]);
  rebuild(app);
  if (op >= 0) app.view.y += (before - app.s.boxTop(app.m.layer[op])) * app.view.k;
  if (app.selected) select(app, app.selected, { link: false });
}

function zoom(app, factor, x = app.canvas.clientWidth / 2, y = app.canvas.clientHeight / 2) {
  const { view } = app, k = Math.min(4, Math.max(0.002, view.k * factor));
  view.x = x - ((x - view.x) * k) / view.k;
  view.y = y - ((y - view.y) * k) / view.k;
  view.k = k;
  app.redraw();
}

/** Shows the whole model, or its start at a readable zoom: the model's first input that is read, with its neighbors. */
function fitView(app, all) {
  const { m, s, view, canvas } = app, width = canvas.clientWidth, height = canvas.clientHeight;
  const k = Math.min(1, (width - 40) / Math.max(m.width, 1), (height - 40) / Math.max(s.height, 1));
  view.k = Math.max(k, all ? 0.002 : READABLE_ZOOM);
  view.x = (width - m.width * view.k) / 2;
  view.y = Math.max(10, (height - s.height * view.k) / 2);
  if (view.k > k && m.count) {
    const isInput = (op) => m.kind(op) === "input" && !m.ops.graph[op] && m.outgoing.of(op).length && s.hiddenBy(op) < 0;
    const input = m.layer.findIndex((_, op) => isInput(op)), row = input < 0 ? 0 : m.layer[input];
    const starts = Array.from(m.inRow.of(row)).filter(input < 0 ? (op) => s.hiddenBy(op) < 0 : isInput), ends = [starts[0], starts[starts.length - 1]];
    const fits = starts.length && (s.x[ends[1]] - s.x[ends[0]] + MAX_BOX) * view.k < width;
    const middle = fits ? (s.x[ends[0]] + s.x[ends[1]]) / 2 : input >= 0 ? s.x[input] : starts.length ? s.x[starts[0]] : m.width / 2;
    const start = (room, size, at) => Math.min(20, Math.max(room - size * view.k - 20, at)); // no empty margin
    if (m.width * view.k > width - 40) view.x = start(width, m.width, width / 2 - middle * view.k);
    view.y = start(height, s.height, 10 - s.top[row] * view.k);
  }
  app.redraw();
}

/** Keeps the middle of the view after a resize. A page that had no size, in a hidden cell or frame, starts only now. */
function onResize(app) {
  const { view, canvas } = app, [width, height] = app.size;
  app.size = [canvas.clientWidth, canvas.clientHeight];
  if (width && height) view.x += (canvas.clientWidth - width) / 2;
  else if (app.selected && targetOp(app, app.selected) >= 0) centerOn(app, targetOp(app, app.selected));
  else fitView(app, false);
  app.mapLater();
  app.redraw();
}

/** Moves the selection to a producer, a reader, or a neighbor in the row. */
function moveSelection(app, key) {
  const { m } = app, op = app.selected ? targetOp(app, app.selected) : -1;
  const { view } = app;
  if (op < 0) {
    view.x += { ArrowLeft: 80, ArrowRight: -80 }[key] || 0;
    view.y += { ArrowUp: 80, ArrowDown: -80 }[key] || 0;
    return app.redraw();
  }
  const row = Array.from(m.inRow.of(m.layer[op])), at = row.indexOf(op);
  const next = {
    ArrowUp: () => Array.from(m.incoming.of(op), (wire) => m.wire.source[wire])[0],
    ArrowDown: () => Array.from(m.outgoing.of(op), (wire) => m.wire.target[wire])[0],
    ArrowLeft: () => row[at - 1],
    ArrowRight: () => row[at + 1],
  }[key]();
  if (next !== undefined) select(app, { kind: "op", op: next }, { move: true });
}

function onKey(app, event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape") {
    for (const field of app.bar.querySelectorAll("input,select.filter")) field.value = "";
    app.filters = { text: "", state: "", rule: "", kind: "", sqnr: null };
    search(app);
    select(app, null);
    app.canvas.focus();
    return;
  }
  if (typing) {
    const move = { Enter: event.shiftKey ? -1 : 1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.target === app.query && move) {
      event.preventDefault();
      goToMatch(app, app.at + move);
    }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {
    "/": () => app.query.focus(),
    n: () => (app.matched ? goToMatch(app, app.at + 1) : goToEntry(app, app.listAt + 1)),
    p: () => (app.matched ? goToMatch(app, app.at - 1) : goToEntry(app, app.listAt - 1)),
    h: () => {
      const all = colorings(app.m).map(([by]) => by);
      colorBy(app, all[(all.indexOf(app.by) + 1) % all.length]);
    },
    v: () => showSides(app, { 3: FIRST, [FIRST]: SECOND, [SECOND]: FIRST + SECOND }[app.sides]),
    d: () => showControls(app, !app.controls),
    "+": () => zoom(app, 1.3),
    "=": () => zoom(app, 1.3),
    "-": () => zoom(app, 1 / 1.3),
    0: () => fitView(app, true),
    1: () => zoom(app, 1 / app.view.k),
    u: () => toggleUnfold(app, app.selected && app.selected.kind === "annotation" ? app.selected.annotation : -1),
    c: () => {
      const group = app.selected && app.selected.kind === "group" ? app.selected.group : app.selected ? app.m.ops.group[targetOp(app, app.selected)] : -1;
      if (group >= 0) setCollapsed(app, group, !app.collapsed.has(group));
    },
    e: () => expandAll(app),
    "?": () => select(app, null),
  };
  const canvas = app.panes.some((pane) => pane.canvas === event.target);
  const act = event.key.startsWith("Arrow") ? () => moveSelection(app, event.key) : keys[event.key];
  if (!act || (event.key.startsWith("Arrow") && event.target !== document.body && !canvas)) return;
  event.preventDefault();
  act();
}

/** Pointer events: drag to move, pinch to zoom, click to select, double-click to expand or collapse a group. */
function onPointer(app) {
  for (const pane of app.panes) onPane(app, pane);
  const { map, view } = app;
  const jump = (event) => {
    if (!event.buttons || !app.mapped) return;
    view.x = app.canvas.clientWidth / 2 - ((event.offsetX - app.mapped.x) / app.mapped.kx) * view.k;
    view.y = app.canvas.clientHeight / 2 - ((event.offsetY - app.mapped.y) / app.mapped.ky) * view.k;
    app.redraw();
  };
  map.addEventListener("pointerdown", jump);
  map.addEventListener("pointermove", jump);
}

function onPane(app, pane) {
  const { view } = app, { canvas } = pane, down = new Map();
  let moved = 0;
  const positionOf = (event) => ({ x: event.offsetX, y: event.offsetY });
  const targetAt = (event) => hitTest(app, pane, (event.offsetX - view.x) / view.k, (event.offsetY - view.y) / view.k);
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, positionOf(event));
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId), now = positionOf(event);
    if (!before) {
      const target = targetAt(event);
      canvas.style.cursor = target ? "pointer" : "grab";
      canvas.title = target ? fullName(app, target) : "";
      return;
    }
    const other = [...down].find(([id]) => id !== event.pointerId);
    if (other) {
      const distance = (point) => Math.hypot(point.x - other[1].x, point.y - other[1].y) || 1;
      zoom(app, distance(now) / distance(before), other[1].x, other[1].y);
    } else {
      view.x += now.x - before.x;
      view.y += now.y - before.y;
    }
    moved += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
    down.set(event.pointerId, now);
    app.redraw();
  });
  const up = (event) => {
    const wasDown = down.delete(event.pointerId);
    if (wasDown && event.type === "pointerup" && moved < 5) select(app, targetAt(event));
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("dblclick", (event) => {
    const target = targetAt(event);
    if (target && target.kind === "group") setCollapsed(app, target.group, !app.collapsed.has(target.group));
    if (target && target.kind === "annotation") toggleUnfold(app, target.annotation);
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const unit = event.deltaMode ? 20 : 1;
    if (event.ctrlKey || event.metaKey) return zoom(app, Math.exp(-event.deltaY * unit * 0.004), event.offsetX, event.offsetY);
    view.x -= (event.shiftKey ? event.deltaY : event.deltaX) * unit;
    view.y -= (event.shiftKey ? 0 : event.deltaY) * unit;
    app.redraw();
  }, { passive: false });
}

/** Follows a link `#op=NAME` to an op or tensor. */
function followLink(app) {
  const link = /^#op=(.*)$/s.exec(location.hash);
  if (!link || location.hash === app.linked) return;
  let name = link[1];
  try {
    name = decodeURIComponent(name);
  } catch {
    // a % that is not an escape belongs to the name
  }
  const { m } = app;
  app.linked = location.hash;
  for (let op = 0; op < m.count; op++) if (m.full(op) === name) return select(app, { kind: "op", op }, { move: true, link: false });
  const annotation = m.annotations.findIndex((annotation) => annotation.tensor === name || annotation.name === name || (annotation.ops || []).some(([, op]) => op === name));
  if (annotation >= 0) return select(app, { kind: "annotation", annotation }, { move: true, link: false });
  app.panel.replaceChildren(el("h2", {}, "Not found"), el("p", { className: "warn" }, `Nothing has the name ${name}.`));
}
