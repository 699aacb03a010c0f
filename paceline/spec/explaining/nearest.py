"""The known name that a misspelt one means, or none: a wrong guess costs more than no guess."""

from __future__ import annotations

from collections.abc import Iterable

MAX_LETTERS = 64
"""Longer words are not compared, because the time grows with the product of the lengths."""
MAX_GUESSES = 3
"""More candidates than these are no guess."""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the names that `word` may mean, the best first; empty if none is near enough.

    Near is: the same but for case and punctuation; few typing errors for its length; or all words of `word` occur, in their
    order, among those of the name (`max_step` in `max_num_steps`).
    """
    if len(word) > MAX_LETTERS:
        return []
    names = list(known)
    same = [name for name in names if _letters(name) == _letters(word)]
    if same:
        return same[:1]
    distances = {name: distance(word.lower(), name.lower()) for name in names if len(name) <= MAX_LETTERS}
    allowed = typing_errors(word)
    close = sorted((each, name) for name, each in distances.items() if each <= allowed)
    if close:
        return [name for each, name in close if each == close[0][0]][:MAX_GUESSES]
    holding = [name for name in names if _words_within(word, name)]
    return holding if len(holding) <= MAX_GUESSES else []


def typing_errors(word: str) -> int:
    """Return the typing errors at which a word of this length is still recognisable: none in three letters, one up to seven,
    then one for each four."""
    return 0 if len(word) <= 3 else max(1, len(word) // 4)


def distance(one: str, other: str) -> int:
    """Return the number of letters to insert, delete, replace or swap with their neighbour that turn `one` into `other`
    (optimal string alignment)."""
    before, last = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        row = [i]
        for j, against in enumerate(other, start=1):
            best = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != against))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == against:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before, last = last, row
    return last[-1]


def _letters(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum())


def _words_within(word: str, name: str) -> bool:
    """Return whether each part of `word` is a part of `name`, in order, with or without a plural s."""
    parts = iter(part.rstrip("s") for part in name.lower().split("_"))
    return all(part.rstrip("s") in parts for part in word.lower().split("_"))
