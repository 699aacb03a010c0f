// Samples: a table with filters, and a group with its completions side by side, coloured by token.

import { el, replace, card, number, counted, longText } from "../dom.js";
import * as api from "../api.js";
import { promptText } from "./compare.js";

const RANGES = [["Reward", "reward"], ["Tokens", "tokens"], ["Age", "age"]];
const NUMBERS = RANGES.flatMap(([name]) => [`min${name}`, `max${name}`]);
const STATES = ["", "trained", "batched", "scored", "generated", "leased", "admitted", "dropped"];

export async function show(context) {
  if (context.query.get("group")) await showGroup(context); else await showTable(context);
}

async function showTable(context) {
  const { run: runId, main, signal, query } = context;
  const form = el("form", { class: "tools", role: "search", onsubmit: (event) => { event.preventDefault(); apply(); } });
  const field = (name, label, attributes = {}) => el("label", {}, `${label} `, el("input", { name, value: query.get(name) || "", size: "5", ...attributes }));
  const bound = (name, label) => el("input", { name, value: query.get(name) || "", size: "4", inputmode: "decimal", "aria-label": label });
  const step = query.get("step") || "";
  form.append(
    field("text", "text", { type: "search", size: "16" }), field("step", "step", { inputmode: "numeric", placeholder: "all" }), field("group", "group", { inputmode: "numeric" }),
    ...RANGES.map(([name, label]) => el("span", {}, `${label} `, bound(`min${name}`, `least ${label}`), " to ", bound(`max${name}`, `greatest ${label}`))),
    el("label", {}, "ended by ", el("select", { name: "finishReason" }, ["", "stop", "length"].map((r) => el("option", { value: r, selected: r === (query.get("finishReason") || "") }, r || "any")))),
    el("label", {}, "state ", el("select", { name: "state" }, STATES.map((s) => el("option", { value: s, selected: s === (query.get("state") || "") }, s || "in a batch")))),
    el("label", {}, el("input", { type: "checkbox", name: "evaluation", checked: query.has("evaluation") }), " evaluation"),
    el("button", {}, "Show"), el("a", { href: context.link("samples", runId), class: "hint" }, "clear"));
  const apply = () => {
    const wanted = [...new FormData(form)].filter(([, value]) => value !== "");
    location.hash = context.link("samples", runId, Object.fromEntries(wanted));
  };
  const body = el("tbody"), foot = el("p", { class: "hint", "aria-live": "polite" }), more = el("button", { onclick: () => load() }, "Further groups");
  replace(main, el("h1", {}, `Samples of ${runId}`), form,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Completions" }, el("table", { class: "samples" },
      el("thead", {}, el("tr", {}, ["step", "group", "reward", "± mean", "tokens", "age", "ended", "prompt", "completion"].map((h) => el("th", { scope: "col" }, h)))), body)), foot, more);

  const request = { runId, newestFirst: true, pageSize: 32, text: query.get("text") || "", finishReason: query.get("finishReason") || "", state: query.get("state") || "", newestEvaluation: query.has("evaluation") };
  for (const name of NUMBERS) if (query.get(name)) request[name] = Number(query.get(name));
  if (step) request.fromStep = request.toStep = step;
  let examined = 0, found = 0;
  const load = async () => {
    more.disabled = true;
    const before = found;
    try {
      do {
        const page = await api.records("ListSamples", request, signal);
        examined += page.examined;
        for (const group of page.groups) for (const row of rows(context, group, request.newestEvaluation)) { body.append(row); found += 1; }
        request.pageToken = page.nextPageToken;
        foot.textContent = `${counted(found, "completion")} in ${counted(examined, "group")}`;
      } while (request.pageToken && found - before < 20 && examined < 200000);
      more.hidden = !request.pageToken;
      if (!found && !request.pageToken) foot.textContent = `No sample matches; ${counted(examined, "group")} read.`;
    } finally { more.disabled = false; }
  };
  await load();
}

