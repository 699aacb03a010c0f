// The pools as a picture, the waits between them, the learner's time, the age of tokens, and the way of versions.

import { el, replace, svg, card, number, counted, table } from "../dom.js";
import * as api from "../api.js";
import { ChartGroup } from "../charts.js";

const NAMES = ["rollout/*", "reward_workers/*", "environment_workers/*", "learner_wait_s", "step_s", "forward_s", "backward_s", "optimizer_s", "frozen_s",
  "publish_wait_s", "groups/*", "age/*", "weights/*", "wait_fraction", "trained_tokens", "unfilled_fraction"];

export async function show(context) {
  const { run: runId, main, signal } = context;
  const group = new ChartGroup(), pools = new ChartGroup();
  context.onstop(() => { group.destroy(); pools.destroy(); });
  const picture = el("div"), rest = el("div", { class: "charts" }), use = el("div", { class: "charts" });
  replace(main, el("h1", {}, `Flow of ${runId}`), picture, use, rest);
  const { keys } = await api.records("GetSpec", { runId }, signal);
  const named = Number(keys.find((key) => key.path === "cluster.rollout_workers")?.valueJson || 0); // if no member is connected
  let newest = -1, drawn = 0;
  const draw = async () => {
    const [{ run }, { members }, books] = await Promise.all([
      api.runs("Get", { runId }, signal), api.records("ListGauges", {}, signal), api.records("GetBooks", { runId }, signal)]);
    if (Number(run.step) !== newest) {
      newest = Number(run.step);
      draw.series = await api.series(runId, NAMES, { maxPoints: 300 }, signal);
      charts(group, rest, draw.series, members);
    }
    if (Date.now() - drawn > 10000) {
      drawn = Date.now();
      utilisation(pools, use, await history(draw.series, run, signal));
    }
    const status = members.length && api.state(run) === "running" ? await api.status(signal) : null;
    replace(picture, flow(run, members, books, draw.series, named, status?.runId === runId ? status.advice : ""));
  };
  await draw();
  context.every(2, draw);
}

/** Return the mean of a metric's last points; undefined without any. */
function recent(series, name, points = 20) {
  const known = (series.values[name] || []).filter((v) => v !== null).slice(-points);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : undefined;
}

/** Name the pool that limited a run which no coordinator trains now. */
export function limit(series, workers) {
  const wait = recent(series, "learner_wait_s"), step = recent(series, "step_s");
  if (wait === undefined || step === undefined) return "The learner has not trained enough steps to tell which pool limits the run.";
  const share = wait / (wait + step), sum = recent(series, "rollout/wait_fraction"), idle = sum === undefined || !workers ? undefined : sum / workers;
  if (share > 0.25) {
    const scoring = recent(series, "groups/generated") || 0, leased = recent(series, "groups/leased") || 0;
    return scoring > leased
      ? `Reward workers limit the run: the learner waits ${Math.round(share * 100)} % of its time, and ${counted(scoring, "group")} ${scoring === 1 ? "waits" : "wait"} for scores.`
      : `Rollout workers limit the run: the learner waits ${Math.round(share * 100)} % of its time for groups.`;
  }
  if (idle !== undefined && idle > 0.25) return `The learner limits the run: rollout workers wait ${Math.round(idle * 100)} % of their time, because further groups would become too old.`;
  return `Pools are balanced: the learner waits ${Math.round(share * 100)} % of its time${idle === undefined ? "" : `, rollout workers ${Math.round(idle * 100)} %`}.`;
}

/** Return the pools' gauges while the run trained. */
async function history(series, run, signal) {
  const known = series.times.filter((t) => Number.isFinite(t));
  if (!known.length) return null;
  const begin = known[0] - 60, end = api.ended(run) ? known[known.length - 1] + 10 : 0;
  return api.records("GetGaugeHistory", { fromTime: begin, toTime: end, maxPoints: 300 }, signal);
}

/** Draw for each pool the shares of the time in which it worked, waited, took weights and was away. */
function utilisation(group, into, answer) {
  group.destroy();
  const shares = { ROLLOUT: ["Rollout workers [share of the time]", [["working", "generate"], ["waiting", "wait for admission"], ["updating", "update weights"], ["away", "away"]]],
    REWARD: ["Reward workers [share of the time]", [["working", "score"], ["waiting", "wait"], ["away", "away"]]],
    ENVIRONMENT: ["Environment workers [share of the time]", [["working", "run episodes"], ["waiting", "wait"], ["away", "away"]]] };
  const series = answer?.series || [], xs = (answer?.times || []).map(Number);
  const values = (one) => (one?.values || []).map((v) => (Number.isNaN(Number(v)) ? null : Number(v)));
  const figures = Object.entries(shares).filter(([pool]) => series.some((one) => one.pool === pool.toLowerCase())).map(([pool, [title, names]]) => {
    const lines = names.map(([name, label], colour) => ({ label, colour, xs, ys: values(series.find((one) => one.pool === pool.toLowerCase() && one.name === name)) }));
    return group.figure(title, lines.filter((line) => line.ys.length), { times: true, meaning: "read every five seconds, mean over the pool's workers; the four add up to 1" });
  });
  replace(into, figures);
}

