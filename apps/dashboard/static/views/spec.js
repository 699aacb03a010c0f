// The resolved spec: every value, the differences from the defaults, and the sentence about each key.

import { el, replace, card } from "../dom.js";
import * as api from "../api.js";

export async function show(context) {
  const { run: runId, main, signal } = context;
  replace(main, el("h1", {}, `Spec of ${runId}`), el("p", { class: "hint" }, "Loading …"));
  const answer = await api.records("GetSpec", { runId }, signal);
  const list = el("div"), search = el("input", { type: "search", placeholder: "key or text", "aria-label": "Search keys", oninput: () => draw() });
  const only = el("input", { type: "checkbox", checked: true, onchange: () => draw() });
  const draw = () => {
    const wanted = search.value.toLowerCase();
    const keys = answer.keys.filter((key) => (!only.checked || key.differs) && (!wanted || `${key.path} ${key.description}`.toLowerCase().includes(wanted)));
    const sections = Map.groupBy ? Map.groupBy(keys, (key) => key.path.split(".")[0]) : keys.reduce((m, k) => m.set(k.path.split(".")[0], [...(m.get(k.path.split(".")[0]) || []), k]), new Map());
    replace(list, [...sections].map(([name, found]) => card(name, el("dl", { class: "spec" }, found.map((key) => el("div", { class: key.differs ? "differs" : "" },
      el("dt", {}, el("code", {}, key.path), el("b", {}, ` ${key.valueJson}`), key.differs && key.default && key.default !== "required" && el("span", { class: "hint" }, ` default ${key.default}`)),
      el("dd", {}, key.description, key.type && el("span", { class: "hint" }, ` (${key.type})`))))))),
      !keys.length && el("p", { class: "hint" }, "no such key"));
  };
  const copy = el("button", { class: "small", onclick: async () => { await navigator.clipboard.writeText(answer.specYaml); context.say("The spec was copied to the clipboard."); } }, "Copy as YAML");
  replace(main, el("h1", {}, `Spec of ${runId}`), el("div", { class: "tools" }, search, el("label", {}, only, " only differences from the defaults"), copy), list);
  draw();
}
