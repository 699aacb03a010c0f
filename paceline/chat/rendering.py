"""A chat's token ids, by the chat template of a tokenizer as transformers applies it.

Promise: everything in the request is in the prompt, or the request is refused with the name of the field. Templates ignore
what their authors did not foresee (a user's `name`, the role `developer`), so a field counts as rendered only where a
rendering with it differs from one without it: in a short chat made for the purpose, else in the chat itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from paceline.chat.completion_texts import END_THINK, THINK, opens_reasoning
from paceline.chat.messages import Json, Unsupported
from paceline.chat.template_probes import BESIDE_CALLS, AnswerFormat, Probe, answer_format_of, mentions, says
from paceline.data.template_messages import NotRendered, in_order_of_calls
from paceline.data.tokens import NO_KWARGS, encode_prompt
from paceline.errors import InvalidInput
from paceline.groups import IntArray

CALL_IDS = "ids of results"

MAX_REMEMBERED = 256
"""Fields of a template whose rendering was proven and is not proven again."""


@dataclass
class _Proofs:
    """What is known of one template."""

    template: Any
    rendered: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Fields, each with its role, that it was seen to render, and a few that it never renders."""
    answer_format: AnswerFormat | None = None


_proofs: WeakKeyDictionary[Any, _Proofs] = WeakKeyDictionary()
"""Of each tokenizer that is in use."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer. May be used from any thread; a template that was read anew is noticed."""

    tokenizer: Any

    @property
    def source(self) -> str:
        """Return the text of the template; several templates of one tokenizer are joined."""
        template = self.tokenizer.chat_template
        return json.dumps(template) if isinstance(template, dict) else str(template or "")

    def encode(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] = (),
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
    ) -> IntArray:
        """Return the [P] token ids of rendered messages, opened for the assistant's answer.

        Raises Unsupported for what the template does not render, InvalidInput for what it refuses.
        """
        if tools:
            template_kwargs = {name: value for name, value in template_kwargs.items() if name != "tools"}
        checked = self.checked(messages, tools, template_kwargs)
        return encode_prompt(self.tokenizer, checked, "auto", template_kwargs, list(tools) or None)

    def checked(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] = (),
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
    ) -> list[Json]:
        """Return the messages as the template gets them. Raises Unsupported for what it would leave out, InvalidInput without a
        template."""
        if not self.source:
            raise InvalidInput(
                "the tokenizer has no chat template, which messages need; send a text as the prompt"
            )
        probe = Probe(self.tokenizer, self.source, list(tools), template_kwargs)
        if tools and not self._proves("", "tools", probe.renders_tools):
            raise Unsupported(
                "tools are given, which the chat template of this model does not render; remove them, or train a model whose "
                "template does",
                "tools",
            )
        try:
            for role, name in _fields(messages):
                if not self._proves(role, name, partial(probe.renders, messages, role, name)):
                    raise _not_rendered(role, name)
        except NotRendered as error:
            raise _not_rendered(error.role, error.name) from None
        if any(message["role"] == "tool" for message in messages):
            if not mentions(self.source, "tool"):
                raise _not_rendered("tool", "content")
            if not self._proves("tool", CALL_IDS, probe.renders_call_ids, True):
                return _in_order(messages)
        return list(messages)

    @property
    def answer_format(self) -> AnswerFormat:
        """Return how the model writes calls and reasoning: found by the template's own rendering of a call, which has to be
        read back as the same call."""
        proofs = self._proofs()
        if proofs.answer_format is None:
            proofs.answer_format = answer_format_of(self.tokenizer, self.source)
        return proofs.answer_format

    def opens_reasoning(self, prompt_ids: IntArray, messages: Sequence[Json] = ()) -> bool:
        """Return whether an answer to the prompt begins within its reasoning, because the template has opened it, or the
        assistant's message that it goes on with."""
        if not self.answer_format.reasons:
            return False
        if messages and messages[-1]["role"] == "assistant":
            begun = str(messages[-1].get("content"))
            return THINK in begun and END_THINK not in begun.rpartition(THINK)[2]
        return opens_reasoning(self.tokenizer, prompt_ids)

    def effort_kwargs(self, effort: str | None) -> Json:
        """Return the arguments of the template for `reasoning_effort`. Raises Unsupported for an effort that the template
        does not know."""
        if effort is None:
            return {}
        if mentions(self.source, "reasoning_effort"):
            return {"reasoning_effort": effort}
        if mentions(self.source, "enable_thinking"):
            if effort == "none":
                return {"enable_thinking": False}
            raise Unsupported(
                f"reasoning_effort is {effort!r}, but the chat template of this model knows only whether to reason: take "
                "'none', or leave it out",
                "reasoning_effort",
            )
        raise Unsupported(
            f"reasoning_effort is {effort!r}, which the chat template of this model does not read; remove it",
            "reasoning_effort",
        )

    def _proves(self, role: str, name: str, proof: Callable[[], bool], final: bool = False) -> bool:
        """Return whether a field is rendered. A `final` proof does not depend on the request."""
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
        f"messages has {what} of one with the role {role!r:.60}, which the chat template of this model does not render; "
        "remove it, or train a model whose template does",
        "messages",
    )


def _fields(messages: Sequence[Json]) -> list[tuple[str, str]]:
    """Return the fields to prove, each with its role, in the order of the messages."""
    found: dict[tuple[str, str], None] = {}
    for message in messages:
        for name in message:
            if name != "role" and says(message, name):
                found[message["role"], name] = None
        if "tool_calls" in message and says(message, "content"):
            found[message["role"], BESIDE_CALLS] = None
    return list(found)
