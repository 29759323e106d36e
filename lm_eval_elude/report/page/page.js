// Filters, orders and opens the answers of a report. Whatever comes from a run is set as text, never as markup.

const color = (i) => `c${i % 8}`;
const small = (text) => el("small", {}, text);

// ---- answers

const [GIBBERISH, LEAKS, REFUSES] = [1, 2, 4];
const PAGE = 25;
const WORD = /(?<![\p{L}\p{N}])(?:[\p{L}\p{N}]{4,}|\p{N}+)(?![\p{L}\p{N}])/gu;

/** A generated text in which the longer words of the true answer that the question lacks are marked. */
function marked(text, truth, question) {
  const words = (s) => new Set(s.toLowerCase().match(WORD) ?? []);
  const asked = words(question);
  const telling = new Set([...words(truth)].filter((word) => !asked.has(word)));
  return text.split(new RegExp(`(${WORD.source})`, "gu")).map((piece, i) => (i % 2 && telling.has(piece.toLowerCase()) ? el("mark", {}, piece) : piece));
}

/** What can scroll can be reached by the keyboard. */
function reachable(root) {
  for (const node of root.querySelectorAll(".text, .scroll")) {
    if (node.scrollHeight > node.clientHeight || node.scrollWidth > node.clientWidth) node.tabIndex = 0;
  }
}

