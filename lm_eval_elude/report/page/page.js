"use strict";
// Filters and searches the answers of a report. Whatever comes from a run is set as text, never as markup.

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}
const color = (i) => `c${i % 8}`;

async function read() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// ---- answers

const [DEGENERATE, LEAKS, REFUSES] = [1, 2, 4];
const PAGE = 25;
const WORD = /(?<![\p{L}\p{N}])(?:[\p{L}\p{N}]{4,}|\p{N}+)(?![\p{L}\p{N}])/gu;

/** A generated text in which the longer words of the true answer that the prompt lacks are marked. */
function marked(text, truth, prompt) {
  const words = (s) => new Set(s.toLowerCase().match(WORD) ?? []);
  const asked = words(prompt);
  const telling = new Set([...words(truth)].filter((word) => !asked.has(word)));
  return text.split(new RegExp(`(${WORD.source})`, "gu")).map((piece, i) => (i % 2 && telling.has(piece.toLowerCase()) ? el("mark", {}, piece) : piece));
}

function answers(data) {
  const place = document.getElementById("answers");
  const rows = data.rows;
  if (!rows.length) return place.replaceChildren(el("h2", {}, "Answers"), el("p", {}, "There are none here: only losses were scored, or the texts are withheld."));
  const select = (label, names, values = names) =>
    el("select", { "aria-label": label }, names.map((name, i) => el("option", { value: values[i] }, name)));
  const used = (column) => [...new Set(rows.map((row) => row[column]))].sort((a, b) => a - b);
  const sets = select("set", ["all sets", "all attacks", ...used(0).map((i) => data.sets[i])], ["", "attacks", ...used(0)]);
  const targets = select("target", ["all targets", ...used(1).map((i) => data.targets[i] || "no target")], ["", ...used(1)]);
  const of = select("answers of", ["in any run", ...data.runs.map((name) => `in ${name}`)], ["", ...data.runs.keys()]);
  const later = data.runs.length - 1;
  const orders = {
    "as asked": null,
    "most changed": (row) => Math.max(...row[5].map((a) => (a && row[5][0] ? Math.abs(a[1] - row[5][0][1]) : -1))),
    "likeliest": (row) => Math.max(...chosen(row).map((a) => a[1] ?? -1)),
    "least likely": (row) => -Math.min(...chosen(row).map((a) => a[1] ?? 1e9)),
    "most of the answer's words (ROUGE)": (row) => Math.max(...chosen(row).map((a) => a[2] ?? -1)),
  };
  const order = select("order", Object.keys(orders));
  const search = el("input", { type: "search", placeholder: "search", "aria-label": "search in questions and answers" });
  const flags = {
    changed: (row) => row[5].some((a) => a && row[5][0] && a[0] !== row[5][0][0]),
    degenerate: (row) => chosen(row).some((a) => a[3] & DEGENERATE),
    leaks: (row) => chosen(row).some((a) => a[3] & LEAKS),
    refuses: (row) => chosen(row).some((a) => a[3] & REFUSES),
  };
  const boxes = Object.fromEntries(Object.keys(flags).map((name) => [name, el("input", { type: "checkbox", name })]));
  const chosen = (row) => (of.value === "" ? row[5] : [row[5][+of.value]]).filter(Boolean);
  const count = el("output", {});
  const list = el("div", { class: "cards" });
  const [back, on] = [el("button", { type: "button" }, "‹ back"), el("button", { type: "button" }, "next ›")];
  let found = [];
  let page = 0;

  const card = (row) => {
    const [set, target, prompt, plain, truth, given] = row;
    return el("article", {},
      el("p", { class: "where" }, data.sets[set], data.targets[target] ? ` · ${data.targets[target]}` : ""),
      el("p", { class: "prompt", dir: "auto" }, prompt),
      plain ? el("p", { class: "plain", dir: "auto" }, el("small", {}, "asks "), plain) : null,
      el("p", { class: "truth", dir: "auto" }, el("small", {}, "true answer "), truth),
      el("div", { class: "given" }, given.map((a, i) => {
        const badge = (flag, name) => (a[3] & flag ? el("b", { class: name }, name) : null);
        return el("div", { class: `one ${color(i)}` },
          el("p", { class: "who", dir: "auto" }, el("span", {}, el("i", { class: `swatch ${color(i)}` }), data.runs[i]),
            a ? el("span", { class: "p" }, a[1] === null ? "" : `P ${(a[1] / 10).toFixed(1)} %`) : null),
          a ? el("p", { class: "text", dir: "auto", tabindex: "0" }, a[0].trim() ? marked(a[0], truth, prompt) : el("i", {}, "(empty)")) : el("p", { class: "text" }, el("i", {}, "(not asked)")),
          a ? el("p", { class: "badges" }, badge(DEGENERATE, "degenerate"), badge(LEAKS, "leaks"), badge(REFUSES, "refuses")) : null);
      })));
  };
  const show = () => {
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    list.replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map((i) => card(rows[i])));
    count.textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} · page ${page + 1} of ${pages.toLocaleString("en")}`;
    [back.disabled, on.disabled] = [page === 0, page === pages - 1];
  };
  const filter = () => {
    const wanted = search.value.toLowerCase();
    const on = Object.keys(flags).filter((name) => boxes[name].checked);
    const attack = data.sets.map((name) => name.startsWith("attack: "));
    found = [];
    rows.forEach((row, i) => {
      if (sets.value === "attacks" ? !attack[row[0]] : sets.value !== "" && row[0] !== +sets.value) return;
      if (targets.value !== "" && row[1] !== +targets.value) return;
      if (!on.every((name) => flags[name](row))) return;
      if (wanted && ![row[2], row[3], row[4], ...row[5].map((a) => a?.[0] ?? "")].some((text) => text.toLowerCase().includes(wanted))) return;
      found.push(i);
    });
    if (orders[order.value]) {
      const keys = new Map(found.map((i) => [i, orders[order.value](rows[i])]));
      found.sort((a, b) => keys.get(b) - keys.get(a) || a - b);
    }
    page = 0;
    show();
  };
  const turn = (by) => { page += by; show(); place.scrollIntoView(); };
  back.addEventListener("click", () => turn(-1));
  on.addEventListener("click", () => turn(1));
  for (const control of [sets, targets, of, order, ...Object.values(boxes)]) control.addEventListener("change", filter);
  let timer = 0;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(filter, 200); });
  place.replaceChildren(
    el("h2", {}, "Answers side by side"),
    el("p", {}, "P: probability of the true answer, length-normalised. Marked: words of the true answer that the prompt does not have. ",
      "Leaks: half or more of the words that tell the true answer from the wrong ones."),
    el("form", { class: "filters" }, sets, used(1).length > 1 ? targets : null, later ? of : null, order, search,
      Object.entries(boxes).filter(([name]) => name !== "changed" || later).map(([name, box]) => el("label", {}, box, name)), count),
    list, el("p", { class: "pager" }, back, on));
  place.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  filter();
}

read().then((data) => {
  for (const row of data.rows) {
    for (const column of [2, 3, 4]) row[column] = data.texts[row[column]];
    for (const answer of row[5]) if (answer) answer[0] = data.texts[answer[0]];
  }
  answers(data);
  document.documentElement.dataset.ready = "yes";
}).catch((error) => {
  document.getElementById("answers").replaceChildren(el("p", {}, `This browser cannot show answers (${error}).`));
});
