// Elements of the page. Text from elsewhere becomes text nodes only, with visible control characters: nothing here parses
// markup, so a completion cannot run in the page.

const UNSAFE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\u2028\u2029\ufeff]/g;

/** Return a text with visible control characters and overrides of direction. */
export function visible(text) {
  return String(text).replace(UNSAFE, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
}

/** Return an element with attributes, listeners (`onclick: f`) and children, which are elements or texts. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  add(element, children);
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  add(element, children);
  return element;
}

const isNumber = (cell) => typeof cell === "number" || /^-?[\d,.]+(e[-+]?\d+)?%?$/.test(cell), isBlank = (cell) => ["", "–", null, undefined].includes(cell);

/** Return a table with a caption for screen readers; cells are texts or elements. A column of numbers alone is aligned right; a single short word is not broken. */
export function table(caption, head, rows, empty = "Nothing is recorded yet.") {
  if (!rows.length) return el("p", { class: "hint" }, empty);
  const right = head.map((_, i) => rows.some((row) => isNumber(row[i])) && rows.every((row) => isNumber(row[i]) || isBlank(row[i])));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", { class: "sr" }, caption),
      el("thead", {}, el("tr", {}, head.map((name, i) => el("th", { scope: "col", class: right[i] && "num" }, name)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) =>
        el("td", { class: right[i] ? "num" : /^\S{1,16}$/.test(cell) ? "word" : "" },
          typeof cell === "number" ? number(cell) : cell)))))));
}

/** Return a text with the first `limit` characters, and a button that shows the rest. */
export function longText(text, limit = 4000) {
  const shown = el("pre", { class: "text", dir: "ltr", tabindex: "0" }, text.slice(0, limit));
  if (text.length <= limit) return shown;
  const button = el("button", { class: "small", onclick: () => { replace(shown, text); button.remove(); } },
    `show all ${text.length.toLocaleString("en")} characters`);
  return el("div", {}, shown, button);
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(Number(value))) return "–";
  const v = Number(value);
  if (Number.isInteger(v)) return v.toLocaleString("en");
  const size = Math.abs(v);
  return size >= 1000 ? Math.round(v).toLocaleString("en") : size < 1e-3 && v ? v.toExponential(2) : String(Number(v.toPrecision(digits)));
}

/** Return a number with its noun, such as "1 step" and "2 steps". */
export const counted = (value, noun, digits = 4) => `${number(value, digits)} ${noun}${Number(value) === 1 ? "" : "s"}`;

/** Return a duration in words; `short` leaves out the smaller unit. */
export function duration(seconds, short = false) {
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (short && s < 172800) return s < 3600 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 3600)} h`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return s < 172800 ? `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min` : `${Math.floor(s / 86400)} days`;
}

export function card(title, ...children) {
  return el("section", { class: "card" }, title && el("h2", {}, title), children);
}
