// One run: its curves with shared zoom, smoothing, steps or time on the axis, and markers of events.

import { el, replace, card, number } from "../dom.js";
import * as api from "../api.js";
import { ChartGroup, smoothed } from "../charts.js";
import { actions } from "./runs.js";

const CHARTS = [
  ["Reward", ["reward"], "mean total reward of the batch; the band spans the least to the greatest step of a point"],
  ["Reward by function", ["reward/*"], "mean of each reward function", "reward/"],
  ["Logged by rewards", ["logged/*"], "values that reward functions gave to log_metric", "logged/"],
  ["Quantiles of rewards", ["reward_p10/*", "reward_p50/*", "reward_p90/*"], "10th, 50th and 90th percentile over completions", "reward_"],
  ["Evaluation", ["reward", "accuracy", "loss", "pass@*"], "held-out prompts, by version", "", "evaluation"],
  ["Loss", ["loss"], "the objective's loss"],
  ["Completion length", ["completion_length", "completion_length/p50", "completion_length/p99"], "tokens"],
  ["Groups without contrast", ["zero_variance_fraction", "truncated_fraction", "zero_advantage_fraction"], "shares of groups and completions that teach little"],
  ["KL", ["kl", "kl_behaviour", "kl_reference"], "divergence from the sampler and from the reference"],
  ["Entropy", ["entropy"], "mean entropy of the policy's tokens"],
  ["Ratio", ["ratio_behaviour", "ratio"], "probability of tokens now over that when they were sampled; 1 is on-policy"],
  ["Effective sample size", ["effective_sample_size", "effective_sample_size_sequence"], "share of the batch that remains effective under the correction's weights"],
  ["Clipping", ["clip_fraction", "truncation_fraction"], "share of tokens whose ratio was clipped or truncated"],
  ["Gradient norm", ["grad_norm"], "before it is clipped"],
  ["Learning rate", ["lr"], ""],
  ["Age", ["age"], "mean age of tokens, in steps"],
];
const MARKS = { session: ["--c2", "session"], checkpoint: ["--c3", "checkpoint"], member: ["--c5", "member"], warning: ["--c4", "warning"] };

export async function show(context) {
  const { run: runId, main, signal } = context;
  const options = { smooth: 0, times: false, marks: true };
  let group = new ChartGroup(), data = null, newest = -1, range = null;
  const charts = el("div", { class: "charts" }), head = el("div"), events = el("div");
  const choice = (label, input) => el("label", {}, label, input);
  const tools = el("div", { class: "tools", role: "toolbar", "aria-label": "Charts" },
    choice("Smoothing ", el("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: "0", "aria-label": "Smoothing", oninput: (e) => { options.smooth = Number(e.target.value); draw(); } })),
    choice("Axis ", el("select", { "aria-label": "Axis", onchange: (e) => { options.times = e.target.value === "time"; range = null; draw(); } }, el("option", { value: "steps" }, "steps"), el("option", { value: "time" }, "time"))),
    choice("Markers ", el("input", { type: "checkbox", checked: true, onchange: (e) => { options.marks = e.target.checked; draw(); } })),
    el("button", { class: "small", onclick: () => group.zoom(null) }, "Show all"),
    el("span", { class: "hint" }, "drag in a chart to zoom, double click to leave"));

  const load = async () => {
    const { run } = await api.runs("Get", { runId }, signal);
    replace(head, el("h1", {}, runId), el("p", {}, el("span", { class: `state ${api.state(run)}` }, api.state(run)), ` step ${number(Number(run.step))} of ${number(Number(run.maxNumSteps))} `,
      el("a", { href: context.link("samples", runId) }, "samples"), " · ", el("a", { href: context.link("flow", runId) }, "flow"), " · ", el("a", { href: context.link("books", runId) }, "books")),
      run.message && el("p", { class: "message" }, run.message), actions(context, run, api.state(run), load));
    if (Number(run.step) === newest && data) return;
    newest = Number(run.step);
    const names = [...new Set(CHARTS.filter((c) => c[4] !== "evaluation").flatMap((c) => c[1]))];
    const [steps, evaluations, marks] = await Promise.all([
      api.series(runId, names, { maxPoints: 500 }, signal),
      api.series(runId, ["reward", "accuracy", "loss", "pass@*"], { kind: "evaluation" }, signal),
      api.records("ListEvents", { runId, kinds: Object.keys(MARKS), newest: true, pageSize: 200 }, signal),
    ]);
    data = { steps, evaluations, marks: marks.events };
    draw();
  };

  const draw = () => {
    if (!data) return;
    const kept = range;
    group.destroy();
    group = new ChartGroup();
    group.onzoom = (next) => { range = next; };
    const timeOf = new Map(data.steps.steps.map((step, i) => [step, data.steps.times[i]]));
    const hasTimes = options.times && data.steps.times.some((t) => !Number.isNaN(t));
    if (options.times && !hasTimes) context.say("the steps of this run have no recorded times");
    const at = (step) => (hasTimes ? timeOf.get(step) ?? nearest(data.steps, step) : step);
    const markers = options.marks ? data.marks.map((event) => ({ x: at(Number(event.atStep)), colour: MARKS[event.kind][0] })) : [];
    replace(charts, CHARTS.map(([title, patterns, meaning, prefix = "", kind = "step"]) => {
      const from = kind === "step" ? data.steps : data.evaluations;
      const lines = Object.keys(from.values).filter((name) => patterns.some((p) => (p.endsWith("*") ? name.startsWith(p.slice(0, -1)) : p === name))).slice(0, 8)
        .map((name) => ({
          label: name.replace(prefix, ""), xs: from.steps.map(at), ys: smoothed(from.values[name], options.smooth),
          low: patterns.length === 1 && !patterns[0].includes("*") ? from.least[name] : undefined, high: from.greatest[name],
        }));
      if (!lines.length) return null;
      return group.figure(title, lines, { meaning, markers, times: hasTimes });
    }));
    if (kept) { group.range = kept; range = kept; }
    replace(events, card("What happened", data.marks.length ? el("ul", { class: "events", tabindex: "0" }, data.marks.slice(-40).reverse().map((event) => {
      const content = JSON.parse(event.json), [colour, name] = MARKS[event.kind];
      const text = content.message || content.what && `${content.member_id} ${content.what}` || content.path || `session ${content.session} of ${content.member_id || "the learner"}`;
      return el("li", {}, el("span", { class: `dot d${colour.slice(-1)}` }), el("b", {}, `${name} `), `at step ${event.atStep}: ${text}`);
    })) : el("p", { class: "hint" }, "nothing yet")));
  };
  replace(main, head, tools, charts, events);
  main.addEventListener("showall", () => group.zoom(null), { signal });
  context.onstop(() => group.destroy());
  await load();
  context.every(3, load);
}

function nearest(steps, step) {
  let best = NaN;
  steps.steps.forEach((s, i) => { if (s <= step) best = steps.times[i]; });
  return best;
}
