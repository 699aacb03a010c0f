// Line charts by uPlot. Charts of a group share cursor and zoom; a double click, or Escape, shows everything again.

import uPlot from "./vendor/uPlot.esm.js";
import { el, number } from "./dom.js";

export const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Charts with a shared cursor and zoom. */
export class ChartGroup {
  constructor() {
    this.charts = [];
    this.sync = uPlot.sync(`group-${Math.random()}`);
    this.range = null;
    this.observer = new ResizeObserver((entries) => {
      for (const { target } of entries) {
        const chart = this.charts.find((one) => one.root.parentElement === target);
        if (chart && Math.abs(chart.width - target.clientWidth) > 1) chart.setSize({ width: target.clientWidth, height: chart.height });
      }
    });
  }

  /** Show the steps (or times) from `low` to `high` in all charts; null shows everything. */
  zoom(range) {
    this.range = range;
    for (const chart of this.charts) {
      const xs = chart.data[0];
      if (!xs.length) continue;
      chart.setScale("x", range ? { min: range[0], max: range[1] } : { min: xs[0], max: xs[xs.length - 1] });
    }
    this.onzoom?.(range);
  }

  destroy() {
    this.observer.disconnect();
    for (const chart of this.charts) chart.destroy();
    this.charts = [];
  }

  /**
   * Return a figure. `lines` are {label, xs, ys, low, high, colour, dots, fade, names}; lines with low and high have a band, those
   * with dots are points alone, fade is from 0 to 1, and names are of the points. `markers` are {x, label, colour}. `x` names the
   * horizontal axis, whose places may have a name each (`places`) or be logarithmic (`log`).
   */
  figure(title, lines, { legend = true, ...options } = {}) {
    const { meaning = "" } = options;
    const known = lines.filter((line) => line.ys.some((y) => y !== null));
    const box = el("div", { class: "plot" });
    const last = (line) => { for (let i = line.ys.length - 1; i >= 0; i--) if (line.ys[i] !== null) return line.ys[i]; return null; };
    const summary = known.map((line) => {
      const numbers = line.ys.filter((y) => y !== null);
      return `${line.label}: last ${number(last(line))}, from ${number(Math.min(...numbers))} to ${number(Math.max(...numbers))}`;
    }).join("; ");
    const figure = el("figure", {},
      el("figcaption", { title: meaning }, el("b", {}, title),
        legend && el("span", { class: "legend" }, known.map((line, i) => el("span", { class: `key c${(line.colour ?? i) % 8 + 1}` }, known.length > 1 || line.label !== title ? `${line.label} ` : "", el("b", {}, number(last(line))))))),
      known.length ? box : el("p", { class: "hint" }, "no value yet"));
    if (!known.length) return figure;
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", `${title}. ${legend ? summary : meaning}`);
    queueMicrotask(() => requestAnimationFrame(() => box.isConnected && this.#draw(box, known, options)));
    return figure;
  }

  #draw(box, lines, { markers = [], height = 170, times = false, x = "step", places = null, log = false }) {
    const data = joined(lines), colours = lines.map((line, i) => css(COLOURS[(line.colour ?? i) % 8]) + opacity(line));
    const series = [{}], bands = [];
    lines.forEach((line, i) => {
      series.push({ label: line.label, stroke: colours[i], width: 1.6, spanGaps: true, points: { show: line.dots || line.xs.length < 3, size: 6 }, ...(line.dots && { paths: () => null }) });
    });
    lines.forEach((line, i) => {
      if (!line.low) return;
      const at = series.length;
      series.push({ stroke: "transparent", points: { show: false }, spanGaps: true }, { stroke: "transparent", points: { show: false }, spanGaps: true });
      bands.push({ series: [at + 1, at], fill: colours[i] + "2b" });
    });
    const axis = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1 }, font: "11px system-ui" };
    const chart = new uPlot({
      width: box.clientWidth, height, series, bands, legend: { show: false },
      scales: { x: { time: times, distr: log ? 3 : 1, ...(places ? { range: [-0.4, places.length - 0.6] } : lines.some((line) => line.dots) && { range: (_, low, high) => around(low, high, log) }) }, y: { range: (_, low, high) => extent(low, high) } },
      axes: [{ ...axis, size: times || places ? 42 : 28, values: times ? undefined : (_, values) => labels(values), ...(places && named(places)) },
        { ...axis, size: (_, texts) => Math.max(52, 18 + 7 * Math.max(0, ...(texts || []).map((text) => text.length))), values: (_, values) => labels(values) }],
      cursor: { sync: { key: this.sync.key }, drag: { x: true, y: false }, focus: { prox: 24 } },
      hooks: {
        setSelect: [(u) => { if (u.select.width > 4) { this.zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); u.setSelect({ width: 0, height: 0 }, false); } }],
        setCursor: [(u) => tip(u, box, lines, times, x, places)],
        draw: [(u) => drawMarkers(u, markers)],
      },
    }, data, box);
    chart.over.addEventListener("dblclick", () => this.zoom(null));
    this.charts.push(chart);
    this.observer.observe(box);
    if (this.range) chart.setScale("x", { min: this.range[0], max: this.range[1] });
  }
}

