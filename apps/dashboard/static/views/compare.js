// Runs over each other: curves, the keys in which their specs differ, and the same prompts under both.

import { el, replace, card, table, number } from "../dom.js";
import * as api from "../api.js";
import { ChartGroup } from "../charts.js";

const METRICS = ["reward", "loss", "completion_length", "entropy", "kl_behaviour", "age", "grad_norm", "step_s"];
const MAX_RUNS = 8;

export async function show(context) {
  const { run: runId, main, signal, query } = context;
  replace(main, el("h1", {}, `Compare ${runId}`), el("p", { class: "hint" }, "Loading …"));
  const all = await api.listRuns(signal);
  const others = (query.get("with") || "").split(",").filter((id) => all.some((run) => run.runId === id));
  if (!query.has("with")) { const next = all.find((run) => run.runId !== runId); if (next) others.push(next.runId); }
  const chosen = [runId, ...others].slice(0, MAX_RUNS);
  const group = new ChartGroup();
  context.onstop(() => group.destroy());
  const pick = (id, on) => { const rest = on ? [...others, id] : others.filter((other) => other !== id); location.hash = context.link("compare", runId, { with: rest.join(",") }); };
  const charts = el("div", { class: "charts" }), rest = el("div");
  replace(main, el("h1", {}, `Compare ${runId}`),
    el("fieldset", { class: "tools" }, el("legend", {}, "with"), all.filter((run) => run.runId !== runId).slice(0, 40).map((run) => el("label", {}, el("input", { type: "checkbox", checked: others.includes(run.runId), onchange: (e) => pick(run.runId, e.target.checked) }), ` ${run.runId}`))), charts, rest);
  if (chosen.length < 2) { replace(rest, el("p", { class: "hint" }, "There is no other run to compare with.")); }
  const found = await Promise.all(chosen.map((id) => api.series(id, METRICS, { maxPoints: 300 }, signal)));
  replace(charts, METRICS.map((name) => {
    const lines = chosen.map((id, i) => ({ label: id, xs: found[i].steps, ys: found[i].values[name] || [], colour: i })).filter((line) => line.ys.length);
    return lines.length ? group.figure(name, lines) : null;
  }));
  for (const other of others) {
    const { differences } = await api.records("CompareSpecs", { runId, otherRunId: other }, signal);
    rest.append(card(`Specs of ${runId} and ${other}`, table("Differences of the specs", ["key", runId, other], differences.map((d) => [d.path, d.valueJson || "–", d.otherJson || "–"]), "The specs are the same.")));
  }
  if (others.length) rest.append(await prompts(runId, others[0], signal));
}

/** Show prompts of the last step of a run, and the other run's answers to them. */
async function prompts(runId, other, signal) {
  const read = async (id) => {
    if (!Number((await api.records("GetBooks", { runId: id }, signal)).groups.trained || 0)) return [];
    try { return (await api.records("ListSamples", { runId: id, newestFirst: true, pageSize: 64 }, signal)).groups; } catch (error) { if (error.name === "AbortError") throw error; return []; }
  };
  const [ours, theirs] = await Promise.all([read(runId), read(other)]);
  const byPrompt = new Map(theirs.map((group) => [group.promptJson, group]));
  const both = ours.filter((group) => byPrompt.has(group.promptJson)).slice(0, 10);
  const cell = (group) => el("div", {}, el("b", {}, `step ${group.step}, reward ${number(group.reward)}`), group.completions.slice(0, 2).map((c) => el("pre", { class: "text" }, c.text.slice(0, 500))));
  return card(`The same prompts in the last steps of both`, table("The same prompts", ["prompt", runId, other], both.map((group) => [el("pre", { class: "text" }, promptText(group.promptJson).slice(0, 500)), cell(group), cell(byPrompt.get(group.promptJson))]), "The last groups of both runs have no prompt in common."));
}

export function promptText(json) {
  try {
    const prompt = JSON.parse(json);
    return typeof prompt === "string" ? prompt : prompt.map((m) => `[${m.role}] ${m.content ?? ""}`).join("\n");
  } catch { return json; }
}
