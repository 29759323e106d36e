// Shows the rows of a board that pass its filter. Whatever a submitter wrote is set as text, never as markup.

const FIRST = 100; // rows of a table that are shown before more are asked for
const MORE = 1000;
const PARTS = ["forgets", "keeps", "speaks", "hides"];
const filters = document.getElementById("filters");
const controls = [...filters.elements].filter((control) => control.name);
const held = (control) => (control.type === "checkbox" ? String(control.checked) : control.value);
const DEFAULTS = new Map(controls.map((control) => [control.name, held(control)]));

// ---- one row
const isReference = (row) => row.role !== "submission";
const report = (row) => `submissions/${row.digest}.html`;
const shown = (number, { factor = 100, digits = 1 } = {}) => (number === null ? "–" : (factor * number).toFixed(digits));
const small = (...parts) => (parts.some(Boolean) ? el("small", {}, ...parts) : null);

/** What a column sorts by, null where it is not known. */
const value = (row, key) => (row[key] && typeof row[key] === "object" ? row[key].value : row[key]);

const cells = {
  rank: (row, place) => el("td", {}, place ? place.text : el("span", { class: "tag" }, row.status),
    small(place && place.filtered && `all: ${row.rank}`)),
  model: (row) => el("th", { scope: "row", class: "text" }, el("a", { href: report(row) }, row.model.split(/(?<=\/)/).flatMap((part) => [part, el("wbr", {})])),
    small(...Object.entries(row.links).flatMap(([name, address]) => [el("a", { href: address, rel: "noopener nofollow ugc" }, name), " "]))),
  method: (row) => el("td", { class: "text" }, row.method, small(row.submitter && `by ${row.submitter}`)),
  proof: (row) => el("td", { class: "text proof" }, row.level,
    el("details", {}, el("summary", {}, row.reason ? "why" : "notes"), row.notes.map((note) => small(note)))),
  cost: (row) => el("td", {}, row.cost === null ? "–" : String(row.cost), small(row.hardware)),
};

function number(row, { key, ...form }) {
  const { value, stderr, low, high } = row[key];
  const error = low === undefined ? `± ${stderr === null ? "?" : shown(1.96 * stderr, form)}` : `${shown(low, { ...form, digits: 0 })}–${shown(high, { ...form, digits: 0 })}`;
  const cell = el("td", {}, key === "score" ? el("b", {}, shown(value)) : shown(value, form),
    small(stderr === undefined ? "" : error));
  if (key === "degenerate" && row.broken) cell.className = "warn";
  return cell;
}

// ---- what is shown
/** The place of each ranked row among those shown, which come best first; who shares a rank shares a place. */
function places(rows, filtered) {
  const ranked = rows.filter((row) => row.rank !== null);
  const byRow = new Map();
  ranked.forEach((row, i) => {
    const tied = [ranked[i - 1], ranked[i + 1]].some((other) => other?.rank === row.rank);
    const place = ranked[i - 1]?.rank === row.rank ? byRow.get(ranked[i - 1]).place : i + 1;
    byRow.set(row, { place, text: `${place}${tied ? "=" : ""}`, filtered });
  });
  return byRow;
}

function sorted(rows) {
  const [falling, key] = [filters.sort.value.startsWith("-"), filters.sort.value.replace("-", "")];
  if (!key || !rows.length || !(key in rows[0])) return rows;
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a, key), value(b, key)];
    if (x === null || y === null) return (x === null) - (y === null); // what is not known comes last
    return (typeof x === "number" ? x - y : x.localeCompare(y)) * (falling ? -1 : 1);
  });
}

/** The rows in the picture, whose group has per cent as its units: one path for all of a kind, for there may be many. */
function draw(plane, rows) {
  const group = plane.querySelector(".dots");
  const known = rows.filter((row) => row.fq.value !== null && row.rq.value !== null);
  const at = (row) => [100 * row.fq.value, 100 * row.rq.value];
  const dot = (row) => `M${at(row).map((x) => x.toFixed(1)).join(" ")}${row.broken ? "m-1-1l2 2m0-2l-2 2" : "h0"}`;
  group.replaceChildren(...["open", "broken", "ranked"].map((kind) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const of = known.filter((row) => (row.broken ? "broken" : row.rank === null ? "open" : "ranked") === kind);
    path.setAttribute("class", `${kind}${known.length > 500 ? " many" : ""}`);
    path.setAttribute("d", of.map(dot).join(""));
    return path;
  }));
  const nearest = (event) => {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(group.getScreenCTM().inverse());
    const far = (row) => Math.hypot(at(row)[0] - x, at(row)[1] - y);
    return known.reduce((best, row) => (far(row) < (best ? far(best) : 3) ? row : best), null);
  };
  plane.onpointermove = (event) => {
    const row = nearest(event);
    plane.title = row ? `${row.model}, ${row.method}: score ${shown(row.score.value)}` : "";
    plane.style.cursor = row ? "pointer" : "";
  };
  plane.onclick = (event) => {
    const row = nearest(event);
    if (row) location.href = report(row);
  };
}

