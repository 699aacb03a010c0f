"""Reads rows of supervised and preference data sets.

Supported forms by algorithm:

    sft              prompt, completion; or whole conversations (data.messages_key, or `messages`); or text that trains as a
                     whole (`text`)
    dpo, orpo, rm    prompt, chosen, rejected (one, or a list of several), and for rm an optional margin;
                     chosen and rejected without a prompt: the common beginning of both is the prompt;
                     context, completions: [{rank, completion}, …], as NeMo RL has it: the lowest rank is chosen;
                     two completions and a number that says which is better (data.preference_key)
    kto              prompt, completion, label; or pairs: each is a good and a bad completion

A completion is text, or the messages that follow the prompt. Promise: whatever `read_*` accepts can be tokenised unless
a chat template refuses it. Everything else is a DataError with a remedy, which names the format if another algorithm
reads it (`paceline.data.formats`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.data.messages import are_messages, fault_of_messages, plain
from paceline.data.row_checks import check_columns, check_prompt, check_text
from paceline.data.row_prompts import conversation_key, has_text, with_keys_of_row
from paceline.data.tokens import with_system_prompt
from paceline.data.written import as_number
from paceline.errors import DataError
from paceline.spec import DataSection

MARK = r"<[^<>\s]*start[^<>\s]*>\w*|<[|｜][^<>]*[|｜]>|</?\w[^<>\s]*>|\[/?[A-Z_]+\]"
"""A mark of a chat: `<start_of_turn>user`, `<|user|>`, `</s>`, `[INST]`."""
WRITTEN = re.compile(rf"{MARK}|\s+|(?:(?!{MARK})\S)+")
"""Units of a text: marks, white space, and text between them. A pair's common beginning never ends within a unit."""
WORDS = re.compile(rf"{MARK}|\s+|[\w\u0300-\u036f]+|(?:(?!{MARK})[^\w\s])+")
"""Units for texts without white space, shorter than the units of WRITTEN."""


class Demonstration(NamedTuple):
    """A prompt and the completion that `sft` imitates."""

    prompt: Any
    """Text or messages; all but the last message of a whole conversation; None if the whole text trains."""
    completion: Any
    """Text, or the messages that follow the prompt."""


class Preference(NamedTuple):
    """One prompt with a better completion and at least one worse completion."""

    prompt: Any
    chosen: Any
    rejected: tuple[Any, ...]
    margin: float
    """Margin of the chosen completion in units of the reward; 0 by default."""


class LabeledCompletion(NamedTuple):
    prompt: Any
    completion: Any
    desirable: bool


def read_demonstration(row: dict[str, Any], data: DataSection) -> Demonstration:
    if (key := conversation_key(row, data)) is not None:
        messages: Any = row.get(key)
        if not are_messages(messages) or len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise DataError(
                f"column {key!r} must be at least two chat messages, the last by the assistant, not "
                f"{messages!r:.80}; correct or remove the row"
            )
        check_text(messages, key)
        if data.system_prompt is not None and messages[0]["role"] == "system":
            raise DataError("data.system_prompt is set, but the conversation has a system message; keep one of them")
        return Demonstration(with_system_prompt(messages[:-1], data), plain(messages[-1:]))
    if has_text(row, data):
        return Demonstration(None, _whole_text(row, data))
    data = with_keys_of_row(row, data)
    check_prompt(row, data.prompt_key)
    check_columns(row, (data.completion_key,))
    completion = _completion(row[data.completion_key], data.completion_key, row[data.prompt_key])
    return Demonstration(as_prompt(row[data.prompt_key], (completion,), data), completion)


def _whole_text(row: dict[str, Any], data: DataSection) -> str:
    text = row["text"]
    if not isinstance(text, str) or not text:
        raise DataError(f"column 'text' must be text that is not empty, not {text!r:.80}; correct or remove the row")
    if data.system_prompt is not None:
        raise DataError("data.system_prompt is set, but column 'text' is no chat; remove data.system_prompt")
    return text


