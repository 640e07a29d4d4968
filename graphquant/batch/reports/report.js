"use strict";
(() => {
  const body = document.querySelector("#models > tbody");
  const rows = [...body.rows];
  const headings = [...document.querySelectorAll("#models > thead th")];
  const query = document.getElementById("query");
  const status = document.getElementById("status");

  function filter() {
    const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const name = row.cells[0].dataset.v.toLowerCase();
      const matchesStatus = !status.value || status.value === row.dataset.status || status.value in row.dataset;
      row.hidden = !(matchesStatus && words.every((word) => name.includes(word)));
      count += !row.hidden;
    }
    document.getElementById("shown").textContent = `${count} of ${rows.length} shown`;
  }

  function sort(column) {
    const heading = headings[column];
    const descending = heading.getAttribute("aria-sort") === "ascending";
    for (const other of headings) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const number = heading.classList.contains("n");
    const keyedRows = rows.map((row, index) => [row.cells[column].dataset.v, index, row]);
    keyedRows.sort(([a, first], [b, second]) => {
      if ((a === "") !== (b === "")) return a === "" ? 1 : -1;
      const order = number ? a - b : a < b ? -1 : a > b ? 1 : 0;
      return (descending ? -order : order) || first - second;
    });
    body.append(...keyedRows.map((entry) => entry[2]));
  }

  headings.forEach((heading, column) => {
    const button = heading.querySelector("button");
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
