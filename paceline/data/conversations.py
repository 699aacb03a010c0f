"""Converts a conversation to token ids and the mask of the assistant's tokens, each answer with the token that ends it.

The chat template marks the assistant's text (`{% generation %}`). Without marks, the text is what a message of the
assistant adds to the rendering of the messages before, opened for an answer. Promise: every answer is trained with a
token at which sampling stops, or with the template's end of a turn; in the second case a token at which sampling stops
follows the last answer. So the model learns to stop. No token that begins outside an answer is trained.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from paceline.data.tokens import (
    NO_KWARGS,
    Kwargs,
    Tools,
    end_id,
    end_of,
    ends_by_text,
    ids_of,
    of_tools,
    refusals,
    render_chat,
    shown_to,
    stop_ids,
)
from paceline.errors import InvalidInput
from paceline.groups import IntArray

GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")

Span = tuple[int, int]
"""Begin and end of a span, in characters or tokens."""


def encode_conversation(
    tokenizer: Any, messages: list[Any], template_kwargs: Kwargs = NO_KWARGS, tools: Tools = None
) -> tuple[IntArray, np.ndarray]:
    """Return ([T] token ids, [T] bool: written by the assistant) of a conversation up to the end of its last answer.
    Raises InvalidInput if a template without marks renders a message in a way that depends on later messages, or if an
    answer may end without a token at which sampling stops."""
    if not tokenizer.chat_template:
        raise InvalidInput("the tokenizer has no chat template, which conversations need; use another tokenizer")
    if GENERATION_MARK.search(str(tokenizer.chat_template)):
        ids, spans = _by_marks(tokenizer, messages, template_kwargs, tools)
    else:
        ids, spans = _by_prefixes(tokenizer, messages, template_kwargs, tools)
    ids, spans = _with_stops(tokenizer, ids, spans, messages)
    if not spans:
        raise InvalidInput(
            f"no token of the conversation {messages!r:.60} is the assistant's: the conversation has no message of the "
            "assistant, or the chat template's {% generation %} marks enclose no such message"
        )
    mask = np.zeros(spans[-1][1], bool)
    for begin, end in spans:
        mask[begin:end] = True
    return np.array(ids[: len(mask)], np.int32), mask


def _by_prefixes(
    tokenizer: Any, messages: list[Any], template_kwargs: Kwargs, tools: Tools
) -> tuple[list[int], list[Span]]:
    """Return the tokens of the whole conversation, and the spans of the assistant's messages."""

    def written(shown: list[Any], *, opens: bool = False) -> list[int]:
        text = render_chat(tokenizer, shown, template_kwargs, tools, add_generation_prompt=opens)
        with refusals("the tokenizer", f"the messages {shown!r:.60}"):
            return ids_of(tokenizer, text)

    ids, spans = written(messages), []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened, closed = written(messages[:place], opens=True), written(messages[: place + 1])
        start, end = len(opened), len(closed)
        if opened != ids[:start] or closed != ids[:end] or start >= end:
            raise InvalidInput(
                f"the chat template changes the messages before {message!r:.60} once later messages follow, "
                "so the assistant's tokens cannot be identified; use a template with {% generation %} marks, or "
                "sft.loss_mask=completion"
            )
        own = end_of(tokenizer, ids[start:end], str(message.get("content") or ""))
        spans.append((start, end if own is None else start + own))
    return ids, spans


def _by_marks(
    tokenizer: Any, messages: list[Any], template_kwargs: Kwargs, tools: Tools
) -> tuple[list[int], list[Span]]:
    """Return the conversation's tokens and the spans between the template's marks. A token that begins before a mark
    belongs to the span only if its text before the mark is white space."""
    if not tokenizer.is_fast:
        raise InvalidInput(
            f"the chat template marks the assistant's tokens, but {type(tokenizer).__name__} cannot find them, because "
            "it does not record the positions of characters; use a tokenizer with a tokenizer.json"
        )
    text, marked = _marked(tokenizer, messages, template_kwargs, tools)
    with refusals("the tokenizer", f"the messages {messages!r:.60}"):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets: list[Span] = encoded["offset_mapping"]
    spans: list[Span] = []
    for begin, end in marked:
        within = [
            index
            for index, (first, behind) in enumerate(offsets)
            if first < end and max(behind, first + 1) > begin and not text[min(first, begin) : begin].strip()
        ]
        if within:
            spans.append((within[0], within[-1] + 1))
        else:  # an empty answer, of which only the stop is trained
            place = next((index for index, (first, _) in enumerate(offsets) if first >= end), len(offsets))
            spans.append((place, place))
    return list(encoded["input_ids"]), spans


