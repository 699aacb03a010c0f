r"""Finds the final answer in a text.

Promise: the same text always gives the same answer, in time linear in its length. A statement without a value is
ignored if another statement has one.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from paceline.chat.completion_texts import END_THINK, answer_of
from paceline.reward.builtin.expressions import MAX_CHARS, Node, read
from paceline.reward.builtin.notation import TEXT

BOXED = re.compile(r"\\(?:f|frame)?box(?:ed)?[ \n]{0,9}(?:(\{)|(\\frac[ ]{0,9}\d\d|[^\s{}\\$][^\s{}\\$]{0,99}))")
GAP = r"(?:[\s$]|\\q?quad|\\[()\[\], ])*"
JOINED = re.compile(rf"{GAP}(?:,|;|,?\s*(?:\\text\{{)?\s*,?\s*(?:and|or)\s*\}}?){GAP}")
HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*(\S.{0,1999})")
ANSWER_LINE = re.compile(
    r"^[ \t>*#_-]{0,20}(?:A|(?i:(?:the )?(?:final |correct )?answer))[ \t*_]{0,9}(?::[ \t*_]{0,9}(?:\n\s{0,9})?|\n\s{0,9})(\S.{0,1999})",
    re.MULTILINE,
)
ANSWER_IS = re.compile(
    r"\banswer(?:[ \t]to[ \t][^.\n:]{1,80}?)?[ \t]{1,9}(?:is(?![a-z])|=)[ \t]{0,9}:?[ \t*]{0,9}(?=(\S.{0,1999}))",
    re.IGNORECASE,
)
LEAD = re.compile(
    r"(?:(?:therefore|thus|hence|then|simply|just|clearly|exactly|approximately|about|equal to|equals|given by|option|choice|indeed"
    r"|the number|now|also|still|so)[ ,:]+)+",
    re.IGNORECASE,
)
CLAUSE = re.compile(
    r"[.!?](?=\s|$)|\s+(?:[-–—]+|=>)\s+|—|;|\s*[(\[](?=[A-Za-z]{2})|:\s|,?\s+(?:because|since|as|so|which|where|that|given|due|from|by|if"
    r"|but|when|after|with|for)\b|,\s+(?=[a-zA-Z]{2})(?!and\b|or\b)",
    re.IGNORECASE,
)
DOLLAR = re.compile(r"(?<!\\)\$")
MAX_STATEMENTS = 20
"""Largest number of statements of each form that are read, from the end of a text backwards."""
MAX_WORDS = 4
"""Largest number of words in an answer without mathematics; a longer text is prose."""
MAX_CLAUSES = 10
"""Largest number of ends of clauses that are tried as the end of a value in prose."""


class Statement(NamedTuple):
    r"""A stated answer in a text. Marks (`\boxed`, `####`, a tag) set `is_marked` and take precedence over prose."""

    at: int
    is_marked: bool
    text: str


def find_answer(text: str, holds: Callable[[str], bool] | None = None) -> str | None:
    r"""Return the answer that `text` states, or None.

    Statements are `\boxed{…}` (braces balanced; also `\fbox{…}` and `\boxed 42`), `#### …` in front of a value,
    `<answer>…</answer>`, a line `A: …`, `Answer: …` or `Final answer: …`, and `answer is …`. A line and `answer is …`
    end where their value ends. The answer is the last marked statement that has a value, else the last one in prose.
    `holds` decides what is a value: mathematics, and in marked statements also a few words. If no statement has a
    value, the last statement counts unchanged. A reasoning (`<think>…</think>`) is searched only if it is closed and
    the text after it states no answer.
    """
    for part in _parts(text):
        if found := sorted(_statements(part, holds or holds_value)):
            return _chosen(found, holds or is_answer, holds or holds_value)
    return None


def holds_value(text: str) -> bool:
    """Return whether `text` is readable mathematics and not words."""
    tree = read(text)
    return tree is not None and not _words_of(tree)


def is_answer(text: str) -> bool:
    """Return whether `text` can be an answer: mathematics, or a few words such as a name."""
    tree = read(text)
    return "\\" in text or (tree is not None and all(len(each.split()) <= MAX_WORDS for each in _words_of(tree)))


def _words_of(tree: Node) -> list[str]:
    return [each.args[0] for each in (tree.args if tree.kind == "list" else (tree,)) if each.kind == "text"]


def clean(answer: str) -> str:
    r"""Return `answer` without the marks around a value: white space, `$…$`, `\(…\)`, `**`, quotes, a final full stop."""
    answer, previous = re.sub(r"\\!\s*", "", answer.strip().replace("{,}", ",")), None
    while answer != previous and len(answer) < 4 * MAX_CHARS:
        previous = answer
        answer = answer.strip().strip("`*\"'").removesuffix(".").removesuffix(",")
        if (dollars := len(DOLLAR.findall(answer))) and dollars % 2 == 0 and answer.strip("$ "):
            answer = DOLLAR.sub("", answer)
        for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
            inside = answer[len(opening) : -len(closing)]
            is_marked = answer.startswith(opening) and answer.endswith(closing)
            if is_marked and inside.strip("$ ") and closing not in inside:
                answer = inside
        if answer.startswith(("\\boxed{", "\\fbox{", "{")) and answer.endswith("}"):
            start = answer.index("{")
            if _closings(answer).get(start) == len(answer) - 1:
                answer = answer[start + 1 : -1]
    return answer.replace(r"\$", "$")


def _parts(text: str) -> list[str]:
    """Return the texts to search in order: the text behind the reasoning, then the reasoning if it is closed."""
    reasoning, ended, _ = text.rpartition(END_THINK)
    return [answer_of(text), reasoning] if ended else [answer_of(text)]


def _statements(text: str, holds: Callable[[str], bool]) -> Iterator[Statement]:
    yield from _last(_boxes(text))
    yield from _tags(text)
    for match in _last(HASHES.finditer(text)):
        # A Markdown heading has the same mark.
        yield Statement(match.start(), holds(clean(inner := _inner(match[1]))), inner)
    for pattern in (ANSWER_LINE, ANSWER_IS):
        for match in _last(pattern.finditer(text)):
            yield Statement(match.start(), False, match[1])


def _tags(text: str) -> Iterator[Statement]:
    for closing in _last(match.start() for match in re.finditer("</answer>", text)):
        opening = text.rfind("<answer>", 0, closing)
        if opening >= 0:
            yield Statement(opening, True, _inner(text[opening + len("<answer>") : closing]))


def _last(found: Iterable[Any]) -> Sequence[Any]:
    return collections.deque(found, MAX_STATEMENTS)


def _inner(text: str) -> str:
    boxes = [each.text for each in _last(_boxes(text))]
    return boxes[-1] if boxes else _said(text) or text


def _said(text: str) -> str | None:
    found = _last(ANSWER_IS.finditer(TEXT.sub(r"\1", text))) if len(text) <= MAX_CHARS else ()
    return found[-1][1] if found else None


def _chosen(found: list[Statement], marked: Callable[[str], bool], prose: Callable[[str], bool]) -> str:
    """Return the last marked answer that passes `marked`, else the last in prose that passes `prose`, else the last."""
    last = ""
    for is_marked, holds in ((True, marked), (False, prose)):
        for each in reversed([each for each in found if each.is_marked == is_marked]):
            value = clean(each.text) if is_marked else _value(each.text, holds)
            if holds(value):
                return value
            last = last or value
    return last


def _value(text: str, holds: Callable[[str], bool]) -> str:
    """Return the value at the beginning of prose: the first sentence if it is a value, else the longest value that ends
    where a clause ends."""
    text = LEAD.sub("", text, count=1) if LEAD.match(text) else text
    if text.startswith("**") and "**" in text[2:]:
        text = text[2 : text.index("**", 2)]
    cuts = [match.start() for match in itertools.islice(CLAUSE.finditer(text), MAX_CLAUSES)]
    sentence = next((cut for cut in cuts if text[cut] in ".!?"), len(text))
    for cut in [sentence, *(cut for cut in reversed(cuts) if cut < sentence)]:
        if cut and holds(value := clean(text[:cut])):
            return value
    return clean(text[:sentence])


def _boxes(text: str) -> Iterator[Statement]:
    """Yield each box. Boxes with only a comma, `and` or `or` between them are one statement of several values."""
    closings: dict[int, int] | None = None
    last: tuple[Statement, int] | None = None
    for match in BOXED.finditer(text):
        inside, end = match[2] or "", match.end()
        if match[1]:
            closings = _closings(text) if closings is None else closings
            closing = closings.get(match.end() - 1)
            if closing is None:
                continue
            inside, end = text[match.end() : closing], closing + 1
        if not inside[:MAX_CHARS].strip(" \n$.,{}"):
            continue
        statement = Statement(match.start(), True, _said(inside) or inside)
        if last and last[1] <= match.start():
            between = text[last[1] : match.start()]
            if inside != last[0].text and len(between) < 40 and JOINED.fullmatch(between):
                statement = Statement(match.start(), True, f"{last[0].text}, {inside}")
            yield last[0]
        last = statement, end
    if last:
        yield last[0]


def _closings(text: str) -> dict[int, int]:
    r"""Map the index of each opening brace to the index of its closing brace; `\{` and `\}` are not braces."""
    found, opened = {}, []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            found[opened.pop()] = match.start()
    return found


def without_label(answer: str) -> str:
    r"""Return `answer` without the letter of a choice in front: `\textbf{(B)}\ 12`, `(B) 12`."""
    label = re.match(r"\s*(?:\\text(?:bf)?\s*\{\s*)?\(([A-J])\)(?:[\s\\,:~]|\})+(?=\S)", answer)
    rest = answer[label.end() :] if label else answer
    return rest[:-1] if label and label[0].count("{") > label[0].count("}") and rest.endswith("}") else rest
