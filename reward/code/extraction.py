"""Finds the program in a completion and joins it with its prompt. Pure."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Literal

from paceline.chat.completion_texts import answer_of

OPENING = re.compile(
    r"(?P<before>[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<word>[\w+#.-]*)[^`\n]*\n?"
)
"""First line of a fenced block, which may be an entry of a list."""
BEHIND_TEXT = re.compile(r"(?P<before>)[^`\n]*(?P<fence>`{3,})(?P<word>python3?|py)[ \t]*\n?")
"""First line of a fenced block behind text: `Here it is: ```python`."""
BARE_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[ \t]*\r?$", re.MULTILINE)
CONTAINERS = ("markdown", "md")
BEGIN = re.compile(r"^\[BEGIN\][ \t]*\r?\n", re.MULTILINE)
"""Line before a program in MBPP's prompts (Austin et al. 2021)."""
DONE = re.compile(r"^\[DONE\]", re.MULTILINE)
"""Line after a program in MBPP's prompts. A base model does not stop there, and a stop string stays in the text."""
DEFINED = re.compile(r"^(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]*)?=(?!=)", re.MULTILINE)
CODE = re.compile(
    r"^(?:from[ \t]+[\w.]+[ \t]+import\b|import[ \t]|(?:async[ \t]+)?def[ \t]|class[ \t]|@)", re.MULTILINE
)
BODY = re.compile(r"[^\n]*(?:\n(?:[ \t][^\n]*|(?=\n|\Z)))*")
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)


def program_of(
    text: str,
    extract: Literal["auto", "block", "none"] = "auto",
    names: frozenset[str] = frozenset(),
    *,
    python: bool = True,
) -> str | None:
    """Return the program in a completion; None if `extract` is `block` and the completion has no block.

    The last fenced block of the answer counts, because a model may try others before. Blocks that define one of `names`
    take precedence, then those in Python (`python`). A block that names no language and is not a program, such as an
    example of the output, is skipped if there are other blocks. The text before a bare fence counts too if only this
    text defines one of `names`, because the prompt may have opened the block. `auto` takes the whole text if it has no
    block; `none` always takes the whole text.
    """
    if extract == "none":
        return text
    answer = BEGIN.split(DONE.split(answer_of(text))[0])[-1]
    blocks = [(word, code) for word, code in blocks_of(answer) if code.strip()]
    if python:
        of_python = [(word, code) for word, code in blocks if not word or word.startswith("py")]
        blocks = [(word, code) for word, code in of_python if word or _acts(code)] or of_python or blocks
    programs = [code for _, code in blocks]
    before = BARE_FENCE.split(answer, maxsplit=1)[0]
    for candidates in (programs, [before] if before != answer else []):
        if defining := [code for code in candidates if names & defined_in(code)]:
            return defining[-1]
    return programs[-1] if programs else None if extract == "block" else before


def _acts(code: str) -> bool:
    """Return whether a text does more in Python than evaluate values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(each, ast.Expr) or isinstance(each.value, ast.Call) for each in body)


def blocks_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the content of each fenced block, without the fence's indentation. A block that is not
    closed ends with the text; a closing fence is at least as long as the opening one and indented by at most three
    columns more (CommonMark 0.31, section 4.5). A block in Python ends where another block opens; blocks of Markdown
    are searched for blocks inside them."""
    fence, indent, word = "", 0, ""
    lines: list[str] = []
    for line in re.findall(r"[^\n]*\n|[^\n]+", text.replace("\r\n", "\n")):
        bare = line.strip()
        opening = OPENING.fullmatch(line) or (None if fence else BEHIND_TEXT.fullmatch(line))
        is_deep = len(line) - len(line.lstrip()) > indent + 3
        if fence and bare and set(bare) == {fence[0]} and len(bare) >= len(fence) and not is_deep:
            yield word, "".join(lines)
            fence = ""
        elif opening and _opens(opening, fence, indent):
            if fence:
                yield word, "".join(lines)
            fence, indent, word, lines = opening["fence"], len(opening["before"]), opening["word"].lower(), []
        elif fence:
            lines.append(line[min(indent, len(line) - len(line.lstrip(" \t"))) :])
    if fence:
        yield word, re.sub(rf"{fence}\s*\Z", "", "".join(lines))


def _opens(opening: re.Match[str], fence: str, indent: int) -> bool:
    word = opening["word"].lower()
    if not fence:
        return word not in CONTAINERS
    return word.startswith("py") and opening["fence"].startswith(fence) and len(opening["before"]) <= indent


def defined_in(code: str) -> set[str]:
    """Return the names that a program defines at its outermost level, according to its text."""
    return {name for pair in DEFINED.findall(code) for name in pair if name}


def with_prompt(prompt: str, text: str, program: str, entry_point: str) -> list[str]:
    """Return the programs that a completion may mean if its prompt is code. The first one that loads counts.

    A program that defines `entry_point` replaces the prompt's definition of it. The prompt's code before this
    definition stays: imports, and functions that the program may call. Any other program continues the prompt, as in
    HumanEval: with its whole text, or up to the end of the function if the whole text does not load.
    """
    (name,) = re.findall(r"^\w+", entry_point)
    heads = list(_heads(prompt, name))
    if name in defined_in(program):
        begin = re.compile(rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*=", re.MULTILINE)
        return _once([*(_joined(begin.split(head)[0], program) for head in heads), program])
    answer = answer_of(text)
    bodies = [each for each in (program, answer) if each.lstrip("\n")[:1] in (" ", "\t")] or [program, answer]
    bodies += [match[0] for each in bodies if (match := BODY.match(each))]
    # The text of a chat often begins without its white space.
    bodies += [f"    {each}" for each in bodies if each[:1].strip()]
    continued = [head + body for body in bodies for head in heads if name in defined_in(head)]
    return _once(continued or [program])


def _heads(prompt: str, name: str) -> Iterator[str]:
    """Yield the code in a prompt: its fenced block, or the whole prompt, then its part from the first line of code
    on."""
    code = program_of(prompt, "block", frozenset({name}))
    if code is not None and name in defined_in(code):
        yield code
    elif match := CODE.search(prompt):
        yield prompt
        yield prompt[match.start() :]


def _joined(before: str, program: str) -> str:
    if not CODE.search(before):
        return program
    return "".join(FUTURE.findall(program)) + before + "\n" + FUTURE.sub("", program)


def _once(programs: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(programs))
