"""Renders a chat to token ids with the tokenizer's chat template, as transformers applies it. Promise: everything in
the request is in the prompt, or the request is refused with the name of the field. Templates ignore fields that
their authors did not expect (a user's `name`, the role `developer`), so a field counts as rendered only if a
rendering with it differs from one without it: in a probe, which is a short chat made for this test, else in the chat
itself. A probe that the template refuses proves nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from paceline.chat.call_formats import CLOSE, OPEN, CallFormat, MalformedCall, NoCall, read_json_calls, read_marked_call
from paceline.chat.completion_texts import END_THINK, THINK, opens_reasoning, special_tokens
from paceline.chat.messages import Json, Unsupported
from paceline.data.messages import NotRendered, in_order_of_calls
from paceline.data.tokens import NO_KWARGS, encode_prompt, render_chat
from paceline.errors import InvalidInput
from paceline.groups import IntArray

BY_ORDER = ("tool_call_id", "name")
"""Fields that link a tool's result to its call. A template that writes results may rely on their order instead."""

BESIDE_CALLS = "content beside tool_calls"
"""Name for content beside calls, used like the name of a field. Some templates leave out such content."""

_QUESTION, _ANSWER = "Question 4711?", "Answer 4712."
_CALL: Json = {"id": "c47134713", "type": "function", "function": {"name": "compute4714", "arguments": {"x4715": 4716}}}
_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "compute4714",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"x4715": {"type": "integer"}}, "required": ["x4715"]},
    },
}


@dataclass(frozen=True)
class AnswerFormat:
    """The way in which a template's model writes calls and reasoning."""

    calls: CallFormat
    """Format of tool calls; `none` if the template writes none or the format is unknown."""
    reasons: bool
    """True if the template writes `reasoning_content` between `<think>` and `</think>`."""
    opening: str = ""
    """Text that begins a call, before the function's name; empty if unknown."""
    after_name: str = ""
    """Text between a function's name and its arguments."""


@dataclass(frozen=True)
class Probe:
    """Compares renderings of short chats with and without a field."""

    tokenizer: Any
    source: str
    tools: list[Json]
    kwargs: Mapping[str, Any]

    def renders(self, messages: Sequence[Json], role: str, name: str) -> bool:
        """Return whether the field `name` of messages of `role` changes the rendering."""
        if name in BY_ORDER and role == "tool" and mentions(self.source, "tool"):
            return True
        first = next(m for m in messages if m["role"] == role and says(m, name))
        short = _short_chat(first, name)
        if (with_it := self._text(short)) is not None and with_it != self._text(_without(short, role, name)):
            return True
        # The template refuses so short a chat, or writes the field in some places only.
        with_it = render_chat(self.tokenizer, list(messages), self.kwargs, self.tools)
        return with_it != self._text(_without(messages, role, name))

    def renders_tools(self) -> bool:
        chat = [{"role": "user", "content": _QUESTION}]
        with_them = self._text(chat)
        return with_them is not None and with_them != Probe(self.tokenizer, self.source, [], self.kwargs)._text(chat)

    def renders_calls(self) -> bool:
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        return mentions(self.source, "tool_calls") and self.renders([call], "assistant", "tool_calls")

    def writes_role(self, role: str) -> bool:
        """Return whether the rendered messages of a role contain the role's name, as with a template that writes any
        role."""
        as_role, as_user = (self._text([{"role": each, "content": _ANSWER}]) or "" for each in (role, "user"))
        return as_role.count(role) > as_user.count(role)

    def renders_call_ids(self) -> bool:
        """Return whether the template writes the ids that link results to calls."""
        chat = _short_chat({"role": "tool", "content": _ANSWER, "tool_call_id": "c47134713"}, "tool_call_id")
        with_it = self._text(chat)
        return with_it is not None and with_it != self._text(_without(chat, "tool", "tool_call_id"))

    def answer(self, message: Json) -> str:
        """Return the part of a rendering that the template writes for one message of the assistant."""
        asked = [{"role": "user", "content": _QUESTION}]
        whole = self._text([*asked, message]) or ""
        opened = self._text(asked, add_generation_prompt=True) or ""
        if (opened_thinking := opened.find(THINK, opened.rfind(_QUESTION))) >= 0:
            opened = opened[:opened_thinking]
        same = next((i for i, (a, b) in enumerate(zip(whole, opened, strict=False)) if a != b), len(opened))
        text = whole[same:]
        for mark in special_tokens(self.tokenizer).marks.values():
            text = text.split(mark)[0]
        return text

    def _text(self, messages: Sequence[Json], **options: Any) -> str | None:
        try:
            return render_chat(self.tokenizer, list(messages), self.kwargs, self.tools or None, **options)
        except InvalidInput:
            return None  # the template refuses this chat


