// Start.

function choice(app, key, title, entries) {
  const set = (event) => {
    app.asked[key] = event.target.value;
    search(app);
  };
  return el("select", { title, "aria-label": title, id: `by-${key}`, onchange: set }, el("option", { value: "" }, title), ...entries.map(([value, said]) => el("option", { value }, said)));
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
  const judged = m.badges.some((badge) => badge.sqnr !== undefined);
  return el("header", {},
    el("strong", {}, m.title),
    app.query,
    choice(app, "state", "all ops", [["unquantized", "unquantized"], ["reason", "float, with a reason"], ["quantized", "quantized"]]),
    choice(app, "rule", "any rule", tally(m.badges.map((badge) => badge.rule))),
    choice(app, "kind", "any kind", tally(m.ops.kind.map((kind) => m.text(kind)))),
    judged ? el("input", { type: "number", step: "1", placeholder: "SQNR below dB", "aria-label": "SQNR below, in dB", id: "by-sqnr", oninput: (event) => ask("sqnr", event.target.value === "" ? null : +event.target.value) }) : "",
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
  app.fills = Array.from({ length: app.m.count }, (_, op) => fillOf(app, op));
}

const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function theme(app, name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  coloured(app);
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

async function start() {
  const m = model(await unpacked());
  const canvas = el("canvas", { id: "graph", tabIndex: 0, role: "application", "aria-label": "The model's graph; keys are listed under ?" });
  const map = el("canvas", { id: "map", "aria-hidden": "true" });
  const app = {
    m, canvas, map, ctx: canvas.getContext("2d", { alpha: false }), fitted: new Map(),
    view: { x: 0, y: 0, k: 1 }, collapsed: new Set(), unfolded: new Set(), selected: null, hits: [], mapped: null,
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
  coloured(app);
  app.bar = bar(app);
  document.body.append(app.bar, el("main", {}, canvas, app.results, map, app.panel));
  app.s = scene(m, app.collapsed, app.unfolded);
  app.panel.replaceChildren(...aboutModel(app));
  fit(app, false);
  follow(app);
  draw(app);
  onPointer(app);
  onPrint(app);
  addEventListener("keydown", (event) => onKey(app, event));
  addEventListener("hashchange", () => follow(app));
  new ResizeObserver(() => { app.mapLater(); app.redraw(); }).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(app, document.documentElement.dataset.theme));
  requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("drawn")));
  app.mapLater();
  window.viewer = app; // for the console, and for tests
}

start().catch((error) => {
  document.body.append(el("p", { className: "warn" }, `This page cannot be drawn: ${error}. It needs a browser of 2023 or later.`));
  throw error;
});
