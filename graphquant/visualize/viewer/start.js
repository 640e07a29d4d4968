// Toolbar and startup.

const WORST_LINKS = 5, MAX_LINK = 36, NARROW = "(max-width:50rem)";

function filterSelect(app, key, title, entries) {
  const set = (event) => {
    app.filters[key] = event.target.value;
    search(app);
  };
  return el("select", { title, "aria-label": title, className: "filter", id: `by-${key}`, onchange: set }, el("option", { value: "" }, title), ...entries.map(([value, text]) => el("option", { value }, text)));
}

/** Builds the toolbar: name, search, filters, buttons. */
function bar(app) {
  const { m } = app, countNames = (names) => {
    const counts = new Map();
    for (const name of names) if (name) counts.set(name, (counts.get(name) || 0) + 1);
    return [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([name, number]) => [name, `${name} (${number})`]);
  };
  const setFilter = (key, value) => {
    app.filters[key] = value;
    search(app);
  };
  app.query = el("input", { type: "search", placeholder: "Search ops and tensors ( / )", "aria-label": "Search ops and tensors", id: "query", oninput: (event) => setFilter("text", event.target.value) });
  const button = (text, title, act) => el("button", { title, "aria-label": title, onclick: act }, text);
  const hasFigures = m.heat || m.annotations.some((annotation) => annotation.sqnr !== undefined), worse = m.heat ? "worse than" : "SQNR below";
  const modeSelect = (id, title, all, act) => el("select", { title, "aria-label": title, id, onchange: (event) => act(event.target.value) }, ...all.map(([value, text]) => el("option", { value }, text)));
  const colors = colorings(m);
  return el("header", {},
    m.twoSides ? "" : el("strong", { title: m.title }, m.title),
    colors.length > 1 ? modeSelect("by-color", "Colors (h)", colors, (value) => colorBy(app, value)) : "",
    m.twoSides ? modeSelect("by-side", "Sides (v)", [["3", "both sides"], ["1", m.sides.titles[0]], ["2", m.sides.titles[1]]], (value) => showSides(app, +value)) : "",
    app.query,
    filterSelect(app, "state", "all ops", [["unquantized", "unquantized"], ["reason", "float, with a reason"], ["quantized", "quantized"]]),
    filterSelect(app, "rule", "any rule", countNames(m.annotations.map((annotation) => annotation.rule))),
    filterSelect(app, "kind", "any kind", countNames(m.ops.kind.map((kind) => m.text(kind)))),
    hasFigures ? el("input", { type: "number", step: "1", placeholder: `${worse} dB`, "aria-label": `${worse} dB`, id: "by-sqnr", oninput: (event) => setFilter("sqnr", event.target.value === "" ? null : +event.target.value) }) : "",
    m.control.source.length ? el("button", { id: "controls", title: "Control edges (d)", "aria-label": "Control edges", "aria-pressed": "false", onclick: () => showControls(app, !app.controls) }, "control") : "",
    button("fold", "Unfold or fold all annotations (u)", () => toggleUnfold(app)),
    button("collapse", "Collapse all groups", () => collapseAll(app)),
    button("expand", "Expand all groups (e)", () => expandAll(app)),
    button("−", "Zoom out (−)", () => zoom(app, 1 / 1.3)),
    button("+", "Zoom in (+)", () => zoom(app, 1.3)),
    button("all", "Show all (0)", () => fitView(app, true)),
    button("◐", "Light or dark", () => setTheme(app, isDark() ? "light" : "dark")),
    button("?", "About this model and keys (?)", () => select(app, null)),
  );
}

/** Returns the name of an annotation's tensor without that of its graph. */
function nameInGraph(m, annotation) {
  const [reader] = m.readers[annotation];
  if (!reader) return m.annotations[annotation].tensor;
  if (reader.constant !== undefined) return m.text(m.constant.name[reader.constant]);
  if (reader.wire === undefined) return m.name(reader.op);
  const port = m.wire.port[reader.wire];
  return m.name(m.wire.source[reader.wire]) + (port ? `:${port}` : "");
}