/** The first row in a sentence, which says what it loses its score by. */
function best(row) {
  if (!row || row.rank === null) return ["None of these submissions is ranked."];
  const weakest = PARTS.reduce((a, b) => (value(row, b) < value(row, a) ? b : a));
  return ["Best of these: ", el("b", {}, row.model), ` (${row.method}), score ${shown(row.score.value)}. Its weakest part: ${weakest} ${shown(value(row, weakest))}.`];
}

function show(section, table) {
  const words = filters.text.value.toLowerCase().split(/\s+/).filter(Boolean);
  section.hidden = filters.table.value !== "" && filters.table.value !== table.id;
  const passing = table.rows.filter((row) => words.every((word) => row.searched.includes(word))
    && (isReference(row) ? filters.references.checked : row.proof >= Number(filters.level.value)));
  const submitted = table.rows.filter((row) => !isReference(row)).length;
  const passed = passing.filter((row) => !isReference(row));
  const place = places(passing, passed.length < submitted);
  const rows = sorted(passing);
  const columns = [...section.querySelectorAll("thead th")].map((head) => head.dataset);
  const body = section.querySelector("tbody");
  const more = section.querySelector(".more");
  const grow = (count) => {
    const start = body.rows.length;
    body.append(...rows.slice(start, start + count).map((row) => el("tr", { class: isReference(row) ? "reference" : row.status },
      columns.map((column) => cells[column.key]?.(row, place.get(row)) ?? number(row, column)))));
    more.hidden = body.rows.length === rows.length;
    more.textContent = `show more (${body.rows.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")})`;
  };
  body.replaceChildren();
  more.onclick = () => grow(MORE);
  grow(FIRST);
  section.querySelector(".best").replaceChildren(...best(passed[0]));
  draw(section.querySelector(".plane"), passed);
  return section.hidden ? 0 : passed.length;
}

function update(data) {
  const count = data.tables.reduce((sum, table) => sum + show(document.querySelector(`[data-table="${table.id}"]`), table), 0);
  filters.querySelector("output").textContent = `${count.toLocaleString("en")} submissions`;
  for (const head of document.querySelectorAll("thead th")) {
    head.removeAttribute("aria-sort");
    if (filters.sort.value.replace("-", "") === head.dataset.key) head.setAttribute("aria-sort", filters.sort.value.startsWith("-") ? "descending" : "ascending");
  }
}

// ---- the filter is in the address, so that a link shows the same view
function fromAddress() {
  if (location.hash && !location.hash.includes("=")) return; // a place on the page
  const given = new URLSearchParams(location.hash.slice(1));
  for (const control of controls) {
    const text = given.get(control.name) ?? DEFAULTS.get(control.name);
    if (control.type === "checkbox") control.checked = text === "true";
    else control.value = text;
  }
}

function toAddress() {
  const changed = controls.filter((control) => held(control) !== DEFAULTS.get(control.name));
  const hash = new URLSearchParams(changed.map((control) => [control.name, held(control)])).toString();
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}

read().then((data) => {
  for (const table of data.tables) {
    for (const row of table.rows) row.searched = [row.model, row.method, row.submitter, row.status].join(" ").toLowerCase();
  }
  const changed = () => { toAddress(); update(data); };
  for (const head of document.querySelectorAll("thead th")) {
    head.firstElementChild.addEventListener("click", () => {
      const { key } = head.dataset;
      const falls = "text" in head.dataset || key === "rank" ? [key, `-${key}`] : [`-${key}`, key];
      filters.sort.value = falls[filters.sort.value === falls[0] ? 1 : 0];
      changed();
    });
  }
  filters.addEventListener("input", changed);
  filters.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => { fromAddress(); update(data); });
  fromAddress();
  update(data);
  document.documentElement.dataset.ready = "yes";
}).catch((error) => {
  document.querySelector("main").prepend(el("p", { class: "warn" }, `This browser cannot show the tables (${error}).`));
});
