// Answers by set and by search. Whatever comes from a run is set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const form = document.querySelector(".filters");
const list = document.getElementById("list");
const STEP = 20;

function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** A text in which the words that tell the fact are marked. */
function marked(text, fact) {
  const told = new Set(fact);
  return text.split(/([\p{L}\p{N}]+)/u).map((piece, i) => (i % 2 && told.has(piece.toLowerCase()) ? el("mark", {}, piece) : piece));
}

function answer(given, i, fact) {
  const flags = given.flags.map((flag) => el("span", { class: "flag" }, flag));
  const repeated = given.flags.includes("repetition");
  const text = el("p", { class: repeated ? "text clamped" : "text", dir: "auto" }, ...(given.text ? marked(given.text, fact) : ["(empty)"]));
  return el("div", {}, el("p", { class: "who" }, el("i", { class: `dot c${i % 6}` }), `${data.models[i]} ${given.p} `, ...flags), text);
}

function article(row) {
  const given = row.given.flatMap((g, i) => (g ? [answer(g, i, row.fact)] : []));
  const truth = el("p", { class: "truth", dir: "auto" }, el("small", {}, "true answer "), row.truth);
  return el("article", { id: `${row.task}-${row.id}` }, el("h3", { dir: "auto" }, row.question), truth, el("div", { class: "given" }, ...given));
}

function show(count) {
  const task = form.elements.task.value;
  const wanted = form.elements.text.value.toLowerCase();
  const texts = (row) => [row.question, row.truth, ...row.given.map((g) => g?.text ?? "")];
  const rows = data.rows.filter((row) => row.task === task && (!wanted || texts(row).some((text) => text.toLowerCase().includes(wanted))));
  list.replaceChildren(...rows.slice(0, count).map(article));
  form.querySelector("output").textContent = `${Math.min(count, rows.length)} of ${rows.length}`;
  if (rows.length > count) {
    const more = el("button", { type: "button" }, "show more");
    more.addEventListener("click", () => show(count + STEP));
    list.append(more);
  }
}

if (form && data.rows.length) {
  form.elements.task.append(...[...new Set(data.rows.map((row) => row.task))].map((task) => el("option", { value: task }, task)));
  form.addEventListener("input", () => show(STEP));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  const [task, id] = location.hash.slice(1).split(/-(?=\d+$)/);
  if (data.rows.some((row) => row.task === task)) form.elements.task.value = task;
  show(id ? data.rows.length : 1);
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
}
document.documentElement.dataset.ready = "yes";