def answer_format_of(tokenizer: Any, source: str) -> AnswerFormat:
    """Return the answer format that the template's renderings prove: a rendered call is read back."""
    probe, plain = (Probe(tokenizer, source, tools, NO_KWARGS) for tools in ([_TOOL], []))
    message = {"role": "assistant", "content": _ANSWER, "reasoning_content": _QUESTION[:8]}
    reasoning = re.compile(f"{THINK}\\s*{_QUESTION[:8]}\\s*{END_THINK}")
    reasons = any(reasoning.search(each.answer(message)) for each in (plain, probe))
    text = probe.answer({"role": "assistant", "content": "", "tool_calls": [_CALL]})
    text = text.rpartition(END_THINK)[2].lstrip()
    name, arguments = _CALL["function"]["name"], _CALL["function"]["arguments"]
    calls: CallFormat = "none"
    try:
        if OPEN in text and CLOSE in text:
            read = [read_marked_call(text[text.index(OPEN) + len(OPEN) : text.index(CLOSE)], [_TOOL])]
            text, format_read = text[text.index(OPEN) :], "hermes"
        else:
            read, format_read = read_json_calls(text, [_TOOL]), "json"
        if [(call.name, json.loads(call.arguments)) for call in read] == [(name, arguments)]:
            calls = format_read  # type: ignore[assignment]
    except (MalformedCall, NoCall):
        pass
    if calls == "none":
        return AnswerFormat("none", reasons)
    opening, _, rest = text.partition(name)
    argument = re.search(r'\{\s*"x4715"|<parameter=x4715>', rest)
    return AnswerFormat(calls, reasons, opening, rest[: argument.start()] if argument else "")


def says(message: Json, name: str) -> bool:
    """Return whether a message has a value for the field `name`."""
    if name == BESIDE_CALLS:
        return "tool_calls" in message and says(message, "content")
    value = message.get(name)
    return bool(value.strip()) if name == "content" and isinstance(value, str) else value is not None


def _short_chat(message: Json, name: str) -> list[Json]:
    """Return a chat in which a message of this role, with this field, is valid."""
    probed: Json = {"role": message["role"], "content": "" if name == "tool_calls" else _ANSWER}
    if name == BESIDE_CALLS:
        probed["tool_calls"] = [_CALL]
    elif name != "content":
        probed[name] = message[name]
    question: Json = {"role": "user", "content": _QUESTION}
    match message["role"]:
        case "user":
            return [probed]
        case "system" | "developer":
            return [probed, question]
        case "tool":
            probed.setdefault("tool_call_id", _CALL["id"])
            return [question, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, probed]
        case _:
            return [question, probed]


def _without(messages: Sequence[Json], role: str, name: str) -> list[Json]:
    changed = []
    for message in messages:
        if message["role"] == role and says(message, name):
            cleared = name in ("content", BESIDE_CALLS)
            message = {key: value for key, value in message.items() if key != name}
            message |= {"content": ""} if cleared else {}
        changed.append(message)
    return changed


def mentions(source: str, word: str) -> bool:
    """Return whether a template's text contains a word; if it does not, the template reads no field of that name."""
    return re.search(rf"\b{re.escape(word)}\b", source) is not None


CALLS, RESULTS, CALL_IDS = "calls", "results", "ids of results"

MAX_REMEMBERED = 256


@dataclass
class _Proofs:
    template: Any
    rendered: dict[tuple[str, str], bool] = field(default_factory=dict)
    """True for each (role, field) that the template renders. False is cached only if the proof ignored the request."""
    answer_format: AnswerFormat | None = None


