// Start.

function choice(app, key, title, entries) {
  const set = (event) => {
    app.asked[key] = event.target.value;
    search(app);
  };
  return el("select", { title, "aria-label": title, className: "filter", id: `by-${key}`, onchange: set }, el("option", { value: "" }, title), ...entries.map(([value, said]) => el("option", { value }, said)));
}

/** The bar at the top: name, search, filters, buttons. */
function bar(app) {
  const { m } = app, tally = (names) => {
    const found = new Map();
    for (const name of names) if (name) found.set(name, (found.get(name) || 0) + 1);
    return [...found].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([name, number]) => [name, `${name} (${number})`]);
  };
  const ask = (key, value) => {
    app.asked[key] = value;
    search(app);
  };
  app.query = el("input", { type: "search", placeholder: "Search ops and tensors ( / )", "aria-label": "Search ops and tensors", id: "query", oninput: (event) => ask("text", event.target.value) });
  const button = (said, title, act) => el("button", { title, "aria-label": title, onclick: act }, said);
  const judged = m.heat || m.badges.some((badge) => badge.sqnr !== undefined), worse = m.heat ? "worse than" : "SQNR below";
  const pick = (id, title, all, act) => el("select", { title, "aria-label": title, id, onchange: (event) => act(event.target.value) }, ...all.map(([value, said]) => el("option", { value }, said)));
  const colours = colourings(m);
  return el("header", {},
    m.two ? "" : el("strong", { title: m.title }, m.title),
    colours.length > 1 ? pick("by-colour", "Colours (h)", colours, (value) => colourBy(app, value)) : "",
    m.two ? pick("by-side", "Sides (v)", [["3", "both sides"], ["1", m.sides.titles[0]], ["2", m.sides.titles[1]]], (value) => showSides(app, +value)) : "",
    app.query,
    choice(app, "state", "all ops", [["unquantized", "unquantized"], ["reason", "float, with a reason"], ["quantized", "quantized"]]),
    choice(app, "rule", "any rule", tally(m.badges.map((badge) => badge.rule))),
    choice(app, "kind", "any kind", tally(m.ops.kind.map((kind) => m.text(kind)))),
    judged ? el("input", { type: "number", step: "1", placeholder: `${worse} dB`, "aria-label": `${worse} dB`, id: "by-sqnr", oninput: (event) => ask("sqnr", event.target.value === "" ? null : +event.target.value) }) : "",
    m.control.source.length ? el("button", { id: "controls", title: "Control edges (d)", "aria-label": "Control edges", "aria-pressed": "false", onclick: () => showControls(app, !app.controls) }, "control") : "",
    button("fold", "Unfold or fold all badges (u)", () => unfold(app)),
    button("collapse", "Collapse all groups", () => {
      m.group.parent.forEach((parent, group) => parent < 0 && app.collapsed.add(group));
      rebuild(app);
    }),
    button("expand", "Expand all groups (e)", () => { app.collapsed.clear(); rebuild(app); }),
    button("−", "Farther (−)", () => zoom(app, 1 / 1.3)),
    button("+", "Nearer (+)", () => zoom(app, 1.3)),
    button("all", "Show all (0)", () => fit(app, true)),
    button("◐", "Light or dark", () => theme(app, dark() ? "light" : "dark")),
    button("?", "About this model, and keys (?)", () => select(app, null)),
  );
}

/** The colours of the scheme that is on, and the fill of each op. */
function coloured(app) {
  app.colour = palette();
  app.fills = {};
  for (const { side } of app.panes) {
    app.side = side;
    app.fills[side] = Array.from({ length: app.m.count }, (_, op) => fillOf(app, op));
  }
}

const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function theme(app, name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  coloured(app);
  fillList(app);
  app.panel.replaceChildren(...told(app, app.selected));
  app.mapLater();
  app.redraw();
}

/** On paper everything is light, and the drawing is what was in view. */
function onPrint(app) {
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    theme(app, "light");
    draw(app);
  });
  addEventListener("afterprint", () => theme(app, before));
}

/** One side: its canvas, with what it is called where there are two. */
function pane(m, side) {
  const said = m.two ? m.sides.titles[side - 1] : "The model's graph";
  const canvas = el("canvas", { id: side === SECOND ? "other" : "graph", tabIndex: 0, role: "application", "aria-label": `${said}; keys are listed under ?` });
  const box = el("div", { className: "pane" }, canvas, m.two ? el("span", { className: "side", title: said }, said) : "");
  return { side, canvas, box, ctx: canvas.getContext("2d", { alpha: false }), hits: [] };
}

async function start() {
  const m = model(await unpacked());
  const panes = (m.two ? [FIRST, SECOND] : [FIRST + SECOND]).map((side) => pane(m, side)), canvas = panes[0].canvas;
  const map = el("canvas", { id: "map", "aria-hidden": "true" });
  const app = {
    m, panes, canvas, map, side: panes[0].side, sides: FIRST + SECOND, by: colourings(m)[0][0], column: m.heat ? 0 : null, changed: changedOf(m), entries: [], listAt: -1, controls: false, fitted: new Map(),
    view: { x: 0, y: 0, k: 1 }, collapsed: new Set(), unfolded: new Set(), selected: null, mapped: null,
    found: [], at: -1, matched: null, asked: { text: "", state: "", rule: "", kind: "", sqnr: null }, linked: "",
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
  coloured(app);
  app.bar = bar(app);
  document.body.append(app.bar, el("main", {}, app.list, el("div", { id: "panes", className: m.two ? "two" : "" }, ...panes.map((one) => one.box), app.results, map), app.panel));
  app.s = scene(m, app.collapsed, app.unfolded);
  app.panel.replaceChildren(...aboutModel(app));
  fillList(app);
  showControls(app, m.control.source.length <= CONTROLS);
  fit(app, false);
  follow(app);
  draw(app);
  onPointer(app);
  onPrint(app);
  addEventListener("keydown", (event) => onKey(app, event));
  addEventListener("hashchange", () => follow(app));
  new ResizeObserver(() => { app.mapLater(); app.redraw(); }).observe(canvas.parentElement.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(app, document.documentElement.dataset.theme));
  requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("drawn")));
  app.mapLater();
  window.viewer = app; // for the console, and for tests
}

start().catch((error) => {
  document.body.append(el("p", { className: "warn" }, `This page cannot be drawn: ${error}. It needs a browser of 2023 or later.`));
  throw error;
});