function answers(data) {
  const place = document.getElementById("answers");
  const rows = data.rows;
  if (!rows.length) return place.replaceChildren(el("h2", {}, "Answers"), el("p", {}, "There are none here: only losses were scored, or the texts are withheld."));
  const keys = new Map(); // the name of a row in the page's address -> its place
  const records = new Map(); // a record -> the rows that ask for it
  rows.forEach((row, i) => {
    row.key = `${data.tasks[row.set]}-${row.id}`;
    while (keys.has(row.key)) row.key += "+";
    keys.set(row.key, i);
    row.record = `${row.target} ${row.plain || row.question}`;
    records.set(row.record, [...(records.get(row.record) ?? []), row]);
  });
  const select = (label, names, values = names) =>
    el("select", { "aria-label": label }, names.map((name, i) => el("option", { value: values[i] }, name)));
  const used = (column) => [...new Set(rows.map((row) => row[column]))].sort((a, b) => a - b);
  const sets = select("set", ["all sets", "all attacks", ...used("set").map((i) => data.sets[i])], ["", "attacks", ...used("set")]);
  const targets = select("target", ["all targets", ...used("target").map((i) => data.targets[i] || "no target")], ["", ...used("target")]);
  const of = select("answers of", ["in any run", ...data.runs.map((name) => `in ${name}`)], ["", ...data.runs.keys()]);
  const later = data.runs.length - 1;
  const chosen = (row) => (of.value === "" ? row.given : [row.given[+of.value]]).filter(Boolean);
  const orders = {
    "as asked": null,
    "most changed": (row) => Math.max(...row.given.map((a) => (a && row.given[0] ? Math.abs(a.p - row.given[0].p) : -1))),
    "likeliest": (row) => Math.max(...chosen(row).map((a) => a.p ?? -1)),
    "least likely": (row) => -Math.min(...chosen(row).map((a) => a.p ?? 1e9)),
    "most of the answer's words (ROUGE)": (row) => Math.max(...chosen(row).map((a) => a.rouge ?? -1)),
  };
  const order = select("order", Object.keys(orders));
  const search = el("input", { type: "search", placeholder: "search", "aria-label": "search in questions and answers" });
  const flags = {
    changed: (row) => row.given.some((a) => a && row.given[0] && a.text !== row.given[0].text),
    gibberish: (row) => chosen(row).some((a) => a.flags & GIBBERISH),
    leaks: (row) => chosen(row).some((a) => a.flags & LEAKS),
    refuses: (row) => chosen(row).some((a) => a.flags & REFUSES),
  };
  const boxes = Object.fromEntries(Object.keys(flags).map((name) => [name, el("input", { type: "checkbox", name })]));
  const count = el("output", {});
  const list = el("div", { class: "cards" });
  const [back, on] = [el("button", { type: "button" }, "‹ back"), el("button", { type: "button" }, "next ›")];
  let found = [];
  let page = 0;
  let current = -1; // place among the found ones

  const where = (row) => el("p", { class: "where" }, data.sets[row.set], data.targets[row.target] ? ` · ${data.targets[row.target]}` : "", " · ",
    el("a", { href: `#${row.key}`, "aria-label": `link to answer ${row.id} of ${data.sets[row.set]}` }, `#${row.id}`));
  const given = (row) => el("div", { class: "given" }, row.given.map((a, i) => {
    const badge = (flag, name) => (a.flags & flag ? el("b", { class: name }, name) : null);
    return el("div", { class: `answer ${color(i)}` },
      el("p", { class: "who", dir: "auto" }, el("span", {}, el("i", { class: `swatch ${color(i)}` }), data.runs[i]),
        a ? el("span", { class: "p" }, a.p === null ? "" : `P ${(a.p / 10).toFixed(1)} %`) : null),
      a ? el("p", { class: "text", dir: "auto" }, a.text.trim() ? marked(a.text, row.truth, row.question) : el("i", {}, "(empty)")) : el("p", { class: "text" }, el("i", {}, "(not asked)")),
      a ? el("p", { class: "badges" }, badge(GIBBERISH, "gibberish"), badge(LEAKS, "leaks"), badge(REFUSES, "refuses")) : null);
  }));
  /** The prompt of each run, once where they are the same, and every candidate's log-probability a token. */
  const scores = (row) => {
    const prompts = new Map();
    row.given.forEach((a, i) => a?.prompt && prompts.set(a.prompt, [...(prompts.get(a.prompt) ?? []), data.runs[i]]));
    const names = (i) => (i === 0 ? "true answer" : i === 1 ? "reworded" : i < row.candidates.length - row.named ? "wrong" : i === row.candidates.length - row.named ? "its name" : "another name");
    const best = row.given.map((a) => (a ? Math.max(...a.scores.slice(1, row.candidates.length - row.named).filter((s) => s !== null)) : null));
    const cell = (a, i, run) => {
      const score = a?.scores[i] ?? null;
      if (score === null) return el("td", {}, "–");
      const text = `${(score / 100).toFixed(2)} (${(100 * Math.exp(score / 100)).toFixed(1)} %)`;
      return el("td", {}, score === best[run] && i > 0 ? el("b", {}, text) : text);
    };
    return [
      ...[...prompts].map(([prompt, runs]) => [el("h4", { dir: "auto" }, prompts.size > 1 ? `Prompt as sent to ${runs.join(", ")}` : "Prompt as sent"), el("pre", { class: "text", dir: "auto" }, prompt)]).flat(),
      el("h4", {}, "Log-probability a token (and its exponential)"),
      el("div", { class: "scroll" }, el("table", {},
        el("thead", {}, el("tr", {}, el("td", {}), el("th", { scope: "col", class: "candidate" }, "candidate"), data.runs.map((name) => el("th", { scope: "col", dir: "auto" }, name)))),
        el("tbody", {}, row.candidates.map((text, i) => el("tr", {}, el("th", { scope: "row" }, names(i)), el("td", { class: "candidate", dir: "auto" }, text),
          row.given.map((a, run) => cell(a, i, run))))))),
      el("p", {}, small("Bold: the likeliest of the reworded answer and the wrong ones.")),
    ];
  };
  /** A part that is made when it is opened. */
  const folded = (title, make) => {
    const part = el("details", {}, el("summary", {}, title));
    part.addEventListener("toggle", () => { if (part.open && part.children.length === 1) { part.append(...make()); reachable(part); } });
    return part;
  };
  const card = (row) => {
    const others = records.get(row.record).filter((other) => other !== row);
    return el("article", { id: row.key, tabindex: "-1" },
      where(row),
      el("h3", { class: "prompt", dir: "auto" }, row.question),
      row.plain ? el("p", { class: "plain", dir: "auto" }, small("asks "), row.plain) : null,
      el("p", { class: "truth", dir: "auto" }, small("true answer "), row.truth),
      given(row),
      folded("Prompt and scores of all candidates", () => scores(row)),
      others.length ? folded(`The same record, asked ${others.length === 1 ? "in another way" : `in ${others.length} other ways`}`,
        () => others.map((other) => el("div", { class: "other" }, where(other), el("p", { class: "prompt", dir: "auto" }, other.question), given(other)))) : null);
  };
  const show = () => {
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    list.replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map((i) => card(rows[i])));
    reachable(list);
    count.textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} · page ${page + 1} of ${pages.toLocaleString("en")}`;
    [back.disabled, on.disabled] = [page === 0, page === pages - 1];
  };
  const filter = () => {
    const wanted = search.value.toLowerCase();
    const set = Object.keys(flags).filter((name) => boxes[name].checked);
    found = [];
    rows.forEach((row, i) => {
      if (sets.value === "attacks" ? !data.sets[row.set].startsWith("attack: ") : sets.value !== "" && row.set !== +sets.value) return;
      if (targets.value !== "" && row.target !== +targets.value) return;
      if (!set.every((name) => flags[name](row))) return;
      if (wanted && ![row.question, row.plain, row.truth, ...row.given.map((a) => a?.text ?? "")].some((text) => text.toLowerCase().includes(wanted))) return;
      found.push(i);
    });
    if (orders[order.value]) {
      const values = new Map(found.map((i) => [i, orders[order.value](rows[i])]));
      found.sort((a, b) => values.get(b) - values.get(a) || a - b);
    }
    [page, current] = [0, -1];
    show();
  };
  /** Turn to one of the found answers, which the page's address names from then on. */
  const go = (to) => {
    current = Math.min(Math.max(to, 0), found.length - 1);
    const { key } = rows[found[current]];
    if (page !== Math.floor(current / PAGE) || !list.children.length) { page = Math.floor(current / PAGE); show(); }
    history.replaceState(null, "", `#${key}`);
    const node = document.getElementById(key);
    node.focus({ preventScroll: true });
    const above = place.querySelector(".filters"); // where it stays in sight it must not cover the answer
    node.style.scrollMarginTop = getComputedStyle(above).position === "sticky" ? `${above.offsetHeight}px` : "";
    node.scrollIntoView();
  };
  const follow = () => {
    const row = keys.get(decodeURIComponent(location.hash.slice(1)));
    if (row === undefined) return;
    if (!found.includes(row)) {
      for (const control of [sets, targets, of, search]) control.value = "";
      for (const box of Object.values(boxes)) box.checked = false;
      filter();
    }
    go(found.indexOf(row));
  };
  const turn = (by) => { page += by; current = -1; show(); place.scrollIntoView(); };
  back.addEventListener("click", () => turn(-1));
  on.addEventListener("click", () => turn(1));
  for (const control of [sets, targets, of, order, ...Object.values(boxes)]) control.addEventListener("change", filter);
  let timer = 0;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(filter, 200); });
  addEventListener("hashchange", follow);
  list.addEventListener("focusin", (event) => { current = found.indexOf(keys.get(event.target.closest("article").id)); });
  list.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey || event.target.matches(".scroll")) return;
    event.preventDefault();
    go(current + by);
  });
  place.replaceChildren(
    el("h2", {}, "Answers side by side"),
    el("p", {}, "P: probability of the true answer, length-normalised. Marked: words of the true answer that the question does not have. ",
      "Leaks: half or more of the words that tell the true answer from the wrong ones. Within the answers the keys ← and → go to the previous and the next one."),
    el("form", { class: "filters" }, sets, used("target").length > 1 ? targets : null, later ? of : null, order, search,
      Object.entries(boxes).filter(([name]) => name !== "changed" || later).map(([name, box]) => el("label", {}, box, name)), count),
    list, el("p", { class: "pager" }, back, on));
  place.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  filter();
  follow();
}

read().then((data) => {
  const text = (i) => data.texts[i];
  data.rows = data.rows.map(([set, target, id, question, plain, candidates, given]) => {
    const [named, ...texts] = data.candidates[candidates];
    const asked = text(question);
    const answer = ([generated, p, rouge, flags, prompt, ...scores]) => {
      const [before, after] = data.prompts[prompt] ?? ["", null];
      return { text: text(generated), p, rouge, flags, scores, prompt: after === null ? before : before + asked + after };
    };
    return { set, target, id, question: asked, plain: text(plain), truth: text(texts[0]), candidates: texts.map(text), named, given: given.map((a) => a && answer(a)) };
  });
  answers(data);
  document.documentElement.dataset.ready = "yes";
}).catch((error) => {
  document.getElementById("answers").replaceChildren(el("p", {}, `This browser cannot show answers (${error}).`));
});
reachable(document);
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => reachable(details));