def read_preference(row: dict[str, Any], data: DataSection) -> Preference:
    if "completions" in row and data.chosen_key not in row:
        return _ranked(row, data)
    check_columns(row, data.pair_keys)
    chosen, rejected = row[data.chosen_key], row[data.rejected_key]
    if preference_of(row, data) > 0:
        chosen, rejected = rejected, chosen
    several = rejected if isinstance(rejected, list) and not are_messages(rejected) else [rejected]
    if not several:
        raise DataError(
            f"column {data.rejected_key!r} is an empty list; give it at least one completion, or remove the row"
        )
    margin = row.get(data.margin_key, 0.0)
    margin = 0.0 if margin is None else as_number(margin)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(
            f"column {data.margin_key!r} must be a finite number, not {margin!r:.80}; correct it, or name another column in "
            "data.margin_key"
        )
    if data.prompt_key not in row:
        prompt, chosen, several = _split_conversations(chosen, several, data)
    else:
        check_prompt(row, data.prompt_key)
        prompt = row[data.prompt_key]
        chosen, *several = _behind_prompt(prompt, [chosen, *several])
    keys, begun = (data.chosen_key, data.rejected_key), row.get(data.prompt_key)
    return _preference(prompt, chosen, several, float(margin), data, keys, begun)


def preference_of(row: Mapping[str, Any], data: DataSection) -> float:
    """Return the number in the column `data.preference_key` (-1 if it is unset): below 0 if the completion of
    `chosen_key` is better, above 0 if the completion of `rejected_key` is better, 0 if neither is better. Raises
    DataError."""
    if data.preference_key is None:
        return -1.0
    value = as_number(row.get(data.preference_key))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"column {data.preference_key!r} must be a finite number, below 0 where {data.chosen_key!r} is better and above 0 "
            f"where {data.rejected_key!r} is, not {value!r:.80}; correct it, or name another column in data.preference_key"
        )
    return float(value)


def read_labeled_completion(row: dict[str, Any], data: DataSection) -> LabeledCompletion:
    check_prompt(row, data.prompt_key)
    check_columns(row, (data.completion_key,))
    label = row.get(data.label_key)
    if not isinstance(label, bool) and label not in (0, 1):
        raise DataError(
            f"column {data.label_key!r} must be true or false, not {label!r:.80}; name the column in data.label_key"
        )
    completion = _completion(row[data.completion_key], data.completion_key, row[data.prompt_key])
    return LabeledCompletion(as_prompt(row[data.prompt_key], (completion,), data), completion, bool(label))


def _ranked(row: dict[str, Any], data: DataSection) -> Preference:
    """Return the preference of `context` and `completions` with ranks, 0 being the best."""
    ranked = row["completions"]
    fits = isinstance(ranked, list) and all(
        isinstance(item, dict) and isinstance(item.get("rank"), int) and item.get("completion") for item in ranked
    )
    if not fits or len(ranked) < 2:
        raise DataError(
            f"column 'completions' must be at least two objects with rank and completion, not {ranked!r:.80}; "
            "correct or remove the row"
        )
    ordered = sorted(ranked, key=lambda item: int(item["rank"]))
    best = [item for item in ordered if item["rank"] == ordered[0]["rank"]]
    if len(best) > 1:
        raise DataError(
            f"{len(best)} completions have the best rank {best[0]['rank']}; only one of them can be the chosen "
            "completion; correct the ranks, or remove the row"
        )
    key = "context" if "context" in row else data.prompt_key
    check_prompt(row, key)
    chosen, *rejected = (item["completion"] for item in ordered)
    return _preference(row[key], chosen, rejected, 0.0, data, ("completions", "completions"), row[key])


def _preference(
    prompt: Any, chosen: Any, rejected: list[Any], margin: float, data: DataSection, keys: tuple[str, str], begun: Any
) -> Preference:
    chosen = _completion(chosen, keys[0], begun)
    worse = tuple(_completion(completion, keys[1], begun) for completion in rejected)
    if chosen in worse:
        raise DataError(
            f"the chosen completion is also rejected ({chosen!r:.60}); a pair without a difference teaches nothing, so "
            "remove it"
        )
    return Preference(as_prompt(prompt, (chosen, *worse), data), chosen, worse, margin)


