"""Reads the commands of a shell script without running it: quotes, comments, continued lines, variables and arrays.

Assignments, `export`, `declare` and `local` set variables, and `${NAME:-default}` takes its default if the script does
not set NAME. An expansion that only a run would know (`$(command)`, `$1`) stays as written, as do `$HOME` and `$PWD`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator

from paceline.errors import SpecError

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DEFAULT = re.compile(r"([A-Za-z_]\w*|\d)(?::?([-=+])(.*))?", re.S)
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
KEPT = ("HOME", "PWD")
"""Variables that have the same meaning for all readers of the spec."""
NEWLINE = "\n"
"""Separator of commands among the words."""
MAX_VALUE = 1 << 16
MAX_EXPANDED = 1 << 23
"""Largest number of characters that all expansions of a script give."""
_KEYWORDS = ("if", "elif", "then", "else", "fi", "do", "done", "while", "until", "case", "esac", "!", "{", "}", "time")
"""Words after which a command begins."""
_UNKNOWN = re.compile(r"\$\{#?(\w+)[^}]*\}|\$([A-Za-z_]\w*)|\$\(pwd\)|\$\(|\$[\d@*?#$!]|`")
_REDIRECTION = re.compile(r"\d*(?:>>|<<<|<>|>\||[<>])&?[ \t]*")
_HEREDOC = re.compile(r"\d*<<-?[ \t]*(['\"]?)(\w+)\1")


def commands(text: str) -> list[list[str]]:
    """Return the words of each command in `text`, with variables expanded. Raises SpecError for a quote that is not
    closed, or a value of more than MAX_VALUE characters."""
    found: list[list[str]] = [[]]
    for word in _Scanner(text, {}).words():
        if word == NEWLINE:
            found.append([])
        else:
            found[-1].append(word)
    return [each for each in found if each]


def unresolved(text: str) -> str:
    """Return the first expansion in `text` that the script does not set; empty if there is none."""
    for match in _UNKNOWN.finditer(text):
        if (match[1] or match[2]) not in KEPT and match[0] != "$(pwd)":
            return match[0]
    return ""


class _Scanner:
    def __init__(self, text: str, variables: dict[str, list[str]]):
        self._text = text.replace("\r\n", "\n")
        self._variables = variables
        self._at = 0
        self._expanded = 0
        self._branches = 0
        """Number of `if` and `case` around the present place."""

    def words(self) -> Iterator[str]:
        """Yield words with NEWLINE after each command. Assignments are carried out, not yielded."""
        is_first, declares = True, False
        while self._at < len(self._text):
            letter = self._text[self._at]
            if self._text.startswith("\\\n", self._at):
                self._at += 2
            elif letter in "\n;|&()":
                self._at += 1
                yield NEWLINE
                is_first = True
            elif letter.isspace():
                self._at += 1
            elif letter == "#":
                self._skip_line()
            elif heredoc := _HEREDOC.match(self._text, self._at):
                self._skip_heredoc(heredoc)
            elif redirection := _REDIRECTION.match(self._text, self._at):
                self._at = redirection.end()
                self._word()
            elif is_first and (match := _ASSIGNMENT.match(self._text, self._at)):
                self._at = match.end()
                self._assign(match[1], bool(match[2]))
            else:
                words = self._word(splits=True)
                if is_first and words and (words[0] in _KEYWORDS or words[0] in _DECLARE or words[0] == ":"):
                    self._branches += (words[0] in ("if", "case")) - (words[0] in ("fi", "esac"))
                    declares = words[0] in _DECLARE
                    continue
                if is_first and declares and words and words[0].startswith("-"):
                    continue
                is_first = declares = False
                yield from words

    def _skip_line(self) -> None:
        self._at = self._line_end(self._at)

    def _skip_heredoc(self, match: re.Match[str]) -> None:
        end = re.compile(rf"^\s*{match[2]}[ \t]*$", re.M).search(self._text, match.end())
        line = self._text[match.end() : self._line_end(match.end())]
        self._text = f"{self._text[: match.start()]} {line}{self._text[end.end() :] if end else ''}"

    def _line_end(self, start: int) -> int:
        end = self._text.find("\n", start)
        return len(self._text) if end < 0 else end

    def _set(self, name: str, values: list[str]) -> None:
        """Set a variable. If two branches set it to different values, only a run knows the value; if a branch appends
        to it, the value before stays as the beginning."""
        before = self._variables.get(name) or [""]
        is_doubtful = self._branches > 0 and before != [""] and before != values
        if sum(map(len, values)) > MAX_VALUE:
            raise SpecError(f"the script's variable {name!r:.80} has more than {MAX_VALUE} characters")
        if is_doubtful:
            known = before[0].removesuffix(f" ${{{name}}}") if values[0].startswith(before[0]) else ""
            values = [f"{known} ${{{name}}}".lstrip()]
        self._variables[name] = values

    def _assign(self, name: str, append: bool) -> None:
        if self._text[self._at : self._at + 1] != "(":
            before = (self._variables.get(name) or [""]) if append else [""]
            self._set(name, [*before[:-1], before[-1] + " ".join(self._word())])
            return
        self._at += 1
        values = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at].isspace():
                self._at += 1
            elif self._text[self._at] == "#":
                self._skip_line()
            elif self._text[self._at] in ";|&<>(" or self._text.startswith("\\\n", self._at):
                self._at += 1  # a word cannot begin here
            else:
                values += self._word(splits=True)
        self._at += 1
        self._set(name, [*(self._variables.get(name, []) if append else []), *values])

    def _word(self, *, splits: bool = False) -> list[str]:
        """Return the next word; several for an array (`${NAME[@]}`), and with `splits` for a variable outside quotes
        whose value has spaces."""
        parts = [""]
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter == "'":
                end = self._text.find("'", self._at + 1)
                if end < 0:
                    raise SpecError(f"the quote in line {self._text.count(NEWLINE, 0, self._at) + 1} is not closed")
                parts[-1] += self._text[self._at + 1 : end]
                self._at = end + 1
            elif letter == '"':
                self._at += 1
                self._quoted(parts)
            elif letter == "$":
                is_variable, place, length = (
                    self._text[self._at + 1 : self._at + 2] != "(",
                    len(parts) - 1,
                    len(parts[-1]),
                )
                self._expand(parts)
                if splits and is_variable:
                    first, *others = re.split(r"\s+", parts[place][length:])
                    parts[place : place + 1] = [parts[place][:length] + first, *others]
            elif self._text.startswith("\\\n", self._at):
                break
            elif letter == "\\":
                parts[-1] += self._text[self._at + 1 : self._at + 2]
                self._at += 2
            elif letter.isspace() or letter in ";|&)<>" or (letter == "(" and not parts[-1]):
                break
            else:
                parts[-1] += letter
                self._at += 1
        return parts

    def _quoted(self, parts: list[str]) -> None:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] != '"':
            if self._text[self._at] == "$":
                self._expand(parts)
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            else:
                self._at += self._text[self._at] == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$")
                parts[-1] += self._text[self._at : self._at + 1]
                self._at += 1
        if self._at >= len(self._text):
            raise SpecError(f"the quote in line {self._text.count(NEWLINE, 0, start) + 1} is not closed")
        self._at += 1

    def _expand(self, parts: list[str]) -> None:
        """Append the value of the expansion at the present place to the last part, further values of an array as new
        parts."""
        if self._text.startswith("$((", self._at):
            end = self._closing("(", ")", self._at + 1)
            parts[-1] += self._computed(self._text[self._at + 3 : end - 2]) or self._text[self._at : end]
        elif self._text.startswith("$(", self._at):
            end = self._closing("(", ")", self._at + 1)
            parts[-1] += self._text[self._at : end]
        elif self._text.startswith("${", self._at):
            end = self._closing("{", "}", self._at + 1)
            values = self._braced(self._text[self._at + 2 : end - 1])
            parts[-1] += values[0] if values else ""
            parts.extend(values[1:])
            self._expanded += sum(map(len, values))
        else:
            match = _NAME.match(self._text, self._at + 1)
            end = match.end() if match else self._at + 2
            found = self._variables.get(match[0]) if match else None
            value = found[0] if found else self._text[self._at : end] if found is None else ""
            parts[-1] += value
            self._expanded += len(value)
        if self._expanded > MAX_EXPANDED:
            raise SpecError(f"the script's variables give more than {MAX_EXPANDED} characters together")
        self._at = end

    def _braced(self, inner: str) -> list[str]:
        if inner.endswith(("[@]", "[*]")) and inner[:-3] in self._variables:
            return self._variables[inner[:-3]]
        match = _DEFAULT.fullmatch(inner)
        found = self._variables.get(match[1]) if match else None
        if match is None or (found is None and (match[2] is None or match[1] in KEPT)):
            return [f"${{{inner}}}"]
        is_set = bool(found and found[0])
        if match[2] is None or (match[2] != "+" and is_set):
            return (found or [""])[:1]
        if match[2] == "+" and not is_set:
            return [""]
        if inner[len(match[1]) :].startswith(":="):
            self._set(match[1], [match[3]])
        other = match[3] if '"' in match[3] or "'" in match[3] else f'"{match[3]}"'
        return [" ".join(_Scanner(other, self._variables)._word())]

    def _computed(self, text: str) -> str:
        """Return the value of an arithmetic expression over integers; empty if one of its names has no number."""
        try:
            return str(self._value(ast.parse(re.sub(r"[${}]", "", text).strip(), mode="eval").body, 8))
        except (SyntaxError, ValueError, LookupError, ArithmeticError, RecursionError):
            return ""

    def _value(self, node: ast.expr, levels: int) -> int:
        if isinstance(node, ast.BinOp):
            sides = self._value(node.left, levels), self._value(node.right, levels)
            result: int = _ARITHMETIC[type(node.op)](*sides)
            return result
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and levels:
            given = ast.parse(self._variables[node.id][0].strip(), mode="eval").body
            return self._value(given, levels - 1)
        raise ValueError("not an integer")

    def _closing(self, opens: str, closes: str, start: int) -> int:
        """Return the index after the bracket that closes the one at `start`."""
        depth = 0
        for index in range(start, len(self._text)):
            depth += (self._text[index] == opens) - (self._text[index] == closes)
            if depth == 0:
                return index + 1
        return len(self._text)
