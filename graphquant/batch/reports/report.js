"use strict";
(() => {
  const body = document.querySelector("#models > tbody");
  const rows = [...body.rows];
  const heads = [...document.querySelectorAll("#models > thead th")];
  const query = document.getElementById("query");
  const status = document.getElementById("status");

  function filter() {
    const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const name = row.cells[0].dataset.v.toLowerCase();
      const right = !status.value || status.value === row.dataset.status || status.value in row.dataset;
      row.hidden = !(right && words.every((word) => name.includes(word)));
      shown += !row.hidden;
    }
    document.getElementById("shown").textContent = `${shown} of ${rows.length} shown`;
  }

  function sort(column) {
    const head = heads[column];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const one of heads) if (one.hasAttribute("aria-sort")) one.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const number = head.classList.contains("n");
    const keyed = rows.map((row, place) => [row.cells[column].dataset.v, place, row]);
    keyed.sort(([a, first], [b, second]) => {
      if ((a === "") !== (b === "")) return a === "" ? 1 : -1;
      const order = number ? a - b : a < b ? -1 : a > b ? 1 : 0;
      return (down ? -order : order) || first - second;
    });
    body.append(...keyed.map((one) => one[2]));
  }

  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (button) button.addEventListener("click", () => sort(column));
  });
  query.addEventListener("input", filter);
  status.addEventListener("change", filter);
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme:dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  filter();
})();
