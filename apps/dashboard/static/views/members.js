// Members: role, version, age, roster, work in hand, gauges; and their events. Logs of the services under `paceline up`.

import { el, replace, card, number, table } from "../dom.js";
import * as api from "../api.js";

// Use, memory and power of a member's GPUs; slowdowns and errors in colour.
function gpu(gauges) {
  if (gauges.gpu_use === undefined && gauges.gpu_power_w === undefined) return "–";
  const facts = [gauges.gpu_use === undefined ? "" : `${number(100 * gauges.gpu_use, 3)} %`, gauges.gpu_memory_used_gb === undefined ? "" : `${number(gauges.gpu_memory_used_gb, 3)} GB`,
    gauges.gpu_power_w === undefined ? "" : `${number(gauges.gpu_power_w, 3)} W`].filter(Boolean).join(", ");
  const faults = [gauges.gpu_throttled ? `${number(gauges.gpu_throttled)} slowed down` : "", gauges.gpu_xid_errors ? `Xid ${gauges.gpu_xid}, ${number(gauges.gpu_xid_errors)} errors` : ""].filter(Boolean).join(", ");
  return el("span", {}, facts, faults && el("span", { class: "warn" }, ` ${faults}`));
}

export async function show(context) {
  const { main, signal } = context;
  const list = el("div"), log = el("div");
  let open = "";
  replace(main, el("h1", {}, "Members"), list, log);
  const draw = async () => {
    const [{ members }, found] = await Promise.all([api.records("ListGauges", {}, signal), api.listRuns(signal)]);
    const running = ["running", "paused"].map((state) => found.find((run) => api.state(run) === state)).find(Boolean), step = Number(running?.step || 0);
    replace(list, card("", table("Members", ["member", "role", "state", "version", "age", "roster", "holds", "memory", "GPU", "tok/s", "silent", "address"], members.map((m) => [
      m.memberId, m.role.replace("ROLE_", "").toLowerCase(),
      el("span", { class: m.fault ? "message" : m.suspected || !m.connected ? "warn" : "good" }, m.fault || (m.draining ? "leaves" : m.suspected ? "suspected" : m.connected ? "connected" : "expected")),
      m.version ? `${m.version.step}` : "–", m.version && running ? number(step - Number(m.version.step)) : "–", m.epoch, Number(m.held),
      m.gauges.memory_gb === undefined ? "–" : `${number(m.gauges.memory_gb, 3)} GB`, gpu(m.gauges), m.gauges.tokens_per_s === undefined ? "–" : number(m.gauges.tokens_per_s), `${number(m.silentS, 2)} s`, m.address || "–"]),
      "No member is connected. `paceline serve rollout|reward|learner` start some; a page that reads files sees none.")));
    if (running) {
      const { events } = await api.records("ListEvents", { runId: running.runId, kinds: ["member", "session", "warning"], newest: true, pageSize: 30 }, signal);
      list.append(card(`Events of ${running.runId}`, el("ul", { class: "events", tabindex: "0" }, events.reverse().map((e) => { const c = JSON.parse(e.json); return el("li", {}, `step ${e.atStep}: ${c.message || `${c.member_id} ${c.what || `has session ${c.session}`}`}`); }))));
    }
  };
  const showLog = async () => {
    const answer = await api.records("ReadLog", { name: open }, signal);
    if (!answer.names.length) { replace(log); return; }
    replace(log, card("Logs", el("p", { class: "actions" }, answer.names.map((name) => el("button", { class: "small", "aria-pressed": String(name === open), onclick: async () => { open = name; await showLog(); } }, name))),
      open && el("pre", { class: "log", tabindex: "0" }, answer.text.replace(/\r\n?/g, "\n") || "(empty)")));
    const text = log.querySelector("pre");
    if (text) text.scrollTop = text.scrollHeight;
  };
  await Promise.all([draw(), showLog()]);
  context.every(2, draw);
}