function rows(context, group, isEvaluation) {
  const open = context.link("samples", context.run, isEvaluation ? { group: group.groupId, evaluation: "on" } : { group: group.groupId });
  const link = () => el("a", { href: open }, isEvaluation ? String(BigInt(group.groupId) & 0xFFFFFn) : group.groupId);
  if (!group.completions.length) return [el("tr", {}, el("td", { class: "num" }, group.step ?? "–"), el("td", { class: "num" }, link()), el("td", { colspan: "5" }, group.reason ? `dropped: ${group.reason}` : group.state), el("td", {}, cut(promptText(group.promptJson))), el("td", { class: "hint" }, "not stored"))];
  return group.completions.map((c) => el("tr", {}, el("td", { class: "num" }, group.step ?? "–"), el("td", { class: "num" }, link()),
    el("td", { class: "num" }, number(c.reward, 3)), el("td", { class: `num ${c.aboveMean > 0 ? "good" : c.aboveMean < 0 ? "message" : ""}` }, c.aboveMean === undefined ? "–" : `${c.aboveMean > 0 ? "+" : ""}${number(c.aboveMean, 3)}`),
    el("td", { class: "num" }, c.numTokens), el("td", { class: "num" }, c.age), el("td", { class: "word" }, c.finishReason), el("td", {}, cut(promptText(group.promptJson))), el("td", {}, cut(c.text))));
}

const cut = (text, length = 160) => el("span", { class: "cell", dir: "ltr" }, text.length > length ? `${text.slice(0, length)} …` : text);

async function showGroup(context) {
  const { run: runId, main, signal, query } = context;
  const groupId = query.get("group");
  const [page, life] = await Promise.all([
    api.records("ListSamples", { runId, groupId, full: true }, signal), api.records("GetGroupLife", { runId, groupId }, signal)]);
  const group = page.groups[0], content = group.json ? JSON.parse(group.json) : null, prompt = promptText(group.promptJson);
  const cards = el("div", { class: "side" });
  let colour = "none", pieces = null, learned = null;
  const draw = () => replace(cards, (content?.completions || []).map((completion, i) => completionCard(completion, group.completions[i], i, colour, pieces, learned?.get(i))));
  const choose = el("select", { "aria-label": "Colour of tokens", onchange: async () => {
    colour = choose.value;
    if (colour !== "none" && !pieces) pieces = await textsOf(runId, content.completions, context);
    if ((colour === "ratio" || colour === "entropy") && !learned) learned = await learnedOf(runId, group, signal);
    draw();
  } }, [["none", "no colour"], ["logprob", "log-probability"], ["ratio", "ratio to the learner"], ["entropy", "entropy of the learner"], ["version", "version"]].map(([value, label]) => el("option", { value }, label)));
  replace(main, el("h1", {}, `Group ${BigInt(groupId) & 0xFFFFFn} of ${runId}`),
    el("p", {}, el("a", { href: context.link("samples", runId, group.step !== undefined && life.class === "train" ? { step: group.step } : {}) }, "← samples"), ` ${life.class === "train" ? "" : life.class} ${life.state}`, group.step !== undefined ? ` in step ${group.step}` : "", group.reward !== undefined ? `, mean reward ${number(group.reward)}` : ""),
    life.reason && card("Why it was dropped", el("p", {}, el("b", {}, life.reason), ` ${life.explanation}`)),
    card("Prompt", longText(prompt), el("p", { class: "actions" }, el("a", { class: "button", href: context.link("samples", runId, { text: prompt.slice(0, 200) }) }, "The same prompt in other steps"),
      content && el("button", { class: "small", onclick: async () => { await navigator.clipboard.writeText(group.json); context.say("The group was copied to the clipboard as JSON."); } }, "Copy as JSON"))),
    content ? el("div", { class: "tools" }, el("label", {}, "Tokens by ", choose), el("span", { class: "legend" })) : el("p", { class: "hint" }, "Its completions are not stored."),
    cards, card("Life", el("ol", { class: "life" }, life.hops.map((hop) => el("li", {}, el("b", {}, hop.what), hop.memberId ? ` ${hop.memberId}` : "", hop.attempt ? ` (attempt ${hop.attempt})` : "", hop.detail ? `: ${hop.detail}` : "")))));
  draw();
}

/** Return the learner's statistics of a group's tokens, by the index of the completion. */
async function learnedOf(runId, group, signal) {
  const numbers = (values) => (values || []).map(Number);
  if (group.step === undefined) return new Map();
  const { completions } = await api.records("GetTokenStatistics", { runId, step: group.step, groupId: group.groupId }, signal);
  return new Map(completions.map((one) => [one.index, { logprobs: numbers(one.logprobs), entropies: numbers(one.entropies) }]));
}

