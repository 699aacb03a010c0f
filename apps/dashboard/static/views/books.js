// Token accounting: generated = trained + dropped + live, over time; and the comparison of all records.

import { el, replace, card, number, counted, table } from "../dom.js";
import * as api from "../api.js";
import { ChartGroup } from "../charts.js";

export async function show(context) {
  const { run: runId, main, signal } = context;
  const group = new ChartGroup();
  context.onstop(() => group.destroy());
  const numbers = el("div"), charts = el("div", { class: "charts" }), result = el("div", { "aria-live": "polite" });
  const verify = el("button", { onclick: async () => {
    verify.disabled = true;
    replace(result, el("p", { class: "hint" }, "Comparing all records; this may take minutes …"));
    try {
      const found = await api.records("VerifyRun", { runId }, signal), facts = JSON.parse(found.factsJson);
      replace(result, found.problems.length
        ? [el("p", { class: "message" }, counted(found.problems.length, "problem")), el("ul", {}, found.problems.map((p) => el("li", {}, p)))]
        : el("p", { class: "good" }, "✓ All records agree."),
        el("p", { class: "hint" }, Object.entries(facts).filter(([, v]) => typeof v === "number").map(([n, v]) => `${number(v)} ${n}`).join(", ")));
    } catch (error) { if (error.name !== "AbortError") replace(result, el("p", { class: "message" }, error.message)); }
    verify.disabled = false;
  } }, "Verify");
  replace(main, el("h1", {}, `Books of ${runId}`), numbers, charts, card("Verify", el("p", {}, "Compares records that were written independently of each other: groups, counters, batches, receipts, arrays, checkpoints."), verify, result));
  let newest = "";
  const draw = async () => {
    const books = await api.records("GetBooks", { runId }, signal);
    if (JSON.stringify(books) === newest) return;
    newest = JSON.stringify(books);
    const reasons = Object.entries(books.droppedByReason);
    replace(numbers, card("", el("p", { class: "sum" },
      part("generated", books.generated), " = ", part("trained", books.trained), " + ", part("dropped", books.dropped), " + ", part("live", books.live),
      el("span", { class: books.balanced ? "good" : "message" }, books.balanced ? " ✓ balanced" : " ✗ not balanced")),
      bar(books),
      Number(books.wasted) > 0 && el("p", { class: "hint" }, `No commit took ${counted(books.wasted, "token")}, which ${Number(books.wasted) === 1 ? "was" : "were"} wasted.`),
      table("Dropped by reason", ["reason", "tokens", "groups"], [...new Set([...reasons.map(([n]) => n), ...Object.keys(books.groups).filter((n) => n.startsWith("dropped:")).map((n) => n.slice(8))])].map((n) =>
        [el("a", { href: context.link("samples", runId, { state: "dropped" }) }, n), Number(books.droppedByReason[n] || 0), Number(books.groups[`dropped:${n}`] || 0)]), "No token was dropped."),
      Object.keys(books.failures).length > 0 && table("Failed attempts", ["failed attempts", "number"], Object.entries(books.failures).map(([n, v]) => [n, Number(v)]))));
    const s = await api.series(runId, ["groups/*", "dropped/*", "trained_tokens", "drop_fraction"], { maxPoints: 300 }, signal);
    const sums = (name) => { let sum = 0; return (s.values[name] || s.steps.map(() => 0)).map((v) => (sum += (v || 0) * s.width)); };
    const line = (name, label, ys = s.values[name]) => ({ label, xs: s.steps, ys });
    const drops = Object.keys(s.values).filter((n) => n.startsWith("dropped/"));
    group.destroy();
    replace(charts,
      group.figure("Tokens trained so far", [line("", "trained", sums("trained_tokens"))]),
      group.figure("Groups that ended", [line("groups/trained", "trained"), ...drops.map((n) => line(n, n.slice(8)))].filter((l) => l.ys)),
      group.figure("Open groups", ["admitted", "leased", "generated", "scored", "batched"].map((n) => line(`groups/${n}`, n)).filter((l) => l.ys)));
  };
  await draw();
  context.every(3, draw);
}

const part = (name, value) => el("span", { class: `part ${name}` }, el("b", {}, number(value)), ` ${name}`);

function bar(books) {
  const total = Number(books.generated) || 1;
  return el("div", { class: "bar", role: "img", "aria-label": ["trained", "dropped", "live"].map((n) => `${n} ${Math.round(books[n] / total * 1000) / 10} %`).join(", ") },
    ["trained", "dropped", "live"].map((name) => { const piece = el("span", { class: name }); piece.style.flexGrow = Number(books[name]) / total; return piece; }));
}