/** Returns names without the scopes that all of them begin with, and without the begin of long ones. */
function shortNames(names) {
  const paths = names.map((name) => name.replace(/^\//, "").split("/"));
  while (paths.length > 1 && paths.every((path) => path.length > 1 && path[0] === paths[0][0])) paths.forEach((path) => path.shift());
  return paths.map((path) => path.join("/")).map((name) => (name.length > MAX_LINK ? `…${name.slice(-MAX_LINK)}` : name));
}

/** Returns the figures of the result and links to the worst tensors, or "" if there are none. */
function figureStrip(app) {
  const { m } = app, known = m.annotations.map(({ sqnr }, annotation) => [sqnr, annotation]).filter(([sqnr]) => typeof sqnr === "number");
  const worst = known.sort((a, b) => a[0] - b[0]).slice(0, WORST_LINKS);
  if (!m.figures.length && !worst.length) return "";
  const names = shortNames(worst.map(([, annotation]) => nameInGraph(m, annotation)));
  const link = ([sqnr, annotation], i) => el("button", { className: "link", title: m.annotations[annotation].name || m.annotations[annotation].tensor, onclick: () => select(app, { kind: "annotation", annotation }, { move: true }) }, `${names[i]} ${sqnr.toFixed(1)} dB`);
  return el("div", { id: "strip" },
    ...m.figures.map(([label, value]) => el("span", {}, `${label} `, el("b", {}, value))),
    worst.length ? el("span", {}, "worst tensors ", ...worst.flatMap((entry, i) => (i ? [", ", link(entry, i)] : [link(entry, i)]))) : "",
  );
}

/** Updates colors for the current theme, and the fill of each op. */
function colored(app) {
  app.color = palette();
  app.fills = {};
  for (const { side } of app.panes) {
    app.side = side;
    app.fills[side] = Array.from({ length: app.m.count }, (_, op) => boxFill(app, op));
  }
}

const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function setTheme(app, name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  colored(app);
  fillList(app);
  app.panel.replaceChildren(...panelContent(app, app.selected));
  app.mapLater();
  app.redraw();
}

/** Prints the current viewport in the light theme. */
function onPrint(app) {
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    setTheme(app, "light");
    draw(app);
  });
  addEventListener("afterprint", () => setTheme(app, before));
}

/** Creates one side: its canvas, and its title if there are two. */
function createPane(m, side) {
  const title = m.twoSides ? m.sides.titles[side - 1] : "The model's graph";
  const canvas = el("canvas", { id: side === SECOND ? "other" : "graph", tabIndex: 0, role: "application", "aria-label": `${title}; keys are listed under ?` });
  const box = el("div", { className: "pane" }, canvas, m.twoSides ? el("span", { className: "side", title }, title) : "");
  return { side, canvas, box, ctx: canvas.getContext("2d", { alpha: false }), hits: [] };
}

async function start() {
  const m = model(await unpackData());
  const panes = (m.twoSides ? [FIRST, SECOND] : [FIRST + SECOND]).map((side) => createPane(m, side)), canvas = panes[0].canvas;
  const map = el("canvas", { id: "map", "aria-hidden": "true" });
  const app = {
    m, panes, canvas, map, side: panes[0].side, sides: FIRST + SECOND, by: colorings(m)[0][0], column: m.heat ? 0 : null, changed: indexChanges(m), entries: [], listAt: -1, controls: false, fittedTexts: new Map(),
    view: { x: 0, y: 0, k: 1 }, collapsed: new Set(), unfolded: new Set(), selected: null, mapped: null,
    matches: [], at: -1, matched: null, filters: { text: "", state: "", rule: "", kind: "", sqnr: null }, linked: "",
  };
  let waiting = false, mapping = false;
  app.redraw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw(app);
    });
  };
  app.mapLater = () => {
    if (mapping) return;
    mapping = true;
    setTimeout(() => {
      mapping = false;
      makeMap(app);
      app.redraw();
    });
  };
  app.panel = el("aside", { id: "panel", "aria-live": "polite" });
  app.results = el("ol", { id: "results", hidden: true });
  app.list = el("aside", { id: "list", "aria-label": m.changes ? "changes" : "quantized tensors, the worst first", hidden: !m.heat && !m.changes });
  colored(app);
  app.bar = bar(app);
  document.body.append(app.bar, figureStrip(app), el("main", {}, app.list, el("div", { id: "panes", className: m.twoSides ? "two" : "" }, ...panes.map((side) => side.box), app.results, map), app.panel));
  app.s = scene(m, app.collapsed, app.unfolded);
  app.panel.replaceChildren(...aboutModel(app));
  fillList(app);
  showControls(app, m.control.source.length <= MAX_CONTROLS);
  app.size = [canvas.clientWidth, canvas.clientHeight];
  fitView(app, false);
  followLink(app);
  draw(app);
  onPointer(app);
  onPrint(app);
  addEventListener("keydown", (event) => onKey(app, event));
  addEventListener("hashchange", () => followLink(app));
  new ResizeObserver(() => onResize(app)).observe(canvas.parentElement.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(app, document.documentElement.dataset.theme));
  requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("drawn")));
  app.mapLater();
  window.viewer = app; // for the console and for tests
}

start().catch((error) => {
  document.body.append(el("p", { className: "warn" }, `This page cannot be drawn: ${error}. It needs a browser of 2023 or later.`));
  throw error;
});
