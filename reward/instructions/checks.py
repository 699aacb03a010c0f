"""Checks of the 25 kinds of instructions of IFEval, by their names in the data set. Pure.

The kinds and their arguments are those of Zhou et al., "Instruction-Following Evaluation for Large Language Models", 2023,
table 1; the checks are written from their descriptions. Words are runs of letters and digits, sentences end in `.`, `!` or
`?`, paragraphs are parted by `***` where their number is asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from reward.instructions.languages import language_of

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]

WORD = re.compile(r"\w+(?:['’-]\w+)*")
SENTENCE_END = re.compile(r"[.!?]+[\"'”’)\]]*(?:\s+|$)")
BULLET = re.compile(r"^[ \t]*(?:\*(?!\*)|-)[ \t]*\S", re.MULTILINE)
HIGHLIGHT = re.compile(r"\*\*[^*\n]+\*\*|(?<!\*)\*[^*\n]+\*(?!\*)")
PLACEHOLDER = re.compile(r"\[[^\[\]]+\]")
TITLE = re.compile(r"<<[^\n<>]*\S[^\n<>]*>>")
FENCE = re.compile(r"^```(?:\w+)?\s*\n(.*)\n```$", re.DOTALL)
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _related(count: int, relation: str | None, bound: int) -> bool:
    """Return whether a count is `at least` (the default) or `less than` a bound. Raises ValueError for another relation."""
    if relation in (None, "at least"):
        return count >= bound
    if relation == "less than":
        return count < bound
    raise ValueError(f"relation is {relation!r}, must be 'at least' or 'less than'")


def _count(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _sentences(text: str) -> int:
    return sum(bool(WORD.search(part)) for part in SENTENCE_END.split(text))


def _paragraphs(text: str, mark: str) -> list[str]:
    return [part.strip() for part in re.split(mark, text.strip())]


def _number_paragraphs(text: str, arguments: Arguments) -> bool:
    parts = _paragraphs(text, r"\s?\*\*\*\s?")
    parts = parts[1:] if parts and not parts[0] else parts
    parts = parts[:-1] if parts and not parts[-1] else parts
    return all(parts) and len(parts) == arguments["num_paragraphs"]


def _nth_first_word(text: str, arguments: Arguments) -> bool:
    parts = [part for part in _paragraphs(text, r"\n\n") if part]
    number = arguments["nth_paragraph"]
    if len(parts) != arguments["num_paragraphs"] or number > len(parts):
        return False
    first = WORD.search(parts[number - 1])
    return first is not None and first[0].casefold() == str(arguments["first_word"]).casefold()


def _postscript(text: str, arguments: Arguments) -> bool:
    marker = str(arguments["postscript_marker"])
    loose = r"\s*".join(map(re.escape, marker.replace(" ", "")))
    return re.search(rf"^\s*{loose}.*\S", text, re.IGNORECASE | re.MULTILINE) is not None


def _sections(text: str, arguments: Arguments) -> bool:
    mark = re.escape(str(arguments["section_spliter"]).strip())
    return len(re.findall(rf"\b{mark}\s?\d+", text)) >= int(arguments["num_sections"])


def _json(text: str, arguments: Arguments) -> bool:
    match = FENCE.match(text.strip())
    try:
        json.loads(match[1] if match else text)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeats(text: str, arguments: Arguments) -> bool:
    return text.strip().casefold().startswith(str(arguments["prompt_to_repeat"]).strip().casefold())


def _ends(text: str, arguments: Arguments) -> bool:
    return text.strip().strip('"').casefold().endswith(str(arguments["end_phrase"]).strip().casefold())


def _capital_words(text: str, arguments: Arguments) -> bool:
    count = sum(word.isupper() for word in WORD.findall(text))
    return _related(count, arguments.get("capital_relation"), arguments["capital_frequency"])


def _is_quoted(text: str, arguments: Arguments) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda text, a: all(_count(text, word) for word in a["keywords"]),
    "keywords:frequency": lambda text, a: _related(_count(text, a["keyword"]), a.get("relation"), a["frequency"]),
    "keywords:forbidden_words": lambda text, a: not any(_count(text, word) for word in a["forbidden_words"]),
    "keywords:letter_frequency": lambda text, a: _related(
        text.casefold().count(str(a["letter"]).casefold()), a.get("let_relation"), a["let_frequency"]
    ),
    "language:response_language": lambda text, a: language_of(text) == a["language"],
    "length_constraints:number_sentences": lambda text, a: _related(_sentences(text), a.get("relation"), a["num_sentences"]),
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": lambda text, a: _related(len(WORD.findall(text)), a.get("relation"), a["num_words"]),
    "length_constraints:nth_paragraph_first_word": _nth_first_word,
    "detectable_content:number_placeholders": lambda text, a: len(PLACEHOLDER.findall(text)) >= a["num_placeholders"],
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, a: len(BULLET.findall(text)) == a["num_bullets"],
    "detectable_format:constrained_response": lambda text, a: any(option in text for option in OPTIONS),
    "detectable_format:number_highlighted_sections": lambda text, a: len(HIGHLIGHT.findall(text)) >= a["num_highlights"],
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda text, a: TITLE.search(text) is not None,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats,
    "startend:end_checker": _ends,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text, a: text.isupper(),
    "change_case:english_lowercase": lambda text, a: text.islower(),
    "punctuation:no_comma": lambda text, a: "," not in text,
    "startend:quotation": _is_quoted,
}  # fmt: skip
"""Each returns whether a text that is not empty follows the instruction. A missing argument raises KeyError."""


def follows(text: str, instruction: str, arguments: Arguments | None, *, loose: bool = False) -> bool:
    """Return whether a text follows an instruction. `loose` also tries it without its first line, its last line, or both, and
    without asterisks, as IFEval's loose accuracy does.

    Raises ValueError for an instruction of another kind or without an argument that it needs.
    """
    check = CHECKS.get(instruction)
    if check is None:
        raise ValueError(f"instruction {instruction!r} is unknown; known are {', '.join(sorted(CHECKS))}")
    given = {name: value for name, value in (arguments or {}).items() if value is not None}
    try:
        return any(bool(each.strip()) and check(each, given) for each in _variants(text, loose))
    except KeyError as error:
        raise ValueError(f"instruction {instruction!r} has no argument {error}; correct its row") from None


def _variants(text: str, loose: bool) -> list[str]:
    if not loose:
        return [text]
    lines = text.split("\n")
    cut = [text, "\n".join(lines[1:]), "\n".join(lines[:-1]), "\n".join(lines[1:-1])]
    return [*(each.strip() for each in cut), *(each.strip().replace("*", "") for each in cut)]
