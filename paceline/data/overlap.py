"""Overlap of training data with evaluation sets, by word n-grams.

Promise: a text that occurs in the evaluation set word by word has the share 1, whatever its case and punctuation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from paceline.data.rows import Rows

WORD = re.compile(r"\w+")
NGRAM_WORDS = 13
"""Words of an n-gram: as in the contamination studies of GPT-3 (Brown et al. 2020)."""
OVERLAP = 0.5
"""Share of a prompt's n-grams from which it counts as one of the other set."""
PROMPT_COLUMNS = ("prompt", "question", "problem", "input")
"""Columns that are taken for the prompt where the spec's is not there."""


class OverlapIndex:
    """The n-grams of an evaluation set's texts, as 64-bit hashes."""

    def __init__(self, texts: Iterable[str], words: int = NGRAM_WORDS) -> None:
        """Index `texts`. A text of fewer than `words` words is one n-gram as a whole."""
        self._words = words
        self._hashes = {value for text in texts for value in self._ngrams(text)}

    def found_in(self, training: Iterable[str], texts: Sequence[str]) -> list[int]:
        """Return the indices of those of the indexed `texts` that `training` holds: at least OVERLAP of their n-grams. Memory
        is that of `texts`, however much training data there is."""
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
    """Return the words of a prompt: its text, or those of its user's messages."""
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list) else []
    return "\n".join(
        str(message.get("content") or "")
        for message in messages
        if isinstance(message, dict) and message.get("role") == "user"
    )


def prompt_texts(rows: Rows, prompt_key: str) -> Iterator[str]:
    """Yield the text of each prompt, of the first of the usual columns that there is; none where there is none."""
    key = next((name for name in (prompt_key, *PROMPT_COLUMNS) if name in rows.columns), "")
    return (text_of(rows[index].get(key)) for index in range(len(rows) if key else 0))
