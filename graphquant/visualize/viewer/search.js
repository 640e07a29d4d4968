// Search and filters.

/** What is searched, made when it is first needed: names and types of ops, and of what badges stand for. */
function searched(app) {
  const { m } = app;
  app.words ||= {
    ops: Array.from({ length: m.count }, (_, op) => `${m.full(op)} ${m.type(op)}`.toLowerCase()),
    badges: m.badges.map((one) => [one.tensor, one.name, one.rule, one.dtype, ...(one.ops || []).flat()].join(" ").toLowerCase()),
  };
  return app.words;
}

/** Ops and badges that pass the filters and have the text; what is called exactly that comes first. */
function search(app) {
  const { m } = app, { text, state, rule, kind, sqnr } = app.asked, words = searched(app), low = text.trim().toLowerCase();
  const badge = (one) => (!rule || m.badges[one].rule === rule) && (sqnr === null || worseThan(app, one, sqnr));
  const passes = (op) =>
    (!state || (state === "reason" ? m.ops.reason[op] > 0 : state === "unquantized" ? m.ops.inputs[op] === 1 || m.ops.inputs[op] === 2 : m.ops.inputs[op] === 3)) &&
    (!kind || m.kind(op) === kind) && ((!rule && sqnr === null) || m.badgesOf(op).some(badge));
  const found = [], matched = new Uint8Array(m.count);
  const rank = (name) => (name === low ? 0 : name.startsWith(low) || name.startsWith(`${low}:`) ? 1 : 2);
  words.badges.forEach((said, one) => {
    if ((low && !said.includes(low)) || !badge(one)) return;
    const ops = m.readers[one].map((reader) => reader.op).filter(passes);
    if (!ops.length) return;
    for (const op of ops) matched[op] = 1;
    found.push({ what: { kind: "badge", badge: one }, rank: rank((m.badges[one].name || m.badges[one].tensor).toLowerCase()) });
  });
  if (sqnr !== null) {
    const order = new Map(worstFirst(app, found.map((one) => one.what.badge)).map((one, i) => [one, i]));
    found.sort((a, b) => order.get(a.what.badge) - order.get(b.what.badge));
  }
  for (let op = 0; op < m.count; op++) {
    if ((low && !words.ops[op].includes(low)) || !passes(op)) continue;
    matched[op] = 1;
    found.push({ what: { kind: "op", op }, rank: rank(m.full(op).toLowerCase()) });
  }
  if (sqnr === null) found.sort((a, b) => a.rank - b.rank);
  app.found = found.map((one) => one.what);
  const any = low || state || rule || kind || sqnr !== null;
  app.matched = any ? matched : null;
  app.at = -1;
  listResults(app, Boolean(any));
  app.mapLater();
  app.redraw();
}

function listResults(app, any) {
  const { m, results, found } = app;
  results.hidden = !any;
  const line = (what, i) => {
    const badge = what.kind === "badge" ? m.badges[what.badge] : null;
    const scale = badge && badge.scale && !badge.count ? ` ${Math.fround(badge.scale[0])}` : "";
    const figure = badge && m.heat ? figureOf(app, what.badge) : undefined;
    const sqnr = figure !== undefined ? `, ${figureText(app, figure)}` : badge && badge.sqnr !== undefined ? `, ${badge.sqnr.toFixed(1)} dB` : "";
    const alone = m.two ? { 1: " (A)", 2: " (B)" }[badge ? m.side.badge[what.badge] : m.side.op[what.op]] || "" : "";
    const said = badge ? `${badge.dtype || "?"}${scale || (badge.scale ? `[${badge.count}]` : "")}${sqnr}${alone}` : m.type(what.op) + alone;
    return el("li", {}, el("button", { onclick: () => pick(app, i) }, el("span", {}, badge ? badge.name || badge.tensor : m.full(what.op)), el("small", {}, said)));
  };
  const more = found.length > RESULTS ? [el("li", { className: "more" }, `and ${(found.length - RESULTS).toLocaleString("en")} more`)] : [];
  results.replaceChildren(el("li", { className: "more" }, counted(found.length, "result")), ...found.slice(0, RESULTS).map(line), ...more);
}

/** Goes to result `i`. */
function pick(app, i) {
  if (!app.found.length) return;
  app.at = (i + app.found.length) % app.found.length;
  const buttons = app.results.querySelectorAll("button");
  buttons.forEach((button, j) => button.classList.toggle("here", j === app.at));
  if (buttons[app.at]) buttons[app.at].scrollIntoView({ block: "nearest" });
  select(app, app.found[app.at], { move: true });
}