/** Return the texts of an axis's ticks, with as many digits as the distance between two ticks needs. */
export function labels(values) {
  const numbers = values.filter((v) => v !== null), largest = Math.max(0, ...numbers.map(Math.abs));
  const exponent = largest >= 1e4 || (largest && largest < 1e-3);
  const text = (v, digits) => (exponent && v ? v.toExponential(digits - 1) : String(Number(v.toPrecision(digits))));
  const error = numbers.length > 1 ? Math.min(...numbers.slice(1).map((v, i) => Math.abs(v - numbers[i]))) / 20 : largest / 1e4;
  let digits = 1;
  while (digits < 15 && !numbers.every((v) => Math.abs(Number(text(v, digits)) - v) < error)) digits++;
  return values.map((v) => (v === null ? "" : text(v, digits)));
}

/** Return the limits of a vertical axis; around one value they are near it, and 0 has an axis to 1. */
export function extent(low, high) {
  if (low === null || low === high) return low ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : [0, 1];
  return uPlot.rangeNum(low, high, 0.1, true);
}

/** Return the limits of a horizontal axis on which whole points are visible at both ends. */
function around(low, high, log) {
  if (low === null) return [log ? 1 : 0, log ? 10 : 1];
  if (log) { const factor = low === high ? 2 : (high / low) ** 0.03; return [low / factor, high * factor]; }
  const margin = 0.03 * (high - low) || 1;
  return [low - margin, high + margin];
}

/** Return how opaque a line is, as the end of its colour. */
function opacity(line) {
  return line.fade ? Math.round(255 * (1 - line.fade)).toString(16).padStart(2, "0") : "";
}

/** Return the part of an axis whose positions 0, 1, … have names; if there are many, every other one is a line lower. */
function named(places) {
  const lower = (i) => (places.length > 2 && i % 2 ? "\n" : "");
  return { splits: () => places.map((_, i) => i), values: (_, splits) => splits.map((i) => lower(i) + places[i]) };
}

/** Return the columns of lines over all their positions. */
function joined(lines) {
  const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
  const index = new Map(xs.map((x, i) => [x, i]));
  const column = (line, ys) => { const out = Array(xs.length).fill(null); line.xs.forEach((x, i) => { out[index.get(x)] = ys[i]; }); return out; };
  const data = [xs, ...lines.map((line) => column(line, line.ys))];
  for (const line of lines) if (line.low) data.push(column(line, line.low), column(line, line.high));
  return data;
}

function tip(u, box, lines, times, xName, places) {
  const at = u.cursor.idx;
  let note = box.querySelector(".tip");
  if (at === null || at === undefined || u.cursor.left < 0) { note?.remove(); return; }
  if (!note) { note = el("div", { class: "tip" }); box.append(note); }
  const x = u.data[0][at];
  const label = (line) => (line.names ? `${line.names[line.xs.indexOf(x)]} ` : lines.length > 1 ? `${line.label} ` : "");
  note.replaceChildren(el("b", {}, times ? new Date(x * 1000).toLocaleString() : places?.[x] ?? `${xName} ${number(x)}`),
    ...lines.map((line, i) => line.names && u.data[i + 1][at] === null ? "" : el("span", {}, ` ${label(line)}${number(u.data[i + 1][at])}`)));
}

function drawMarkers(u, markers) {
  const { ctx, bbox } = u;
  ctx.save();
  for (const { x, colour } of markers) {
    if (x < u.scales.x.min || x > u.scales.x.max) continue;
    const left = u.valToPos(x, "x", true);
    ctx.strokeStyle = css(colour);
    ctx.setLineDash([3, 3]);
    ctx.beginPath(); ctx.moveTo(left, bbox.top); ctx.lineTo(left, bbox.top + bbox.height); ctx.stroke();
  }
  ctx.restore();
}

/** Return values that follow a curve more slowly: s = w·s + (1 − w)·y, corrected for its start. */
export function smoothed(ys, weight) {
  if (!weight) return ys;
  let sum = 0, norm = 0;
  return ys.map((y) => { if (y === null) return null; sum = weight * sum + (1 - weight) * y; norm = weight * norm + (1 - weight); return sum / norm; });
}
