// Calls of the coordinator through the REST interface of this server. The link carries the key after `#key=`; it stays in
// this tab.

const KEY = "paceline key";
export let role = "nobody";

export function takeKey() {
  const found = /^#key=([\w-]+)$/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(KEY, found[1]);
    history.replaceState(null, "", "#/runs");
  }
}

export function setKey(key) { sessionStorage.setItem(KEY, key.trim()); }

const headers = () => ({ Authorization: `Bearer ${sessionStorage.getItem(KEY) || ""}`, "Content-Type": "application/json" });

export async function session() {
  const response = await fetch("/session", { headers: headers() });
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.message), { code: answer.code });
  role = answer.role;
}

async function call(service, method, body, signal) {
  let response;
  try {
    response = await fetch(`/paceline.v1.${service}/${method}`, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error("the dashboard does not answer; is its process running?"), { code: "unavailable" });
  }
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.message), { code: answer.code });
  return answer;
}

export const runs = (method, body = {}, signal) => call("RunService", method, body, signal);
export const records = (method, body = {}, signal) => call("RecordsService", method, body, signal);

export const status = (signal) => call("StatusService", "Status", {}, signal);

export async function listRuns(signal) {
  const found = [];
  let pageToken = "";
  do {
    const page = await runs("List", { pageToken }, signal);
    found.push(...page.runs);
    pageToken = page.nextPageToken;
  } while (pageToken && found.length < 5000);
  return found.reverse();
}

/** Return series by name as {steps, times, values: {name: [..]}, least: {..}, greatest: {..}}. */
export async function series(runId, names, options = {}, signal = undefined) {
  const out = { steps: [], times: [], values: {}, least: {}, greatest: {}, width: 1 };
  let pageToken = "";
  do {
    const page = await records("GetMetrics", { runId, names, pageToken, ...options }, signal);
    const before = out.steps.length;
    out.width = Number(page.stepsPerPoint);
    out.steps.push(...page.steps.map(Number));
    out.times.push(...page.times.map(Number));
    for (const one of page.series) {
      const put = (into, values) => {
        into[one.name] ||= Array(before).fill(null);
        into[one.name].push(...values.map((v) => (Number.isNaN(Number(v)) ? null : Number(v))));
      };
      put(out.values, one.values);
      if (one.least.length) { put(out.least, one.least); put(out.greatest, one.greatest); }
    }
    for (const columns of [out.values, out.least, out.greatest])
      for (const column of Object.values(columns)) while (column.length < out.steps.length) column.push(null);
    pageToken = page.nextPageToken;
  } while (pageToken);
  return out;
}

export const state = (run) => run.state.replace("RUN_STATE_", "").toLowerCase();
export const ended = (run) => ["succeeded", "failed", "cancelled"].includes(state(run));

/** Return the text of each token; null if the tokenizer is not on the dashboard's machine. */
export async function tokenTexts(runId, ids, signal) {
  const response = await fetch("/tokens", { method: "POST", headers: headers(), body: JSON.stringify({ runId, ids }), signal });
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.message), { code: answer.code });
  return answer.texts;
}
