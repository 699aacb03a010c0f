"""A chat request made ready to sample: its token ids, and the reader of its answers.

A call that `tool_choice` demands is begun in the prompt, in the words of the chat template: the model continues within the
call and cannot do otherwise. These tokens are context, like the rest of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.chat.answer_reader import AnswerReader
from paceline.chat.call_formats import CallFormat
from paceline.chat.completion_texts import END_THINK
from paceline.chat.messages import Json, Unsupported
from paceline.chat.rendering import ChatTemplate
from paceline.chat.requests import ChatAsk
from paceline.chat.template_probes import AnswerFormat
from paceline.chat.tools import Choice
from paceline.data.tokens import NO_KWARGS, encode_continuation
from paceline.groups import IntArray

NO_CALLS = AnswerFormat("none", False)


@dataclass(frozen=True)
class PreparedChat:
    """A chat whose answer can be sampled."""

    prompt_ids: IntArray
    """[P] tokens, opened for the answer."""
    calls: CallFormat
    """How calls are read from the answer; `none` where no calls are expected."""
    reasons: bool
    """True when reasoning is told from content."""
    in_reasoning: bool
    """True when the prompt has opened the reasoning."""
    begun: str = ""
    """Beginning of a call, the last tokens of the prompt."""
    tools: Sequence[Json] = ()
    max_calls: int | None = None

    def reader(self) -> AnswerReader:
        """Return a new reader, for one answer."""
        reader = AnswerReader(self.calls, self.reasons, self.in_reasoning, self.tools, self.max_calls)
        reader.push(self.begun)
        return reader


def prepare_chat(
    ask: ChatAsk,
    template: ChatTemplate,
    run_kwargs: Mapping[str, Any] = NO_KWARGS,
    call_format: str = "auto",
) -> PreparedChat:
    """Return a request made ready: `run_kwargs` are the run's arguments of the template, which those of the request replace,
    `call_format` is how the run's model writes calls (`auto`: as its template does).

    Raises Unsupported for what the template does not render, for tools whose calls could not be read, and for a call that
    cannot be demanded; InvalidInput for what the template refuses.
    """
    kwargs = {
        **run_kwargs,
        **(ask.chat_template_kwargs or {}),
        **template.effort_kwargs(ask.reasoning_effort),
    }
    tools, choice = ask.tools or [], ask.tool_choice
    written = template.answer_format
    calls = written.calls if call_format == "auto" else call_format
    messages = ask.rendered()
    prompt_ids = template.encode(messages, tools, kwargs, choice=choice)
    if choice.kind == "none":
        calls = "none"
    elif calls == "none" and call_format == "auto":
        raise Unsupported(
            "tools are given, but the chat template of this model writes calls in a form that is not known here, so none could "
            "be read from its answers (known: <tool_call> marks, and a call as the whole text); set environment.tool_parser",
            "tools",
        )
    reasons = written.reasons and ask.separate_reasoning is not False
    opens = template.opens_reasoning(prompt_ids, messages)
    begun = ""
    if choice.kind in ("required", "function"):
        begun = _begun_call(choice, tools, written if calls == written.calls else NO_CALLS)
        text = f"\n{END_THINK}\n\n{begun}" if opens else begun
        ids = encode_continuation(template.tokenizer, prompt_ids, text)
        prompt_ids, opens = np.concatenate([prompt_ids, ids]), False
    return PreparedChat(
        prompt_ids,
        calls,  # type: ignore[arg-type]  # the spec allows no other
        reasons,
        opens and reasons,
        begun,
        tools,
        1 if ask.parallel_tool_calls is False else None,
    )


def _begun_call(choice: Choice, tools: Sequence[Json], written: AnswerFormat) -> str:
    """Return the beginning of a demanded call, up to where the model has a choice."""
    if not written.opening:
        raise Unsupported(
            f"tool_choice is {choice.kind!r}, but the chat template of this model writes calls in a form that is not known "
            "here, so none can be begun; take 'auto'",
            "tool_choice",
        )
    name = choice.name or (tools[0]["function"]["name"] if len(tools) == 1 else "")
    return written.opening + name + (written.after_name if name else "")
