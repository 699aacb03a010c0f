// The page's frame: the header with its links, one view at a time by `#/view/run?query`, and keys 1 to 8 for the views.

import { el, replace } from "./dom.js";
import * as api from "./api.js";

const VIEWS = ["runs", "run", "flow", "samples", "books", "compare", "members", "spec"];
const OF_RUN = new Set(["run", "flow", "samples", "books", "compare", "spec"]);
const header = document.getElementById("header"), main = document.getElementById("main"), status = document.getElementById("status");
let current = null, latestRun = "";

export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, run] = path.split("/").map(decodeURIComponent);
  return { view: VIEWS.includes(view) ? view : "runs", run: run || "", query: new URLSearchParams(query || "") };
}

export function link(view, run = "", query = "") {
  const text = query ? new URLSearchParams(query).toString() : "";
  return `#/${view}${run ? `/${encodeURIComponent(run)}` : ""}${text ? `?${text}` : ""}`;
}

export function say(text) { status.textContent = text; }

function theme(next) {
  const root = document.documentElement, stored = localStorage.getItem("paceline theme");
  const name = next || stored || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (next) localStorage.setItem("paceline theme", next);
  root.dataset.theme = name;
  return name;
}

function drawHeader({ view, run }) {
  const target = (name) => link(name, OF_RUN.has(name) ? run || latestRun : "");
  replace(header,
    el("a", { class: "brand", href: "#/runs" }, "Paceline"),
    el("nav", { "aria-label": "Views" }, VIEWS.map((name, i) => el("a", {
      href: target(name), "aria-current": name === view ? "page" : null, title: `key ${i + 1}`,
    }, name[0].toUpperCase() + name.slice(1)))),
    run && OF_RUN.has(view) ? el("span", { class: "of" }, run) : null,
    el("button", { class: "small", "aria-label": "Light or dark", onclick: () => { theme(theme() === "dark" ? "light" : "dark"); show(); } }, "◐"));
}

async function show() {
  current?.stop();
  const here = route(), abort = new AbortController(), timers = [], stops = [];
  const context = {
    ...here, main, link, say, signal: abort.signal, role: api.role,
    every(seconds, call) { timers.push(setInterval(() => { if (!document.hidden) guarded(call); }, seconds * 1000)); },
    onstop(call) { stops.push(call); },
  };
  const guarded = async (call) => {
    try { await call(); say(""); } catch (error) { if (error.name !== "AbortError") say(error.message); }
  };
  main.setAttribute("aria-busy", "true");
  delete main.dataset.shown;
  current = { stop() { abort.abort(); timers.forEach(clearInterval); stops.forEach((stop) => stop()); } };
  try {
    if (OF_RUN.has(here.view) && !here.run) {
      const [newest] = await api.listRuns(abort.signal);
      if (!newest) { location.hash = "#/runs"; return; }
      location.replace(link(here.view, newest.runId));
      return;
    }
    latestRun = here.run || latestRun;
    drawHeader(here);
    document.title = `${here.run ? `${here.run} · ` : ""}${here.view} · Paceline`;
    const module = await import(`./views/${here.view}.js`);
    if (abort.signal.aborted) return;
    replace(main, el("p", { class: "hint" }, "Loading …"));
    await module.show(context);
    if (abort.signal.aborted) return;
    shown();
    say("");
  } catch (error) {
    if (error.name === "AbortError") return;
    drawHeader(here);
    replace(main, el("section", { class: "card" }, el("h1", {}, "This cannot be shown"), el("p", {}, error.message),
      error.code === "unauthenticated" ? keyForm() : el("button", { onclick: show }, "Try again")));
    shown();
  }
}

function shown() {
  main.removeAttribute("aria-busy");
  main.dataset.shown = location.hash;
}

function keyForm() {
  const input = el("input", { type: "password", autocomplete: "off", "aria-label": "Key or token", size: "40" });
  const enter = async (event) => { event.preventDefault(); api.setKey(input.value); await start(); };
  return el("form", { onsubmit: enter },
    el("p", {}, "Open the link that `paceline up` or `paceline serve dashboard` has printed, or enter its key or the coordinator's token."),
    input, el("button", {}, "Enter"));
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  const view = VIEWS[Number(event.key) - 1];
  if (view) location.hash = link(view, OF_RUN.has(view) ? latestRun : "");
  if (event.key === "/") { const field = main.querySelector("input"); if (field) { event.preventDefault(); field.focus(); } }
  if (event.key === "Escape") main.dispatchEvent(new CustomEvent("showall"));
});

async function start() {
  try { await api.session(); } catch { /* the view says why */ }
  await show();
}

api.takeKey();
theme();
addEventListener("hashchange", () => { if (/^#key=/.test(location.hash)) { api.takeKey(); start(); } else { show(); main.focus({ preventScroll: true }); } });
start();
