"""Docstrings, messages and pages avoid the words that CONTRIBUTING.md has replacements for.

`python tests/test_words.py` prints every finding, and how many there are in each folder.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CODE = ("paceline", "weights", "services", "learner", "rollout", "reward", "environment", "apps")
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    "SECURITY.md",
    "docs",
    "deploy",
    "examples",
    "recipes",
    "benchmarks",
)
GENERATED = ("commands.md", "client.md", "protos.md", "licences.md")
"""Pages whose sentences stand in the code, and names of packages."""
IRREGULAR = {
    "lend": "lend|lends|lent|lending",
    "take": "take|takes|took|taken|taking",
    "forgive": "forgive|forgives|forgave|forgiven|forgiving",
    "forget": "forget|forgets|forgot|forgotten|forgetting",
    "of": "of",
    "what": "what",
    "host": "hosts?(?:'s?)?",
}
MESSAGE_WORDS = 3
"""Words from which on a string counts as a message."""
OPENING = re.compile(r"\s*(What|Who|Whether)\b")


class Finding(NamedTuple):
    path: Path
    line: int
    fault: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.fault}"


def replacements() -> dict[str, str]:
    """Return the words of the table "instead of | write", with what to write."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| instead of \| write \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, flags=re.M)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    return {word.strip(): write for words, write in rows for word in words.split(",")}


def pattern(words: str) -> str:
    """Return a regular expression for all forms of a word, or of the verb that begins a phrase."""
    first, *rest = words.split()
    stem = first.removesuffix("e")
    forms = IRREGULAR.get(first, f"{first}|{first}s|{stem}ed|{stem}ing")
    return r"\s+".join([f"(?:{forms})", *rest]) + ("s?" if first == "host" else "")


WRITE = replacements()
FORBIDDEN = re.compile(rf"\b(?:{'|'.join(map(pattern, WRITE))})\b")
"""In lower case: without regard to case it would take ten times as long."""


def faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield the position and the fault of each word that has a replacement; not in code, which has ` around it."""
    bare = re.sub(r"`[^`\n]*`", lambda code: " " * len(code[0]), text)
    for match in FORBIDDEN.finditer(bare.lower()):
        write = next(write for word, write in WRITE.items() if re.fullmatch(pattern(word), match[0]))
        yield match.start(), f"{' '.join(match[0].split())!r}: write {write}"


def texts(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and "is a docstring" of each docstring and message; a string after a name is a docstring too."""
    parts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            parts.add(id(node.value))
            yield node.lineno, node.value.value, True
        elif isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            yield node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value, False


def of_code() -> Iterator[Finding]:
    """Yield the findings in docstrings and messages of the product."""
    opening = re.compile(rf'"""{OPENING.pattern}')
    for path in (path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))):
        source = path.read_text(encoding="utf-8")
        if not FORBIDDEN.search(source.lower()) and not opening.search(source):
            continue
        for line, text, is_docstring in texts(ast.parse(source)):
            if is_docstring and (first := OPENING.match(text)):
                yield Finding(path, line, f"a docstring begins with {first[1]}")
            if is_docstring or len(text.split()) >= MESSAGE_WORDS:
                yield from (Finding(path, line + text[:at].count("\n"), fault) for at, fault in faults(text))


def of_pages() -> Iterator[Finding]:
    """Yield the findings in pages, but for blocks of code, and the words themselves in CONTRIBUTING.md."""
    found = (
        path for name in PAGES for path in ([ROOT / name] if name.endswith(".md") else (ROOT / name).rglob("*.md"))
    )
    for path in sorted(path for path in found if path.name not in GENERATED):
        text = path.read_text(encoding="utf-8")
        if path.name == "CONTRIBUTING.md":  # the words themselves: this table, and the column "not called" of the other
            text = re.sub(r"^(\|.*)\|[^|\n]*\|$", r"\1", text, flags=re.M)
            text = re.sub(r"^\| instead of.*(?:\n\|.*)+", lambda table: "\n" * table[0].count("\n"), text, flags=re.M)
        text = re.sub(r"^```.*?^```$", lambda code: "\n" * code[0].count("\n"), text, flags=re.M | re.S)
        yield from (Finding(path, 1 + text[:at].count("\n"), fault) for at, fault in faults(text))


def test_docstrings_and_messages_use_the_plain_words() -> None:
    assert "\n".join(map(str, of_code())) == ""


def test_pages_use_the_plain_words() -> None:
    assert "\n".join(map(str, of_pages())) == ""


def test_every_form_of_a_word_is_found_and_published_names_are_not() -> None:
    def found(text: str) -> list[str]:
        return [fault.split(": write ")[0].strip("'\"") for _, fault in faults(text)]

    assert len(WRITE) >= 15
    assert found("It mended what was lent, then Hands\nback the rest.") == ["mended", "lent", "hands back"]
    assert found("settling, took back, forgotten, excused") == ["settling", "took back", "forgotten", "excused"]
    assert found("a process of its own; a host's agent; two host agents") == [
        "of its own",
        "host's agent",
        "host agents",
    ]
    assert (
        found("amendment, talent, silent, settings, host_agent, paceline-host-agent, `host agent`, --host-agent") == []
    )
    tree = ast.parse('X = 1\n"""Whether it is."""\nY = f"a {X} lent b"\nZ = "lent"\n')
    assert [(line, text, doc) for line, text, doc in texts(tree)] == [
        (2, "Whether it is.", True),
        (3, "a … lent b", False),
        (4, "lent", False),
    ]


if __name__ == "__main__":
    findings = [*of_code(), *of_pages()]
    print(*findings, sep="\n")
    counts = Counter(finding.path.relative_to(ROOT).parts[0] for finding in findings)
    print(*(f"{count:5} {folder}" for folder, count in sorted(counts.items())), sep="\n")
