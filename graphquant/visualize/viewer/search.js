// Search and filters.

/** Builds the search index on first use: names and types of ops, and of the ops of annotations. */
function searchIndex(app) {
  const { m } = app;
  app.words ||= {
    ops: Array.from({ length: m.count }, (_, op) => `${m.full(op)} ${m.type(op)}`.toLowerCase()),
    annotations: m.annotations.map((annotation) => [annotation.tensor, annotation.name, annotation.rule, annotation.dtype, ...(annotation.ops || []).flat()].join(" ").toLowerCase()),
  };
  return app.words;
}

/** Lists ops and annotations that match the filters and the text; exact names come first. */
function search(app) {
  const { m } = app, { text, state, rule, kind, sqnr } = app.filters, words = searchIndex(app), low = text.trim().toLowerCase();
  const badgePasses = (annotation) => (!rule || m.annotations[annotation].rule === rule) && (sqnr === null || isWorse(app, annotation, sqnr));
  const passes = (op) =>
    (!state || (state === "reason" ? m.ops.reason[op] > 0 : state === "unquantized" ? m.ops.inputs[op] === 1 || m.ops.inputs[op] === 2 : m.ops.inputs[op] === 3)) &&
    (!kind || m.kind(op) === kind) && ((!rule && sqnr === null) || m.annotationsOf(op).some(badgePasses));
  const matches = [], matched = new Uint8Array(m.count);
  const rank = (name) => (name === low ? 0 : name.startsWith(low) || name.startsWith(`${low}:`) ? 1 : 2);
  words.annotations.forEach((text_, annotation) => {
    if ((low && !text_.includes(low)) || !badgePasses(annotation)) return;
    const ops = m.readers[annotation].map((reader) => reader.op).filter(passes);
    if (!ops.length) return;
    for (const op of ops) matched[op] = 1;
    matches.push({ selection: { kind: "annotation", annotation }, rank: rank((m.annotations[annotation].name || m.annotations[annotation].tensor).toLowerCase()) });
  });
  if (sqnr !== null) {
    const order = new Map(sortWorstFirst(app, matches.map((match) => match.selection.annotation)).map((annotation, i) => [annotation, i]));
    matches.sort((a, b) => order.get(a.selection.annotation) - order.get(b.selection.annotation));
  }
  for (let op = 0; op < m.count; op++) {
    if ((low && !words.ops[op].includes(low)) || !passes(op)) continue;
    matched[op] = 1;
    matches.push({ selection: { kind: "op", op }, rank: rank(m.full(op).toLowerCase()) });
  }
  if (sqnr === null) matches.sort((a, b) => a.rank - b.rank);
  app.matches = matches.map((match) => match.selection);
  const active = low || state || rule || kind || sqnr !== null;
  app.matched = active ? matched : null;
  app.at = -1;
  listResults(app, Boolean(active));
  app.mapLater();
  app.redraw();
}

function listResults(app, active) {
  const { m, results, matches } = app;
  results.hidden = !active;
  const line = (selection, i) => {
    const annotation = selection.kind === "annotation" ? m.annotations[selection.annotation] : null;
    const scale = annotation && annotation.scale && !annotation.count ? ` ${Math.fround(annotation.scale[0])}` : "";
    const figure = annotation && m.heat ? figureOf(app, selection.annotation) : undefined;
    const sqnr = figure !== undefined ? `, ${figureText(app, figure)}` : annotation && annotation.sqnr !== undefined ? `, ${annotation.sqnr.toFixed(1)} dB` : "";
    const side = m.twoSides ? { 1: " (A)", 2: " (B)" }[annotation ? m.side.annotation[selection.annotation] : m.side.op[selection.op]] || "" : "";
    const detail = annotation ? `${annotation.dtype || "?"}${scale || (annotation.scale ? `[${annotation.count}]` : "")}${sqnr}${side}` : m.type(selection.op) + side;
    return el("li", {}, el("button", { onclick: () => goToMatch(app, i) }, el("span", {}, annotation ? annotation.name || annotation.tensor : m.full(selection.op)), el("small", {}, detail)));
  };
  const more = matches.length > MAX_RESULTS ? [el("li", { className: "more" }, `and ${(matches.length - MAX_RESULTS).toLocaleString("en")} more`)] : [];
  results.replaceChildren(el("li", { className: "more" }, pluralize(matches.length, "result")), ...matches.slice(0, MAX_RESULTS).map(line), ...more);
}

/** Selects result `i`. */
function goToMatch(app, i) {
  if (!app.matches.length) return;
  app.at = (i + app.matches.length) % app.matches.length;
  const buttons = app.results.querySelectorAll("button");
  buttons.forEach((button, j) => button.classList.toggle("here", j === app.at));
  if (buttons[app.at]) buttons[app.at].scrollIntoView({ block: "nearest" });
  select(app, app.matches[app.at], { move: true });
}