_proofs: WeakKeyDictionary[Any, _Proofs] = WeakKeyDictionary()


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer. Safe to use from any thread; changes of the template are noticed."""

    tokenizer: Any

    @property
    def source(self) -> str:
        """Text of the tokenizer's chat template; if the tokenizer has several templates, their texts joined."""
        template = self.tokenizer.chat_template
        return json.dumps(template) if isinstance(template, dict) else str(template or "")

    def encode(
        self, messages: Sequence[Json], tools: Sequence[Json] = (), template_kwargs: Mapping[str, Any] = NO_KWARGS
    ) -> IntArray:
        """Return the [P] token ids of rendered messages, with the assistant's answer opened. Raises Unsupported for
        fields that the template does not render, InvalidInput for messages that it refuses."""
        if tools:
            template_kwargs = {name: value for name, value in template_kwargs.items() if name != "tools"}
        checked = self.checked(messages, tools, template_kwargs)
        return encode_prompt(self.tokenizer, checked, "auto", template_kwargs, list(tools) or None)

    def checked(
        self, messages: Sequence[Json], tools: Sequence[Json] = (), template_kwargs: Mapping[str, Any] = NO_KWARGS
    ) -> list[Json]:
        """Return the messages in the order that the template needs. Raises Unsupported for fields that it would leave
        out, InvalidInput without a template."""
        if not self.source:
            raise InvalidInput("the tokenizer has no chat template, which messages need; send a text as the prompt")
        probe = Probe(self.tokenizer, self.source, list(tools), template_kwargs)
        if tools and not self._proves("", "tools", probe.renders_tools):
            raise Unsupported(
                "the request has tools, but the chat template of this model does not render tools; remove them, or "
                "train a model whose template renders tools; in a run with an environment, set environment.tool_parser",
                "tools",
            )
        try:
            for role, name in _fields(messages):
                if not self._proves(role, name, partial(probe.renders, messages, role, name)):
                    raise _not_rendered(role, name)
        except NotRendered as error:
            raise _not_rendered(error.role, error.name) from None
        if any(message["role"] == "tool" for message in messages):
            if not self.writes_results:
                raise _not_rendered("tool", "content")
            if not self._proves("tool", CALL_IDS, probe.renders_call_ids, True):
                return _in_order(messages)
        return list(messages)

    @property
    def writes_calls(self) -> bool:
        """True if the template renders calls of tools."""
        return self._proves("assistant", CALLS, Probe(self.tokenizer, self.source, [], NO_KWARGS).renders_calls, True)

    @property
    def writes_results(self) -> bool:
        """True if the template renders results of tools as such: it reads or writes the name of their role."""
        proof = partial(Probe(self.tokenizer, self.source, [], NO_KWARGS).writes_role, "tool")
        return mentions(self.source, "tool") or self._proves("tool", RESULTS, proof, True)

    @property
    def answer_format(self) -> AnswerFormat:
        """The way in which the model writes calls and reasoning, derived from the template's rendering of a call."""
        proofs = self._proofs()
        if proofs.answer_format is None:
            proofs.answer_format = answer_format_of(self.tokenizer, self.source)
        return proofs.answer_format

    def opens_reasoning(self, prompt_ids: IntArray, messages: Sequence[Json] = ()) -> bool:
        """Return whether an answer begins within reasoning, which the template or the continued message opened."""
        if not self.answer_format.reasons:
            return False
        if messages and messages[-1]["role"] == "assistant":
            begun = str(messages[-1].get("content"))
            return THINK in begun and END_THINK not in begun.rpartition(THINK)[2]
        return opens_reasoning(self.tokenizer, prompt_ids)

    def effort_kwargs(self, effort: str | None) -> Json:
        """Return the template's arguments for an effort. Raises Unsupported for an effort that the template lacks."""
        if effort is None:
            return {}
        if mentions(self.source, "reasoning_effort"):
            return {"reasoning_effort": effort}
        if mentions(self.source, "enable_thinking"):
            if effort == "none":
                return {"enable_thinking": False}
            raise Unsupported(
                f"reasoning_effort is {effort!r}, but the chat template of this model can only switch reasoning off: use "
                "'none', or leave it out",
                "reasoning_effort",
            )
        raise Unsupported(
            f"reasoning_effort is {effort!r}, which the chat template of this model does not read; remove it",
            "reasoning_effort",
        )

    def _proves(self, role: str, name: str, proof: Callable[[], bool], final: bool = False) -> bool:
        """Return whether a field is rendered. A `final` proof ignores the request: a negative result is cached too."""
        cached = self._proofs().rendered
        if (role, name) in cached:
            return cached[role, name]
        proven = proof()
        if (proven or final) and len(cached) < MAX_REMEMBERED:
            cached[role, name] = proven
        return proven

    def _proofs(self) -> _Proofs:
        template = self.tokenizer.chat_template
        proofs = _proofs.get(self.tokenizer)
        if proofs is None or proofs.template != template:
            proofs = _proofs[self.tokenizer] = _Proofs(template)
        return proofs


def _in_order(messages: Sequence[Json]) -> list[Json]:
    try:
        return in_order_of_calls(messages)
    except InvalidInput as error:
        raise Unsupported(str(error), "messages") from None


def _not_rendered(role: str, name: str) -> Unsupported:
    what = f"the {name}" if name in ("content", BESIDE_CALLS) else repr(name)[:60]
    return Unsupported(
        f"a message with the role {role!r:.60} has {what}, but the chat template of this model does not render {what}; "
        f"remove {what}, or train a model whose template does",
        "messages",
    )


def _fields(messages: Sequence[Json]) -> list[tuple[str, str]]:
    """Return the (role, field) pairs to prove, in the order of the messages."""
    found: dict[tuple[str, str], None] = {}
    for message in messages:
        for name in message:
            if name != "role" and says(message, name):
                found[message["role"], name] = None
        if "tool_calls" in message and says(message, "content"):
            found[message["role"], BESIDE_CALLS] = None
    return list(found)