def _marked(tokenizer: Any, messages: list[Any], template_kwargs: Kwargs, tools: Tools) -> tuple[str, list[Span]]:
    """Return the rendered conversation, and the spans between the template's marks, in characters."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render_chat(tokenizer, messages, template_kwargs, tools)  # raises the template's errors as InvalidInput
    taken = shown_to(tokenizer, messages, template_kwargs)
    shown = [{key: value for key, value in each.items() if value is not None} for each in taken]
    rendered: Any = render_jinja_template(
        conversations=[shown],
        chat_template=tokenizer.get_chat_template(None, tools),
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **template_kwargs, **of_tools(tools)},
    )
    (text,), (marked,) = rendered
    return text, list(marked)


def _with_stops(tokenizer: Any, ids: list[int], spans: list[Span], messages: list[Any]) -> tuple[list[int], list[Span]]:
    """Return tokens and spans, with each answer extended to the token at which sampling stops. If the template writes
    no such token after the last answer, one is added there. Raises InvalidInput if another answer has neither such a
    token nor the template's own end of a turn."""
    stops, ended = stop_ids(tokenizer), []
    for number, (begin, end) in enumerate(spans):
        is_last = number == len(spans) - 1
        behind = len(ids) if is_last else spans[number + 1][0]
        stop = _stop_of(tokenizer, ids, stops, (begin, end), behind)
        if stop is not None:
            end = stop + 1
        elif begin == end:
            continue  # marks around nothing that end no turn
        elif is_last and stops.isdisjoint(ids[end:]):
            ids = [*ids[:end], end_id(tokenizer)]
            end += 1
        elif is_last or (
            _is_new_turn(tokenizer, ids[end:behind], stops, messages)
            and not _has_own_end(tokenizer, ids[begin:end], messages)
        ):
            _refuse_endless(tokenizer, ids, end, behind, stops)
        ended.append((begin, end))
    return ids, ended


def _stop_of(tokenizer: Any, ids: list[int], stops: frozenset[int], span: Span, behind: int) -> int | None:
    """Return the index of a span's end token: the last stop in the span, else the first stop after white space."""

    def is_blank(first: int, last: int) -> bool:
        return not tokenizer.decode(ids[first:last], skip_special_tokens=False).strip()

    begin, end = span
    inner = max((index for index in range(begin, end) if ids[index] in stops), default=None)
    if inner is not None and is_blank(inner + 1, end):
        return inner
    outer = next((index for index in range(end, behind) if ids[index] in stops), None)
    return outer if outer is not None and is_blank(end, outer) else None


def _is_new_turn(tokenizer: Any, between: list[int], stops: frozenset[int], messages: list[Any]) -> bool:
    """Return whether the tokens between two spans end the turn: they have a stop, or a message of another role."""
    text = tokenizer.decode(between, skip_special_tokens=False)
    said = (str(each.get("content") or "").strip() for each in messages if each["role"] != "assistant")
    return not stops.isdisjoint(between) or any(each in text for each in said if each)


def _has_own_end(tokenizer: Any, span: list[int], messages: list[Any]) -> bool:
    """Return whether a span ends with text of the template, such as ChatML's end of a turn in a base model."""
    text = "".join(tokenizer.decode(span, skip_special_tokens=False).split())
    said = ("".join(str(each.get("content") or "").split()) for each in messages if each["role"] == "assistant")
    return not any(text.endswith(each) for each in said if each)


def _refuse_endless(tokenizer: Any, ids: list[int], end: int, behind: int, stops: frozenset[int]) -> None:
    """Raise InvalidInput for an answer without a stop, unless stop strings end the run's answers."""
    if ends_by_text(tokenizer):
        return
    shown = tokenizer.decode(ids[max(end - 4, 0) : min(end + 6, behind)], skip_special_tokens=False)
    names = ", ".join(sorted(map(repr, map(str, tokenizer.convert_ids_to_tokens(sorted(stops))))))
    raise InvalidInput(
        f"the chat template writes no token at which sampling stops ({names}) directly after the assistant's answer "
        f"(…{shown!r:.80}), so the model would never learn to stop; put the template's end of a turn within the "
        "{% generation %} marks, or name it in eos_token or policy.generation.stop_token_ids"
    )