def _split_conversations(chosen: Any, rejected: list[Any], data: DataSection) -> tuple[Any, Any, list[Any]]:
    """Return prompt and completions of whole conversations or texts, whose common beginning is the prompt."""
    whole = [chosen, *rejected]
    if all(isinstance(text, str) for text in whole):
        return _split_texts(whole, data)
    if not all(are_messages(conversation) for conversation in whole):
        raise DataError(
            f"there is no column {data.prompt_key!r}, so {data.chosen_key!r} and {data.rejected_key!r} must be whole "
            "conversations (lists of messages); name the prompt in data.prompt_key"
        )
    for conversation, key in zip(whole, (data.chosen_key, *[data.rejected_key] * len(rejected)), strict=True):
        check_text(conversation, key)
    chosen, *rejected = whole = [plain(conversation) for conversation in whole]
    common = 0
    for turn in zip(*whole, strict=False):
        if any(message != turn[0] for message in turn):
            break
        common += 1
    if common == 0 or any(len(conversation) == common for conversation in whole):
        raise DataError(
            f"{data.chosen_key!r} and {data.rejected_key!r} must begin with the same messages and then "
            "differ; correct or remove the row"
        )
    return chosen[:common], chosen[common:], [conversation[common:] for conversation in rejected]


def _behind_prompt(prompt: Any, whole: list[Any]) -> list[Any]:
    """Return completions without the prompt, if all begin with the prompt (HuggingFaceH4/ultrafeedback_binarized)."""
    if not all(are_messages(each) and not fault_of_messages(each) for each in whole):
        return whole
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else plain(prompt)
    repeats = all(len(each) > len(asked) and plain(each[: len(asked)]) == asked for each in whole)
    return [each[len(asked) :] for each in whole] if repeats else whole


def _split_texts(whole: list[str], data: DataSection) -> tuple[str, str, list[str]]:
    """Return the common beginning of texts up to the last position at which all texts may be split, and the remainders.
    A space at the split belongs to the remainder, as in TRL, because tokens of words begin with it."""
    first, last = min(whole), max(whole)  # the common beginning of these two is common to all
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    common = min(common, min(map(len, whole)) - 1)  # each text continues after it
    prompt = ""
    for units in (WRITTEN, WORDS):
        places = set.intersection(*({found.end() for found in units.finditer(text)} for text in whole))
        prompt = first[: max((place for place in places if place <= common), default=0)].removesuffix(" ")
        if prompt:
            break
    if not prompt:
        raise DataError(
            f"there is no column {data.prompt_key!r}, and the texts of {data.chosen_key!r} and {data.rejected_key!r} have no "
            "common beginning after which both continue; name the prompt in data.prompt_key"
        )
    rests = [text[len(prompt) :] for text in whole]
    return prompt, rests[0], rests[1:]


def is_whole(row: Mapping[str, Any]) -> bool:
    """Return whether the completion of a row is complete: false for a recorded completion cut at the length limit."""
    return row.get("finish_reason") != "length"


def as_prompt(prompt: Any, completions: tuple[Any, ...], data: DataSection) -> Any:
    """Return the prompt with the system prompt; a text becomes a list of messages if any completion is messages."""
    if isinstance(prompt, str) and any(not isinstance(completion, str) for completion in completions):
        prompt = [{"role": "user", "content": prompt}]
    return with_system_prompt(prompt, data)


def continuing(prompt: Any, completion: Any) -> Any:
    """Return the completion of a row. If the prompt has begun the completion's message, return the text of that
    message. Raises DataError if the completion is then more than this text."""
    begins = are_messages(prompt) and prompt[-1]["role"] == "assistant"
    if not (begins and are_messages(completion) and completion[0]["role"] == "assistant"):
        return completion
    text = completion[0]["content"]
    if len(completion) > 1 or completion[0].get("tool_calls") or not isinstance(text, str):
        raise DataError(
            f"the prompt ends with the assistant's message {prompt[-1]['content']!r:.60}, which the completion continues, so "
            "the completion must be text or one message with text alone; move that message into the completion"
        )
    return text


def _completion(value: Any, key: str, begun: Any) -> Any:
    """Return a checked completion of a prompt; `begun` is that prompt. Raises DataError."""
    check_text(value, key)
    return continuing(begun, plain(value))
