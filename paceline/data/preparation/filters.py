"""Filters rows by prompt (`data.preparation`): length, overlap of word n-grams with evaluation sets, earlier pass rate.
A filter returns the reason for leaving a row out, or an empty text. Promise: a text that occurs in an evaluation set
word by word has the overlap 1, whatever its case and punctuation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from paceline.data.messages import tools_of_prompt
from paceline.data.rows import FILE_KINDS, Rows, open_rows, open_source
from paceline.errors import DataError, InvalidInput
from paceline.files.storage import is_url
from paceline.spec import RunSpec

WORD = re.compile(r"\w+")
NGRAM_WORDS = 13
"""Number of words of an n-gram, as in the contamination studies of GPT-3 (Brown et al. 2020)."""
OVERLAP = 0.5
"""A text counts as contained in a set if the set has at least this share of the text's n-grams."""
PROMPT_COLUMNS = ("prompt", "question", "problem", "input")
"""Columns that are used as the prompt if `data.prompt_key` is missing."""


class OverlapIndex:
    """Holds the n-grams of an evaluation set's texts, as 64-bit hashes."""

    def __init__(self, texts: Iterable[str], words: int = NGRAM_WORDS) -> None:
        """Index `texts`. A text of fewer than `words` words is one n-gram."""
        self._words = words
        self._hashes = {value for text in texts for value in self._ngrams(text)}

    def found_in(self, training: Iterable[str], texts: Sequence[str]) -> list[int]:
        """Return the indices of the indexed `texts` that `training` contains: at least OVERLAP of their n-grams. Memory
        depends only on `texts`, not on the training data."""
        found = {value for text in training for value in self._ngrams(text) if value in self._hashes}
        indices = []
        for index, text in enumerate(texts):
            ngrams = list(self._ngrams(text))
            if ngrams and sum(value in found for value in ngrams) / len(ngrams) >= OVERLAP:
                indices.append(index)
        return indices

    def share(self, text: str) -> float:
        """Return the share of the text's n-grams that the evaluation set has; 0 for a text without words."""
        found = [value in self._hashes for value in self._ngrams(text)]
        return sum(found) / len(found) if found else 0.0

    def _ngrams(self, text: str) -> Iterator[int]:
        words = WORD.findall(text.lower())
        for start in range(max(1, len(words) - self._words + 1) if words else 0):
            yield xxhash.xxh3_64_intdigest(" ".join(words[start : start + self._words]).encode())


def text_of(prompt: object) -> str:
    """Return the words of a prompt: the text, or the text of the user's messages."""
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list) else []
    return "\n".join(
        str(message.get("content") or "")
        for message in messages
        if isinstance(message, dict) and message.get("role") == "user"
    )


def prompt_texts(rows: Rows, prompt_key: str) -> Iterator[str]:
    """Yield the text of each prompt in the first of the usual columns that exists; nothing if none exists."""
    key = next((name for name in (prompt_key, *PROMPT_COLUMNS) if name in rows.columns), "")
    return (text_of(rows[index].get(key)) for index in range(len(rows) if key else 0))


Row = Mapping[str, Any]
Filter = Callable[[Any, Row], str]
"""Takes a prompt (text or messages) and its row; returns the reason to leave the row out, or an empty text."""


def by_length(length: Callable[[Any, Row], int], most: int, unit: str) -> Filter:
    """Return a filter that leaves out prompts of more than `most` units."""
    return lambda prompt, row: f"prompt of more than {most} {unit}" if length(prompt, row) > most else ""


def by_overlap(indexes: Mapping[str, OverlapIndex], share: float) -> Filter:
    """Return a filter that leaves out prompts with at least `share` of their n-grams in a named evaluation set."""

    def check(prompt: Any, row: Row) -> str:
        text = text_of(prompt)
        found = next((name for name, index in indexes.items() if index.share(text) >= share), "")
        return f"prompt that overlaps with {found}" if found else ""

    return check


def by_pass_rate(rates: Mapping[bytes, float], low: float, high: float) -> Filter:
    """Return a filter that leaves out prompts whose pass rate is known and outside [low, high]."""

    def check(prompt: Any, row: Row) -> str:
        rate = rates.get(key_of(prompt))
        if rate is None or low <= rate <= high:
            return ""
        return f"pass rate {'below' if rate < low else 'above'} {low if rate < low else high:g}"

    return check


