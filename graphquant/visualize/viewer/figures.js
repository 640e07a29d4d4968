// Figures of quantized tensors as heat, what differs between two models in colours, and the list of either.

const SIGNS = { added: "+ ", removed: "− ", changed: "~ " };
const LISTED = 500; // entries of the list, at most
const STEPS = 5; // colours of heat, from h0, which does not matter, to h4

/** The colourings that there are: of quantization, of what changed, of each figure. */
function colourings(m) {
  const figures = m.heat ? m.heat.columns.map((column, i) => [`${i}`, column.name]) : [];
  return [...figures, ...(m.changes ? [["changes", "changes"]] : []), ["quant", "quantization"]];
}

const heated = (app) => app.column !== null;

/** The column that figures are of: that which is shown, else the first. */
const columnOf = (app) => app.m.heat.columns[app.column || 0];

/** A badge's figure: a number, "equal" where there is no error at all, "none" where nothing is left; else undefined. */
function figureOf(app, badge) {
  const found = app.m.heat && app.m.heat.of[badge];
  const figure = found ? found[app.column || 0] : null;
  return figure === null ? undefined : figure;
}

function figureText(app, figure, short = false) {
  if (figure === "equal") return "equal";
  if (figure === "none") return "lost";
  return short ? figure.toFixed(0) : `${figure.toFixed(1)} ${columnOf(app).unit}`;
}

/** How bad a figure is, from 0 to 1; less than that where there is none. */
function badness(app, figure) {
  if (figure === undefined) return -1;
  if (figure === "equal" || figure === "none") return figure === "none" ? 1 : 0;
  const { hot, cold } = columnOf(app);
  return Math.min(1, Math.max(0, (figure - cold) / (hot - cold)));
}

/** Its colour: as a fill, or as a line ("l"), which has to be stronger. */
function heatColour(app, figure, as = "h") {
  const bad = badness(app, figure);
  return bad < 0 ? "" : app.colour[`${as}${Math.min(STEPS - 1, Math.floor(bad * STEPS))}`];
}

/** The worst figure of what an op reads and holds. */
function worstOf(app, op) {
  let worst, bad = -1;
  for (const badge of app.m.badgesOf(op)) {
    const figure = figureOf(app, badge), here = badness(app, figure);
    if (here > bad) [worst, bad] = [figure, here];
  }
  return worst;
}

/** Whether a badge is worse than a bound: by the figure that is shown, or by what calibration estimated. */
function worseThan(app, badge, bound) {
  if (!app.m.heat) return app.m.badges[badge].sqnr !== undefined && app.m.badges[badge].sqnr < bound;
  const figure = figureOf(app, badge), { hot, cold } = columnOf(app);
  if (figure === undefined || figure === "equal") return false;
  return figure === "none" || (hot < cold ? figure < bound : figure > bound);
}

/** Badges in the order of what is shown of them, the worst first. */
function worstFirst(app, badges) {
  const { m } = app, { hot, cold } = m.heat ? columnOf(app) : { hot: 0, cold: 1 };
  const key = (badge) => {
    const figure = m.heat ? figureOf(app, badge) : m.badges[badge].sqnr;
    if (figure === undefined) return Infinity;
    if (figure === "equal" || figure === "none") return figure === "none" ? -1e300 : 1e300;
    return hot < cold ? figure : -figure;
  };
  return badges.sort((a, b) => { const one = key(a), other = key(b); return one === other ? a - b : one < other ? -1 : 1; });
}

/** What happened to an op, a wire or a badge between the two sides: "added", "removed", "changed", or "". */
function statusOf(app, kind, number) {
  const { m } = app, side = kind === "op" ? m.side.op[number] : kind === "wire" ? m.side.wire[number] : FIRST + SECOND;
  if (side !== FIRST + SECOND) return side === FIRST ? "removed" : "added";
  const found = app.changed[kind] && app.changed[kind].get(number);
  return found ? { "+": "added", "-": "removed", "~": "changed" }[found[0].sign] : "";
}

/** For ops and badges the changes that are about them. */
function changedOf(m) {
  const found = { op: new Map(), badge: new Map() };
  const note = (map, key, change) => (map.has(key) ? map.get(key).push(change) : map.set(key, [change]));
  for (const change of m.changes || []) {
    for (const op of change.ops) note(found.op, op, change);
    for (const badge of change.badges) note(found.badge, badge, change);
  }
  return found;
}