function completionCard(completion, summary, index, colour, pieces, learned) {
  return card(`Completion ${index + 1}`,
    el("p", {}, el("b", {}, `reward ${number(completion.reward)}`), summary?.aboveMean !== undefined ? ` (${summary.aboveMean > 0 ? "+" : ""}${number(summary.aboveMean, 3)} to the mean)` : "", ` · ${counted(completion.token_ids.length, "token")} · ${completion.finish_reason}`, summary ? ` · age ${summary.age}` : ""),
    el("p", { class: "hint" }, Object.entries(completion.rewards).map(([name, value]) => `${name} ${value === null ? "none" : number(value)}`).join(" · "), ` · version ${completion.spans.map((s) => s[3]).join(" → ")}`),
    colour !== "none" ? tokens(completion, pieces?.get(completion), colour, learned) : completion.messages ? conversation(completion.messages) : longText(completion.text));
}

function conversation(messages) {
  return el("div", {}, messages.map((m) => el("div", { class: m.role === "assistant" ? "said" : "read" }, el("b", {}, m.role),
    longText(typeof m.content === "string" ? m.content : m.content ? JSON.stringify(m.content) : ""),
    (m.tool_calls || []).map((call) => el("pre", { class: "text" }, `→ ${call.function?.name}(${call.function?.arguments})`)))));
}

/** Shades of a ratio: by how many times a tenth the logarithm of π/μ is away from 0; of an entropy: each half nat. */
const SHADES = {
  ratio: (logprob, one, i) => Math.min(5, Math.floor(Math.abs(one.logprobs[i] - logprob) * 10)),
  entropy: (_, one, i) => Math.min(5, Math.floor(one.entropies[i] * 2)),
};
const HINTS = {
  logprob: "darker is less likely: each shade is a factor of e",
  ratio: "darker is further from 1: each shade is about 10 % between the learner's probability and the sampler's",
  entropy: "darker is less certain: each shade is half a nat",
};

function tokens(completion, texts, colour, learned) {
  const version = [], versions = [...new Set(completion.spans.map((s) => s[3]))];
  for (const [start, end, , step] of completion.spans) for (let i = start; i < end; i++) version[i] = step;
  const shown = completion.token_ids.slice(0, 5000), has = learned && learned.logprobs.length === completion.token_ids.length;
  if (SHADES[colour] && !has) return el("div", {}, longText(completion.text), el("p", { class: "hint" }, "The learner's numbers are kept for the first groups of each step only (logger.keep_token_stats), and removed later."));
  return el("div", {}, el("p", { class: "tokens", dir: "ltr" }, shown.map((id, i) => {
    const text = texts ? texts[i] : `${id} `, logprob = completion.logprobs[i], trained = has && !Number.isNaN(learned.logprobs[i]);
    const level = SHADES[colour] ? (trained ? `p${SHADES[colour](logprob, learned, i)}` : "") : colour === "logprob" ? `p${Math.min(5, Math.floor(-logprob))}` : `v${versions.indexOf(version[i]) % 6}`;
    const said = trained ? `, by the learner ${number(learned.logprobs[i], 3)}, ratio ${number(Math.exp(learned.logprobs[i] - logprob), 3)}, entropy ${number(learned.entropies[i], 3)}` : "";
    return el("span", { class: level, title: `token ${id}, log-probability ${number(logprob, 3)}${said}, version ${version[i]}` }, text === "" ? "∅" : text.replace(/\n/g, "↵\n"));
  })), el("p", { class: "hint" }, HINTS[colour] || `versions ${versions.join(", ")}`, shown.length < completion.token_ids.length ? `; the first 5,000 of ${completion.token_ids.length} tokens` : "", texts ? "" : "; the tokenizer is not on the dashboard's machine, so these are token ids"));
}

async function textsOf(runId, completions, context) {
  const found = new Map();
  try {
    for (const completion of completions) found.set(completion, await api.tokenTexts(runId, completion.token_ids.slice(0, 5000), context.signal));
  } catch (error) { if (error.name === "AbortError") throw error; return null; }
  return found;
}
