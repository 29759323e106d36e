"use strict";
// Plots and answers of a report. Whatever comes from a run is set as text, never as markup.

const NS = "http://www.w3.org/2000/svg";

function make(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes ?? {}))
    if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => make(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => make(document.createElementNS(NS, tag), attributes, children);
const color = (i) => `c${i % 8}`;
const percent = (v) => `${(100 * v).toFixed(1)} %`;
const said = ([v, low, high]) => (low === high ? percent(v) : `${percent(v)} [${(100 * low).toFixed(1)}, ${(100 * high).toFixed(1)}]`);
const short = (v) => (v !== 0 && Math.abs(v) < 0.01 ? v.toExponential(0) : String(+v.toPrecision(3)));

async function read() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// ---- plots

/** Round numbers between two values. */
function ticks([low, high]) {
  const raw = (high - low || 1) / 4;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((s) => s >= raw * 0.99);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor((high - low) / step + 1e-9) + 1 }, (_, i) => (first + i) * step).filter((v) => v <= high + step * 1e-6);
}

/** An empty plot with axes; X and Y map values to its pixels. */
function plot({ width = 345, height = 210, x = [0, 1], y = [0, 1], xLabel, yLabel, form = short }) {
  const [left, right, top, bottom] = [46, 14, 12, 38];
  const X = (v) => left + ((v - x[0]) / (x[1] - x[0] || 1)) * (width - left - right);
  const Y = (v) => height - bottom - ((v - y[0]) / (y[1] - y[0] || 1)) * (height - top - bottom);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img" });
  for (const v of ticks(x)) {
    root.append(svg("line", { class: "grid", x1: X(v), x2: X(v), y1: Y(y[0]), y2: Y(y[1]) }));
    root.append(svg("text", { x: X(v), y: height - bottom + 15, "text-anchor": "middle" }, form(v)));
  }
  for (const v of ticks(y)) {
    root.append(svg("line", { class: "grid", x1: X(x[0]), x2: X(x[1]), y1: Y(v), y2: Y(v) }));
    root.append(svg("text", { x: left - 6, y: Y(v) + 4, "text-anchor": "end" }, form(v)));
  }
  if (xLabel) root.append(svg("text", { class: "label", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
  if (yLabel) root.append(svg("text", { class: "label", x: 0, y: 0, "text-anchor": "middle", transform: `translate(11 ${(top + height - bottom) / 2}) rotate(-90)` }, yLabel));
  return { root, X, Y };
}

function figure(title, ...children) {
  const caption = el("figcaption", {}, title);
  for (const child of children) if (child.tagName === "svg") child.setAttribute("aria-label", caption.textContent);
  return el("figure", { class: "plot" }, caption, ...children);
}
const path = (points, attributes) => svg("path", { d: points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(""), ...attributes });
const whole = (v) => String(Math.round(100 * v));

function qualityPlot(data) {
  if (!data.quality.some((q) => q[0] && q[1])) return null;
  const { root, X, Y } = plot({ width: 440, height: 360, xLabel: "forget quality (FQ), %", yLabel: "retain quality (RQ), %", form: whole });
  const taken = [];
  data.quality.forEach(([fq, rq], i) => {
    if (!fq || !rq) return;
    const group = svg("g", { class: color(i) }, svg("title", {}, `${data.runs[i]}: FQ ${said(fq)}, RQ ${said(rq)}`));
    if (i === data.reference) {
      group.append(svg("line", { class: "rule", x1: X(fq[0]), x2: X(fq[0]), y1: Y(0), y2: Y(1) }));
      group.append(svg("line", { class: "rule", x1: X(0), x2: X(1), y1: Y(rq[0]), y2: Y(rq[0]) }));
    }
    group.append(svg("line", { class: "error", x1: X(fq[1]), x2: X(fq[2]), y1: Y(rq[0]), y2: Y(rq[0]) }));
    group.append(svg("line", { class: "error", x1: X(fq[0]), x2: X(fq[0]), y1: Y(rq[1]), y2: Y(rq[2]) }));
    group.append(svg("circle", { class: i === data.reference ? "hollow" : "dot", cx: X(fq[0]), cy: Y(rq[0]), r: 5.5 }));
    const [flip, wide] = [fq[0] > 0.6, 7 * data.runs[i].length];
    const left = X(fq[0]) + (flip ? -9 - wide : 9);
    // A name stands above or below its point, where no other name stands.
    const free = (y) => !taken.some((t) => Math.abs(t.y - y) < 13 && t.left < left + wide && left < t.left + t.wide);
    const y = [-9, 18, -23, 32, -37, 46].map((dy) => Y(rq[0]) + dy).find(free) ?? Y(rq[0]) - 9;
    taken.push({ left, wide, y });
    group.append(svg("text", { class: "name", x: X(fq[0]) + (flip ? -9 : 9), y, "text-anchor": flip ? "end" : "start" }, data.runs[i]));
    root.append(group);
  });
  return figure("Forget against retain quality, with 95 % intervals", root);
}

function attackPlot(data) {
  if (!data.attacks.length) return null;
  const holder = el("div", {});
  const names = Object.keys(data.attacks[0].values);
  const choice = el("select", { "aria-label": "what the bars show" }, names.map((name) => el("option", {}, name)));
  const draw = () => {
    const [bar, gap, left, width, top] = [9, 24, 8, 440, 18];
    const step = data.runs.length * bar + gap;
    const height = top + data.attacks.length * step + 10;
    const X = (v) => left + v * (width - left - 30);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img" });
    for (const v of [0, 0.25, 0.5, 0.75, 1]) {
      root.append(svg("line", { class: "grid", x1: X(v), x2: X(v), y1: top, y2: height - 6 }));
      root.append(svg("text", { x: X(v), y: 11, "text-anchor": "middle" }, whole(v)));
    }
    data.attacks.forEach((attack, row) => {
      const y0 = top + row * step;
      root.append(svg("text", { class: "name", x: left + 3, y: y0 + 13 }, attack.name));
      attack.values[choice.value].forEach((value, i) => {
        if (!value) return;
        const y = y0 + 18 + i * bar;
        const control = data.attacks[0].values[choice.value][i];
        root.append(
          svg("g", { class: color(i) }, svg("title", {}, `${data.runs[i]}, ${attack.name}: ${said(value)}`),
            svg("rect", { class: row ? "bar" : "bar control", x: X(0), y, width: Math.max(1, X(value[0]) - X(0)), height: bar - 2, rx: 1.5 }),
            svg("line", { class: "error thin", x1: X(value[1]), x2: X(value[2]), y1: y + bar / 2 - 1, y2: y + bar / 2 - 1 }),
            control && row ? svg("line", { class: "mark", x1: X(control[0]), x2: X(control[0]), y1: y - 1, y2: y + bar - 1 }) : null),
        );
      });
    });
    holder.replaceChildren(root);
  };
  choice.addEventListener("change", draw);
  draw();
  return figure("Attacks, in per cent; the tick on a bar is the same run asked plainly", choice, holder);
}

/** The outline of a histogram in per cent, from shares of equal bins. */
function outline(shares, X, Y, top) {
  const points = [[X(0), Y(0)]];
  shares.forEach((share, i) => points.push([X((top * i) / shares.length), Y(100 * share)], [X((top * (i + 1)) / shares.length), Y(100 * share)]));
  return [...points, [X(top), Y(0)]];
}

function membershipPlots(data) {
  const having = data.membership.map((m, i) => [m, i]).filter(([m]) => m);
  if (!having.length) return [];
  const { root, X, Y } = plot({ height: 260, xLabel: "false alarms, %", yLabel: "members found, %", form: whole });
  root.append(svg("line", { class: "rule", x1: X(0), x2: X(1), y1: Y(0), y2: Y(1) }));
  for (const [m, i] of having)
    root.append(svg("g", { class: color(i) }, svg("title", {}, `${data.runs[i]}${m.auc ? `: AUC ${said(m.auc)}` : ""}`),
      path(m.roc.map(([x, y]) => [X(x), Y(y)]), { class: i === data.reference ? "curve dashed" : "curve" })));
  const histograms = having.map(([m, i]) => {
    const high = Math.max(...m.members, ...m.others);
    const p = plot({ x: [0, m.top], y: [0, 100 * high], xLabel: "loss, nats a token", yLabel: "share, %" });
    p.root.append(svg("g", { class: color(i) }, path(outline(m.members, p.X, p.Y, m.top), { class: "area" })));
    p.root.append(path(outline(m.others, p.X, p.Y, m.top), { class: "curve other" }));
    return figure(el("span", {}, el("i", { class: `swatch ${color(i)}` }), `${data.runs[i]}: losses of the forget set (filled) and its paraphrase (line)`), p.root);
  });
  return [figure("Membership inference by loss: ROC", root), ...histograms];
}

function distributionPlots(data) {
  return data.distributions.map(({ name, shares }) => {
    const high = Math.max(...shares.filter(Boolean).flat());
    const { root, X, Y } = plot({ y: [0, 100 * high], xLabel: name.split(": ")[1], yLabel: "share, %" });
    shares.forEach((own, i) => {
      if (own) root.append(svg("g", { class: color(i) }, svg("title", {}, data.runs[i]), path(outline(own, X, Y, 1), { class: i === data.reference ? "curve dashed" : "curve" })));
    });
    return figure(name, root);
  });
}

function trainingPlots(data) {
  const found = [];
  for (const [kind, label] of [["steps", "step"], ["epochs", "epoch"], ["drift", "layer"]]) {
    const names = new Set(data.training.filter(Boolean).flatMap((t) => Object.keys(t[kind])));
    for (const name of names) {
      const lines = data.training.map((t) => t?.[kind][name]).map((points, i) => [points, i]).filter(([p]) => p && p.length > 1);
      if (!lines.length) continue;
      const values = (axis) => lines.flatMap(([points]) => points.map((p) => p[axis]));
      const range = (axis) => [Math.min(...values(axis)), Math.max(...values(axis))];
      const { root, X, Y } = plot({ width: 300, height: 170, x: range(0), y: range(1), xLabel: label, form: short });
      for (const [points, i] of lines)
        root.append(svg("g", { class: color(i) }, svg("title", {}, data.runs[i]), path(points.map(([x, y]) => [X(x), Y(y)]), { class: "curve" })));
      const said = { steps: "", epochs: "validation: ", drift: "weights of a layer, over their norm: " }[kind];
      found.push(figure(said + name.replaceAll("_", " "), root));
    }
  }
  return found;
}

function plots(data) {
  const part = (title, note, children) => {
    const own = children.filter(Boolean);
    return own.length ? [el("h2", {}, title), note ? el("p", {}, note) : null, el("div", { class: "plots" }, own)] : [];
  };
  document.getElementById("plots").replaceChildren(
    ...[
      part("Quality and attacks", null, [qualityPlot(data), attackPlot(data)]),
      part("Membership inference", null, membershipPlots(data)),
      part("Distributions", "Shares of the samples by twentieth; the reference is dashed.", distributionPlots(data)),
      part("Training", null, trainingPlots(data)),
    ].flat().filter(Boolean),
  );
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
  plots(data);
  answers(data);
  document.documentElement.dataset.ready = "yes";
}).catch((error) => {
  document.getElementById("plots").replaceChildren(el("p", {}, `This browser cannot show plots and answers (${error}).`));
});
