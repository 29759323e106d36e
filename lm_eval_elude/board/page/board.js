"use strict";
// Rows stand in the page; sorting and filtering only moves and hides them.
const filters = document.getElementById("filters");

function filter() {
  const words = filters.text.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const section of document.querySelectorAll("section[data-table]")) {
    section.hidden = filters.table.value !== "" && filters.table.value !== section.dataset.table;
    for (const row of section.querySelectorAll("tbody tr")) {
      const reference = !row.classList.contains("submission");
      row.hidden = !words.every((word) => row.dataset.text.includes(word))
        || (reference ? !filters.references.checked : Number(row.dataset.level) < Number(filters.level.value));
    }
  }
}

function sort(head) {
  const table = head.closest("table");
  const index = [...head.parentNode.children].indexOf(head);
  const number = "number" in head.dataset;
  const rising = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "descending" : !number || head.dataset.key === "rank";
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const body = table.tBodies[0];
  const keyed = [...body.rows].map((row) => [row.cells[index].dataset.value, row]);
  keyed.sort(([a], [b]) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // what is not known comes last
    const order = number ? Number(a) - Number(b) : a.localeCompare(b);
    return rising ? order : -order;
  });
  body.append(...keyed.map(([, row]) => row));
}

for (const head of document.querySelectorAll("thead th")) head.firstChild.addEventListener("click", () => sort(head));
filters.addEventListener("input", filter);
filters.addEventListener("submit", (event) => event.preventDefault());
filter();
document.documentElement.dataset.ready = "yes";
