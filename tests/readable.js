// What keeps a reader with weak eyes or without a mouse from a page, a line each; drawings are not looked at.
(() => {
  const all = (wanted) => [...document.querySelectorAll(wanted)].filter((e) => !e.closest("svg *") && e.checkVisibility());
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  // Relative luminance and contrast as the Web Content Accessibility Guidelines 2 define them.
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (color) => color.slice(0, 3).reduce((sum, v, i) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    const color = e ? rgba(getComputedStyle(e).backgroundColor) : [255, 255, 255, 255];
    return color[3] === 255 ? color : ground(e.parentElement);
  };
  const contrast = (e) => {
    const [dark, bright] = [light(rgba(getComputedStyle(e).color)), light(ground(e))].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  const written = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const named = (e) => (e.getAttribute("aria-label") || e.textContent || e.closest("label")?.textContent || "").trim();
  const cut = (e) => /auto|scroll/.test(getComputedStyle(e).overflow) && (e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight);
  const names = all("[id]").map((e) => e.id);
  const levels = all("h1, h2, h3, h4, h5, h6").map((e) => +e.tagName[1]);
  const problem = (what, elements) => elements.map((e) => `${what}: ${e.outerHTML.slice(0, 120)}`);
  return [
    ...problem("contrast below 4.5", all("body *").filter((e) => written(e) && !e.disabled && contrast(e) < 4.5)),
    ...problem("no name", all("a, button, select, input, summary").filter((e) => !named(e))),
    ...problem("scrolls, but not by the keyboard", all("body *").filter((e) => cut(e) && e.tabIndex < 0)),
    ...problem("changes the order of focus", all("[tabindex]").filter((e) => e.tabIndex > 0)),
    ...problem("a head of a table without scope", all("th").filter((e) => !e.scope || !e.textContent.trim())),
    ...names.filter((name, i) => names.indexOf(name) !== i).map((name) => `twice: #${name}`),
    ...levels.filter((level, i) => level > (levels[i - 1] ?? 0) + 1).map((level) => `a heading skips a level: h${level}`),
    ...(document.documentElement.lang && all("main").length === 1 ? [] : ["no language or no main part"]),
  ];
})();