def pass_rates(attempts: Iterable[tuple[Any, Iterable[float]]], passed_at: float) -> dict[bytes, float]:
    """Map the key (`key_of`) of each prompt to the share of its completions in all runs that have a reward of
    `passed_at` or more."""
    counts: dict[bytes, tuple[int, int]] = {}
    for prompt, rewards in attempts:
        known = [reward for reward in rewards if reward == reward]  # NaN: nothing scored it
        passed, number = counts.get(key_of(prompt), (0, 0))
        counts[key_of(prompt)] = passed + sum(reward >= passed_at for reward in known), number + len(known)
    return {key: passed / number for key, (passed, number) in counts.items() if number}


def key_of(prompt: Any) -> bytes:
    """Return 16 bytes that identify the user's words of a prompt, without the system prompt of a run."""
    return hashlib.blake2b(text_of(prompt).strip().encode("utf-8", "surrogatepass"), digest_size=16).digest()


STEMS = ("test", "eval", "validation", "valid", "dev")
"""Stems of file names: a file beside the training data with such a stem counts as an evaluation set."""


def evaluation_sets(spec: RunSpec, prepared: RunSpec) -> dict[str, Rows]:
    """Return the rows of each evaluation set of a spec by the set's name. `prepared` is the spec after its preparation,
    so that its validation data have the columns of its training data. Raises DataError, Unreadable."""
    found: dict[str, Rows] = {}
    if spec.data.validation is not None and spec.data.validation != spec.data.train:
        found["data.validation"] = open_source(prepared.data.source(validation=True))
    return found | {str(path): open_rows(str(path), "train", "test file") for path in _siblings(spec)}


def _siblings(spec: RunSpec) -> Iterator[Path]:
    """Yield the paths of the evaluation sets beside the files of the training data, sorted within each folder."""
    train = spec.data.names()
    named = (*train, *spec.data.names(validation=True))
    for folder in sorted({Path(name).parent for name in train if not is_url(name)}):
        for path in sorted(folder.glob("*.*")):
            is_set = path.stem.lower() in STEMS and path.suffix in FILE_KINDS
            if is_set and path.is_file() and str(path) not in named:
                yield path


Attempts = Callable[[str], Iterable[tuple[Any, Iterable[float]]]]
"""Called with the id of a run; returns the prompt of each scored group, with the total rewards of its completions."""


def filters_of(spec: RunSpec, prepared: RunSpec, attempts_of: Attempts) -> list[Filter]:
    """Return the filters of a spec. In `prepared`, the preparation's function has already changed the validation data.
    Raises InvalidInput if the tokenizer or an evaluation set is missing; DataError, Unreadable for an evaluation set
    that cannot be used or read; the errors of `attempts_of`."""
    return [*_by_length(spec), *_by_overlap(spec, prepared), *_by_pass_rate(spec, attempts_of)]


def _by_length(spec: RunSpec) -> Iterator[Filter]:
    section = spec.data.preparation
    if section.max_prompt_characters is not None:
        yield by_length(lambda prompt, _: len(text_of(prompt)), section.max_prompt_characters, "characters")
    if section.max_prompt_tokens is not None:
        from paceline.data.tokens import encode_prompt, load_tokenizer, with_system_prompt

        tokenizer, data = load_tokenizer(spec.policy), spec.data
        template = data.apply_chat_template, data.chat_template_kwargs

        def tokens(prompt: Any, row: Row) -> int:
            prompt = with_system_prompt(prompt, data)
            return len(encode_prompt(tokenizer, prompt, *template, tools=tools_of_prompt(prompt, row)))

        yield by_length(tokens, section.max_prompt_tokens, "tokens")


def _by_overlap(spec: RunSpec, prepared: RunSpec) -> Iterator[Filter]:
    share = spec.data.preparation.max_overlap
    if share is None:
        return
    sets = evaluation_sets(spec, prepared)
    if not sets:
        raise InvalidInput(
            f"data.preparation.max_overlap is {share:g}, but there is no evaluation set; set data.validation, or put test.jsonl "
            "beside the training data"
        )
    for name, rows in sets.items():
        if not any(prompt_texts(rows, spec.data.prompt_key)):
            raise DataError(
                f"data.preparation.max_overlap: {name} has no prompts in {spec.data.prompt_key!r} or a usual column, "
                f"only {', '.join(rows.columns)}; rename its column, or move the file if it is no evaluation set"
            )
    indexes = {name: OverlapIndex(prompt_texts(rows, spec.data.prompt_key)) for name, rows in sets.items()}
    yield by_overlap(indexes, share)


def _by_pass_rate(spec: RunSpec, attempts_of: Attempts) -> Iterator[Filter]:
    section = spec.data.preparation
    if section.pass_rate is None:
        return
    attempts = (attempt for run_id in section.pass_rate_of for attempt in attempts_of(run_id))
    yield by_pass_rate(pass_rates(attempts, section.passed_at), *section.pass_rate)
