// All runs: state, progress, reward with its curve, age, speed, place in the queue; pause, resume and cancel.

import { el, replace, svg, number, counted, duration } from "../dom.js";
import * as api from "../api.js";

const MEASURES = ["reward", "loss"], NAMES = ["reward", "loss", "age", "rollout/tokens_per_s", "step_s", "endpoint_cost/*"];

export async function show(context) {
  replace(context.main, el("h1", {}, "Runs"), el("p", { class: "hint" }, "Loading …"));
  const cache = new Map();
  const draw = async () => {
    const found = await api.listRuns(context.signal);
    const shown = found.slice(0, 50);
    const rows = [];
    for (const run of shown) rows.push(await row(context, run, cache, draw));
    replace(context.main, el("h1", {}, "Runs"),
      found.length ? el("div", { class: "runs" }, rows) : el("p", { class: "hint" }, "No run yet; `paceline submit spec.yaml` queues one."),
      found.length > shown.length && el("p", { class: "hint" }, `The newest ${shown.length} of ${found.length} runs.`));
  };
  await draw();
  context.every(3, async () => { if (!context.main.querySelector("dialog[open]")) await draw(); });
}

async function row(context, run, cache, redraw) {
  const state = api.state(run), total = Number(run.maxNumSteps), step = Number(run.step);
  const key = `${run.runId} ${step}`;
  if (!cache.has(key) && step) cache.set(key, await api.series(run.runId, NAMES, { maxPoints: 60 }, context.signal));
  const s = cache.get(key), last = (name) => s?.values[name]?.findLast((v) => v !== null);
  const measure = MEASURES.find((name) => s?.values[name]);
  const waiting = ["admitted", "leased", "generated", "scored", "batched"].reduce((n, name) => n + Number(run.groups[name] || 0), 0);
  const cost = Object.entries(s?.values || {}).filter(([n]) => n.startsWith("endpoint_cost/")).flatMap(([, v]) => v).reduce((a, b) => a + (b || 0) * (s.width || 1), 0);
  return el("article", { class: "card run" },
    el("header", {}, el("h2", {}, el("a", { href: context.link("run", run.runId) }, run.runId)), el("span", { class: `state ${state}` }, state),
      state === "queued" && el("span", { class: "hint" }, `place ${run.queuePlace} in the queue`)),
    el("progress", { max: total || 1, value: step, "aria-label": `${step} of ${total} steps` }),
    el("dl", { class: "facts" },
      fact("step", `${number(step)} of ${number(total)}`),
      measure && fact(measure, number(last(measure))),
      last("age") !== undefined && fact("age", counted(last("age"), "step", 2)),
      last("rollout/tokens_per_s") !== undefined && fact("sampling", `${number(last("rollout/tokens_per_s"))} tok/s`),
      last("step_s") !== undefined && fact("step takes", `${number(last("step_s"), 2)} s`),
      waiting > 0 && fact("open groups", number(waiting)),
      Number(run.tokens.trained) > 0 && fact("trained", counted(run.tokens.trained, "token")),
      cost > 0 && fact("cost of judges", number(cost)),
      fact("submitted", `${duration(run.ageS, true)} ago`)),
    measure && spark(s.values[measure], measure),
    run.message && el("p", { class: "message" }, run.message),
    run.warnings.length > 0 && el("details", {}, el("summary", {}, `${counted(run.warnings.length, "warning")} about the spec`), el("ul", {}, run.warnings.map((w) => el("li", {}, w)))),
    actions(context, run, state, redraw));
}

const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));

export function spark(values, name) {
  const known = values.map((v, i) => [i, v]).filter(([, v]) => v !== null);
  if (known.length < 2) return null;
  const low = Math.min(...known.map(([, v]) => v)), high = Math.max(...known.map(([, v]) => v));
  const points = known.map(([i, v]) => `${(i / (values.length - 1) * 240).toFixed(1)},${(34 - (v - low) / (high - low || 1) * 30).toFixed(1)}`);
  return svg("svg", { viewBox: "0 0 240 38", class: "spark", role: "img", "aria-label": `${name} from ${number(known[0][1])} to ${number(known.at(-1)[1])}`, preserveAspectRatio: "none" },
    svg("polyline", { points: points.join(" ") }));
}

export function actions(context, run, state, redraw) {
  if (context.role !== "operator" || api.ended(run)) return null;
  const act = (method, label, question) => el("button", {
    class: method === "Cancel" ? "danger small" : "small",
    onclick: async () => {
      if (question && !(await confirmed(question, label))) return;
      try { await api.runs(method, { runId: run.runId }); await redraw(); } catch (error) { context.say(error.message); }
    },
  }, label);
  return el("p", { class: "actions" },
    state === "running" && act("Pause", "Pause"),
    state === "paused" && act("Resume", "Resume"),
    act("Cancel", "Cancel", `Cancel ${run.runId}? This cannot be undone; its open groups are dropped, and checkpoints stay.`));
}

function confirmed(question, label) {
  return new Promise((resolve) => {
    const done = (answer) => { dialog.close(); dialog.remove(); resolve(answer); };
    const dialog = el("dialog", { oncancel: () => done(false) }, el("p", {}, question),
      el("p", { class: "actions" }, el("button", { onclick: () => done(false), autofocus: true }, "Keep it"),
        el("button", { class: "danger", onclick: () => done(true) }, label)));
    document.getElementById("main").append(dialog);
    dialog.showModal();
  });
}