/** What is listed: quantized tensors, the worst first, or the changes; each with what a click selects. */
function entries(app) {
  const { m } = app;
  if (m.changes) {
    return m.changes.map((change) => {
      const what = change.badges.length ? { kind: "badge", badge: change.badges[0] } : change.ops.length ? { kind: "op", op: change.ops[0] } : null;
      return { what, said: change.where, more: change.says, small: `${change.sign} ${change.kind}`, dye: { "+": "added", "-": "removed", "~": "changed" }[change.sign] };
    });
  }
  return worstFirst(app, Object.keys(m.heat.of).map(Number)).map((badge) => {
    const figure = figureOf(app, badge), note = m.heat.notes[badge];
    return { what: { kind: "badge", badge }, said: m.badges[badge].name || m.badges[badge].tensor, more: figure === undefined ? note || "not known" : "", small: figure === undefined ? "" : figureText(app, figure), figure };
  });
}

/** Lists the worst tensors or the changes at the left. */
function fillList(app) {
  const { m, list } = app;
  app.entries = m.heat || m.changes ? entries(app) : [];
  if (!m.heat && !m.changes) return;
  const title = m.changes ? counted(app.entries.length, "change") : `Worst first: ${columnOf(app).name}`;
  const line = (entry, i) => {
    const swatch = el("span", { className: "swatch" });
    swatch.style.background = entry.dye ? app.colour[entry.dye] : heatColour(app, entry.figure) || app.colour.box;
    return el("li", {}, el("button", { onclick: () => listed(app, i), disabled: !entry.what },
      swatch, el("span", {}, entry.said, entry.more ? el("small", {}, entry.more) : ""), el("small", {}, entry.small)));
  };
  const more = app.entries.length > LISTED ? [el("li", { className: "more" }, `and ${counted(app.entries.length - LISTED, "more", "more")}; search finds them`)] : [];
  list.replaceChildren(el("h2", {}, title), el("ol", {}, ...app.entries.slice(0, LISTED).map(line), ...more));
  app.listAt = -1;
}

/** Goes to an entry of the list. */
function listed(app, i) {
  if (!app.entries.length) return;
  const step = i < app.listAt ? -1 : 1;
  let at = i;
  for (let tried = 0; tried < app.entries.length; tried++, at += step) {
    at = (at + app.entries.length) % app.entries.length;
    if (app.entries[at].what) break;
  }
  app.listAt = at;
  const buttons = app.list.querySelectorAll("button");
  buttons.forEach((button, j) => button.classList.toggle("here", j === at));
  if (buttons[at]) buttons[at].scrollIntoView({ block: "nearest" });
  if (app.entries[at].what) select(app, app.entries[at].what, { move: true });
}

/** Colours by something else: "quant", "changes", or the number of a figure. */
function colourBy(app, by) {
  app.by = by;
  app.column = /^\d+$/.test(by) ? +by : null;
  const chosen = document.getElementById("by-colour");
  if (chosen) chosen.value = by;
  coloured(app);
  if (app.m.heat) fillList(app);
  if (app.asked.sqnr !== null) search(app);
  app.panel.replaceChildren(...told(app, app.selected));
  app.mapLater();
  app.redraw();
}

/** What the colours mean that are on. */
function legend(app) {
  const { m } = app, swatch = (colour, said) => {
    const made = el("span", { className: "swatch" });
    made.style.background = app.colour[colour] || colour;
    return el("div", {}, made, said);
  };
  if (heated(app)) {
    const { name, says, hot, cold, unit } = columnOf(app);
    const at = (i) => +(cold + ((hot - cold) * i) / STEPS).toPrecision(3);
    const said = (i) => (i === 0 ? `${at(1)} ${unit} and better` : i === STEPS - 1 ? `${at(i)} ${unit} and worse` : `${at(i)} to ${at(i + 1)} ${unit}`);
    return [
      el("h3", {}, `Colours: ${name}`), el("p", {}, `${says[0].toUpperCase()}${says.slice(1)}. An op has the colour of the worst that it reads.`),
      ...Array.from({ length: STEPS }, (_, i) => swatch(`h${i}`, said(i))),
    ];
  }
  if (app.by === "changes") {
    return [el("h3", {}, "Colours: changes"), swatch("added", "+ added"), swatch("removed", "− removed"), swatch("changed", "~ changed"), swatch("box", "the same")];
  }
  const by = [0, 0, 0, 0];
  for (const inputs of m.ops.inputs) by[inputs]++;
  return [
    el("h3", {}, "Colours"),
    swatch("quant", `computes on quantized tensors (${by[3].toLocaleString("en")}); a bar at the left`),
    swatch("part", `on some (${by[2].toLocaleString("en")}); half a bar`),
    swatch("float", "multiplies in float; dashed"),
    swatch("box", "all else"),
    swatch("b8", "8 bits"), swatch("b16", "16 bits"), swatch("b4", "4 bits or fewer"), swatch("f8", "float8"), swatch("b32", "32 bits, bias"),
  ];
}
