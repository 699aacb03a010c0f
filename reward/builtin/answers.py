"""Finds the final answer in a text, and reads plain numbers exactly.

`find_answer` returns the stated answer; `as_number` reads `1,234`, `$18`, `7/14`, `3 1/2` or `18 eggs` without
a computer algebra system, which decides nearly every answer of a school-mathematics data set in microseconds. The same
text always gives the same result: no function depends on time.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_ANSWER_CHARS = 300
MAX_DIGITS = 60

BOXED = re.compile(r"\\f?boxed\s*\{")
HASHES = re.compile(r"####[ \t]*(\S.*)")
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ANSWER_LINE = re.compile(r"^[ \t>*#-]*(?:A|(?i:(?:final )?answer))[ \t*]*:[ \t*]*(\S.*)$", re.MULTILINE)
ANSWER_IS = re.compile(r"\banswer[ \t]+is[ \t]*:?[ \t]*(\S.*?)(?=\.(?:\s|$)|$)", re.MULTILINE | re.IGNORECASE)

NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
PLAIN_NUMBER = re.compile(
    rf"(?P<sign>[-+−]?)\s*[$€£]?\s*(?P<sign_inside>[-+−]?)(?P<number>{NUMBER})(?:[eE](?P<exponent>[+-]?\d{{1,2}}))?"
    r"(?:\s*[$€£]|\s+(?!pi\b)(?P<unit>[^\W\d_]{2,})[^\d^*/+=\\]*)?"
)
FRACTION = re.compile(
    r"(?P<sign>[-+−]?)\s*(?:(?P<whole>\d{1,30})\s+)?(?P<top>\d{1,30})\s*/\s*(?P<bottom>\d{1,30})"
)
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def find_answer(text: str) -> str | None:
    r"""Return the answer that `text` states last, or None.

    Statements are `\boxed{…}` (braces balanced), `#### …`, `<answer>…</answer>`, a line `A: …`, `Answer: …` or
    `Final answer: …`, and `answer is …` up to the end of the sentence. One inside another
    (`A: \boxed{5}`) counts by where it starts, so the inner one wins.
    """
    found = [(match.start(), match[1]) for match in _last_matches(text)]
    boxed = _last_boxed(text)
    if boxed is not None:
        found.append(boxed)
    return clean(max(found)[1]) if found else None


def clean(answer: str) -> str:
    r"""Return `answer` without the marks around a value: white space, `$…$`, `\(…\)`, `**`, quotes, a final full stop."""
    answer = answer.strip().replace("{,}", ",").replace(r"\!", "").replace(r"\$", "$")
    previous = None
    while answer != previous:
        previous = answer
        answer = answer.strip().strip("`*\"'").removesuffix(".").removesuffix(",")
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            inside = answer[len(opening) : -len(closing)]
            if answer.startswith(opening) and answer.endswith(closing) and inside.strip("$ "):
                answer = inside
    return answer


def as_number(answer: str) -> Fraction | None:
    """Return the exact value of a cleaned `answer` that is a plain number, else None.

    Reads signs, thousands separators, decimals, `1e5`, currency signs, fractions and mixed numbers, a unit in
    words behind a number (`18 eggs a day`) and `1.8 billion`. Percentages are left to the algebra system.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return None
    if match := FRACTION.fullmatch(answer):
        if int(match["bottom"]) == 0:
            return None
        value = int(match["whole"] or 0) + Fraction(int(match["top"]), int(match["bottom"]))
        return value if match["sign"] in ("", "+") else -value
    match = PLAIN_NUMBER.fullmatch(answer)
    if match is None or len(match["number"]) > MAX_DIGITS:
        return None
    value = Fraction(match["number"].replace(",", "").rstrip(".")) * Fraction(10) ** int(
        match["exponent"] or 0
    )
    value *= SCALES.get((match["unit"] or "").lower(), 1)
    negative = (match["sign"] in ("-", "−")) != (match["sign_inside"] in ("-", "−"))
    return -value if negative else value


def _last_matches(text: str) -> list[re.Match[str]]:
    last = (_last(pattern, text) for pattern in (HASHES, ANSWER_TAG, ANSWER_LINE, ANSWER_IS))
    return [match for match in last if match is not None]


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    match = None
    for match in pattern.finditer(text):  # noqa: B007 - only the last one is of interest
        pass
    return match


def _last_boxed(text: str) -> tuple[int, str] | None:
    last = None
    for match in BOXED.finditer(text):
        depth = 1
        for end in range(match.end(), min(len(text), match.end() + MAX_ANSWER_CHARS + 1)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                last = (match.start(), text[match.end() : end])
                break
    return last