function flow(run, members, books, series, named, advice) {
  const groups = books.groups, count = (role) => members.filter((m) => m.role === `ROLE_${role}`).length;
  const live = members.length > 0, workers = count("ROLLOUT") || named;
  const pools = [
    ["Rollout", live ? counted(count("ROLLOUT"), "worker") : "", `${number(recent(series, "rollout/tokens_per_s", 5))} tok/s`],
    ["Reward", live ? counted(count("REWARD"), "worker") : "", `${counted(recent(series, "reward_workers/groups_since_report", 5), "group")} a report`],
    ["Learner", live ? counted(count("LEARNER"), "rank") : "", `${number(recent(series, "step_s", 5))} s a step`],
  ];
  const queues = [["admitted and leased", Number(groups.admitted || 0) + Number(groups.leased || 0)], ["wait for scores", Number(groups.generated || 0)], ["wait for a batch", Number(groups.scored || 0) + Number(groups.batched || 0)]];
  const ended = [["trained", Number(groups.trained || 0)], ["dropped", Object.entries(groups).filter(([n]) => n.startsWith("dropped")).reduce((n, [, v]) => n + Number(v), 0)]];
  return card("", el("p", { class: "limit" }, advice || limit(series, workers)),
    el("ol", { class: "flow", "aria-label": "Groups on their way" }, pools.flatMap(([name, workers, rate], i) => [
      el("li", { class: "queue" }, el("b", {}, number(queues[i][1])), el("span", {}, queues[i][0])),
      el("li", { class: "pool" }, el("b", {}, name), el("span", {}, workers), el("span", {}, rate)),
    ]), el("li", { class: "queue" }, ended.map(([name, n]) => el("span", {}, el("b", {}, number(n)), ` ${name}`)))),
    !live && el("p", { class: "hint" }, api.ended(run) ? "The run has ended; numbers are of its last steps." : "This page reads files, so it sees no members; start it with --coordinator."));
}

function charts(group, into, s, members) {
  const line = (name, label, colour) => ({ label, xs: s.steps, ys: s.values[name] || [], colour });
  const lines = (...pairs) => pairs.filter(([name]) => s.values[name]).map(([name, label], i) => line(name, label, i));
  group.destroy();
  const ages = Object.keys(s.values).filter((n) => /^age\/\d+$/.test(n)).sort((a, b) => a.slice(4) - b.slice(4));
  const totals = ages.map((name) => s.values[name].reduce((a, b) => a + (b || 0), 0));
  replace(into,
    group.figure("Where the learner's time goes [s]", lines(["learner_wait_s", "waits for groups"], ["forward_s", "forward"], ["backward_s", "backward"], ["optimizer_s", "optimizer"], ["frozen_s", "frozen models"], ["publish_wait_s", "publishes"])),
    group.figure("Rollout workers that wait, of all", lines(["rollout/wait_fraction", "wait"])),
    group.figure("Rollout: sequences and leases", lines(["rollout/running", "sequences"], ["rollout/leases", "leases"])),
    group.figure("Rollout: tokens a second", lines(["rollout/tokens_per_s", "tok/s"])),
    group.figure("Groups on their way", lines(["groups/admitted", "admitted"], ["groups/leased", "leased"], ["groups/generated", "generated"], ["groups/scored", "scored"], ["groups/batched", "batched"])),
    bars("Age of trained tokens [steps]", ages.map((n) => n.slice(4)), totals),
    group.figure("A version's way [s]", lines(["weights/gather_s", "gather"], ["weights/wait_s", "staged"], ["weights/transfer_s", "sent"], ["weights/publish_s", "acknowledged"], ["weights/swap_s", "swap"], ["weights/pause_s", "pause"])),
    card("Versions", table("Version of each member", ["member", "version", "roster", "silent"], members.filter((m) => m.role === "ROLE_ROLLOUT").map((m) => [m.memberId, m.version ? `${m.version.step} (session ${m.version.session})` : "none yet", m.epoch, `${number(m.silentS, 2)} s`]), "No rollout worker is connected.")));
}

/** Return a histogram as a figure. */
export function bars(title, labels, values) {
  const most = Math.max(...values, 1), total = values.reduce((a, b) => a + b, 0) || 1, width = 300 / Math.max(labels.length, 1);
  return el("figure", {}, el("figcaption", {}, el("b", {}, title)), labels.length ? svg("svg", { viewBox: "0 0 320 170", class: "bars", role: "img", "aria-label": labels.map((l, i) => `${l}: ${Math.round(values[i] / total * 100)} %`).join(", ") },
    labels.map((label, i) => svg("g", {},
      svg("rect", { x: 10 + i * width + 2, y: 145 - values[i] / most * 125, width: Math.max(1, width - 4), height: values[i] / most * 125 }),
      svg("text", { x: 10 + (i + 0.5) * width, y: 160, "text-anchor": "middle" }, label),
      svg("text", { x: 10 + (i + 0.5) * width, y: 140 - values[i] / most * 125, "text-anchor": "middle" }, `${Math.round(values[i] / total * 100)} %`)))) : el("p", { class: "hint" }, "no value yet"));
}
