r"""Parses an answer in LaTeX or plain notation into a tree, without evaluating anything.

Promise: the text is parsed completely or not at all (None). Spacing and styles are left out. A known unit, and words
that follow a number and cannot change it, are kept apart from the number, as a `quantity`. Time and memory are linear.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any, NamedTuple

from paceline.reward.builtin import notation
from paceline.reward.builtin.notation import TEXT, phrase

MAX_CHARS = 2000
MAX_DEPTH = 40
"""Largest depth of brackets and arguments. MAX_DEPTH and MAX_LEVELS keep parsing and comparing far from Python's limit
of recursion, so that no result depends on the caller's stack."""
MAX_LEVELS = 120
"""Largest depth of a tree; each factor of a product, sign and `!` is one level."""
MAX_EXPONENT = 400


class Node(NamedTuple):
    """A number, symbol, operation or collection. `kind` decides whether `args` are nodes, texts or numbers."""

    kind: str
    args: tuple[Any, ...] = ()


def number_of(value: int | Fraction) -> Node:
    return Node("number", (Fraction(value), None))


class Unreadable(ValueError):
    """The text is not mathematics that this parser knows."""


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Node | None:
    """Return the tree of the whole `text`, or None if a part of it is unknown."""
    if len(text) > MAX_CHARS or not text.strip():
        return None
    try:
        tree = _Reader(notation.normal(text)).whole()
        return None if _is_deep(tree) else tree
    except (Unreadable, RecursionError, ZeroDivisionError):
        return None


def _is_deep(tree: Node) -> bool:
    level: list[tuple[Any, ...]] = [tree]
    for _ in range(2 * MAX_LEVELS):  # a node and its args are a tuple each
        level = [each for found in level for each in found if isinstance(each, tuple)]
    return bool(level)


class _Reader:
    r"""A recursive descent parser. `brackets` counts open ( [ \{: inside them a comma never groups digits."""

    def __init__(self, text: str, depth: int = 0) -> None:
        self.text, self.at, self.depth = text, 0, depth
        self.brackets = self.bars = 0

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.skip())
        if match is not None:
            self.at = match.end()
        return match

    def skip(self) -> int:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1
        return self.at

    def sees(self, *texts: str) -> bool:
        return self.text.startswith(texts, self.skip())

    def takes(self, *texts: str) -> bool:
        for each in texts:
            if self.sees(each):
                self.at += len(each)
                return True
        return False

    def whole(self) -> Node:
        items = self.items()
        if self.skip() < len(self.text):
            raise Unreadable(self.text[self.at :])
        return items[0] if len(items) == 1 else Node("list", tuple(items))

    def items(self) -> list[Node]:
        found = [self.item()]
        while self.take(notation.SEPARATOR):
            if not self.ends():
                found.append(self.item())
        return found

    def ends(self) -> bool:
        return self.skip() >= len(self.text) or self.sees(")", "]", "}", r"\}", "&", r"\\", r"\end", r"\r", r"\|")

    def item(self) -> Node:
        """Parse one value with its unit, or only words."""
        start = self.at
        try:
            value = self.quantity(self.relation())
            if self.ends() or notation.SEPARATOR.match(self.text, self.at) or (self.bars and self.sees("|", r"\vert")):
                return value
        except Unreadable:
            if self.brackets:
                raise
        self.at = start
        return self.words()

    def words(self) -> Node:
        match = self.take(notation.WORDS)
        if match is None or not re.search(r"[^\W\d_]", TEXT.sub(r"\1", match[0])):
            raise Unreadable(self.text[self.at :])
        found = phrase(match[0])
        return Node("set") if found in notation.NO_SOLUTION else Node("text", (found,))

    def quantity(self, value: Node) -> Node:
        match = notation.TAIL.match(self.text, self.skip())
        if match is None or not notation.RUN.search(match[0]) or notation.SEPARATOR.match(self.text, self.at):
            return value
        unit = notation.unit_of(match[0], is_number=not symbols(value))
        if unit is None:
            raise Unreadable(match[0])
        self.at = match.end()
        return Node("quantity", (value, *unit))

    def relation(self) -> Node:
        operands, signs = [self.ratio()], []
        while match := self.take(notation.RELATION):
            signs.append(notation.RELATIONS[match[0]])
            operands.append(self.ratio())
        if signs == ["in"]:
            return Node("member", tuple(operands))
        return Node("relation", (tuple(operands), tuple(signs))) if signs else operands[0]

    def ratio(self) -> Node:
        parts = [self.set_operation()]
        if self.take(notation.OVER_COMMAND):
            parts = [Node("quotient", (parts[0], self.set_operation()))]
        while self.takes(":"):
            parts.append(self.set_operation())
        return parts[0] if len(parts) == 1 else Node("ratio", tuple(parts))

    def set_operation(self) -> Node:
        left = self.sum()
        while True:
            if match := self.take(notation.SET_OPERATION):
                name = match[1].replace("backslash", "setminus")
            elif left.kind in ("tuple", "interval", "union") and self.sees("U (", "U[", "U(", "U ["):
                self.at, name = self.at + 1, "cup"
            else:
                return left
            right = self.sum()
            if name == "cup":
                left = Node("union", (*(left.args if left.kind == "union" else (left,)), right))
            else:
                left = Node("operation", (name, left, right))

    def sum(self) -> Node:
        terms: list[Node] = []
        while True:
            sign = self.take(notation.SIGN)
            if sign is None and terms:
                return terms[0] if len(terms) == 1 else Node("sum", tuple(terms))
            term = self.term()
            if sign and sign[1]:
                terms.append(Node("either", (term, 1 if sign[1] == "pm" else -1)))
            else:
                terms.append(Node("negative", (term,)) if sign and sign[2] == "-" else term)

    def term(self) -> Node:
        value = self.signed()
        while True:
            if self.take(notation.TIMES):
                value = Node("product", (value, self.signed()))
            elif self.take(notation.OVER):
                value = Node("quotient", (value, self.signed()))
            elif self.begins_factor():
                value = Node("product", (value, self.factor()))
            else:
                return value

    def signed(self) -> Node:
        if self.takes("-"):
            return Node("negative", (self.signed(),))
        self.takes("+")
        return self.factor()

    def begins_factor(self) -> bool:
        """Return whether a factor follows without a multiplication sign. A unit or a word is not a factor."""
        at = self.skip()
        if at >= len(self.text) or self.text[at] in ")]}&,;:=<>+-*/^_!%.'0123456789":
            return False
        if self.text[at] == "|" or self.sees(r"\vert", r"\|"):
            return not self.bars
        if notation.CLOCK.match(self.text, at) and self.text[at - 1 : at] == " ":
            return False
        if run := notation.RUN.match(self.text, at):
            return not self.is_unit(run) and notation.is_product(run[0]) and not (run[0] == "U" and self.sees("U (", "U[", "U("))  # fmt: skip
        if text := TEXT.match(self.text, at):
            return notation.is_inline(text[1]) and (text[1] not in notation.UNITS or text[1] in "ei")
        if match := notation.COMMAND.match(self.text, at):
            return match[1] not in notation.STOPS
        return bool(notation.OPENING.match(self.text, at)) and not self.sees(r"\{")

    def is_unit(self, run: re.Match[str]) -> bool:
        """Return whether letters are a unit: `5 cm`, `5 m`, `3 m/s`, but not `5m`."""
        if self.brackets or run[0] not in notation.UNITS:
            return False
        if run[0] not in notation.SINGLE:
            return run[0] not in notation.FUNCTIONS
        rest = self.text[run.end() :].lstrip()
        return self.text[run.start() - 1 : run.start()] == " " and (not rest or rest[0] in "/^.,;")

    def factor(self) -> Node:
        value = self.atom()
        while True:
            if self.takes("!"):
                value = Node("call", ("factorial2" if self.takes("!") else "factorial", value))
            elif self.takes("%"):
                value = Node("percent", (value,))
            elif self.takes("^"):
                value = self.raised(value)
            elif self.sees("'"):
                self.at += 1
                value = Node("symbol", (_name(value) + "'",))
            elif self.takes("_"):
                value = Node("symbol", (f"{_name(value)}_{self.subscript()}",))
            else:
                return value

    def raised(self, value: Node) -> Node:
        if self.takes(r"\circ", r"{\circ}", r"{ \circ }", r"{\circ }", r"\degree"):
            return Node("degrees", (value,))
        if self.takes(r"\prime", r"{\prime}"):
            return Node("symbol", (_name(value) + "'",))
        return Node("power", (value, self.exponent()))

    def exponent(self) -> Node:
        if self.takes("-"):
            return Node("negative", (self.exponent(),))
        base = self.atom()
        return self.raised(base) if not self.sees(r"^\circ", r"^{\circ") and self.takes("^") else base

    def subscript(self) -> str:
        self.skip()
        match = self.take(re.compile(r"\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|(\\[a-zA-Z]+|\w)"))
        if match is None:
            raise Unreadable(self.text)
        return re.sub(r"\s+", "", TEXT.sub(r"\1", match[1] or match[2]))

    def atom(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")
        value = self.number() or self.group() or self.text_or_command() or self.letter()
        self.depth -= 1
        return value

    def number(self) -> Node | None:
        if money := self.take(notation.CURRENCY):
            is_negative, value = self.takes("-"), self.number()
            if value is None:
                raise Unreadable(self.text)
            value = Node("negative", (value,)) if is_negative else value
            return Node("quantity", (value, notation.CURRENCIES[money[0].lstrip("\\")], True))
        if match := self.take(notation.HEXADECIMAL):
            return number_of(int(match[0], 16))
        start = self.skip()
        if (match := notation.BASED.match(self.text, start)) and match[1][0].isdigit():
            base = match[2] or match[3]
            self.at = match.end()
            return Node("base", (match[1].casefold(), str(notation.BASES.get(base, base))))
        if match := self.take(notation.REPEATING):
            return number_of(_repeating(match))
        match = None if self.brackets else self.take(notation.EUROPEAN)
        if match:
            return _decimal(match[0].replace(".", "").replace(",", "."))
        match = (None if self.brackets else self.take(notation.THOUSANDS)) or self.take(notation.NUMBER)
        if match is None:
            return None
        value = _decimal(match[0].replace(",", "").replace(" ", ""))
        if re.match(r"\s*\d", self.text[self.at :]) and not notation.MIXED.match(self.text, self.at):
            raise Unreadable(self.text)
        if match[0].isdigit() and (mixed := self.take(notation.MIXED)):
            top, bottom = mixed[1] or mixed[3] or mixed[4], mixed[2] or mixed[5] or mixed[6]
            return number_of(value.args[0] + Fraction(int(top), int(bottom)))
        if scale := self.take(notation.SCALE):
            return number_of(value.args[0] * notation.SCALES[scale[1].lower()])
        if match := self.take(re.compile(r"\\?[$€£]")):
            return Node("quantity", (value, notation.CURRENCIES[match[0][-1]], True))
        return value

    def group(self) -> Node | None:
        match = notation.OPENING.match(self.text, self.skip())
        if match is None:
            return None
        opening, self.at = match[0], match.end()
        is_open = opening in ("(", "[", r"\lbrack")
        closings = (")", "]", r"\rbrack") if is_open else (notation.CLOSING[opening],)
        is_bar, is_bracket = notation.CLOSING[opening] == opening, opening != "{"
        if opening in (r"\{", r"\lbrace", "(", "[") and self.takes(*closings, r"\}"):
            return Node("set" if "{" in opening or "brace" in opening else "tuple")
        outer, self.brackets = self.brackets, self.brackets + is_bracket
        bars, self.bars = self.bars, int(is_bar)
        items = self.items()
        self.brackets, self.bars = outer, bars
        self.skip()
        closing = next((each for each in (*closings, r"\}", "}") if self.sees(each)), None)
        if closing is None or (closing not in closings and opening not in (r"\lbrace", r"\{")):
            raise Unreadable(self.text)
        self.at += len(closing)
        return _grouped(opening, closing, items)

    def text_or_command(self) -> Node | None:
        if match := self.take(TEXT):
            return self.styled(match)
        if match := self.take(notation.ENVIRONMENT):
            return self.environment(match[1])
        match = self.take(notation.COMMAND)
        if match is None:
            return None
        name = match[1]
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return Node("quotient", (self.argument(), self.argument()))
        if name in ("binom", "dbinom", "tbinom"):
            return Node("call", ("binomial", self.argument(), self.argument()))
        if name == "sqrt":
            return self.root()
        if name in notation.FUNCTIONS:
            return self.call(notation.FUNCTIONS[name])
        if name in notation.CONSTANTS:
            return Node("constant", (notation.CONSTANTS[name],))
        if name in ("emptyset", "varnothing"):
            return Node("set")
        if name in notation.ACCENTS:
            return Node("symbol", (f"{name} {_name(self.argument())}",))
        if name in notation.STOPS:
            raise Unreadable(name)
        return Node("symbol", (name,))

    def styled(self, match: re.Match[str]) -> Node:
        content = match[1].strip()
        if content in notation.FUNCTIONS:
            return self.call(notation.FUNCTIONS[content])
        if notation.is_inline(content):
            return _Reader(notation.normal(content), self.depth).whole()
        if "operatorname" in match[0] or not content:
            return Node("symbol", (content,))
        if (tree := read(content)) is not None and tree.kind == "quantity":  # \text{5 hours}
            return tree
        found = phrase(content)
        return Node("set") if found in notation.NO_SOLUTION else Node("text", (found,))

    def argument(self) -> Node:
        r"""Parse the argument of a command: a group in braces, one digit (`\frac12`), or one atom."""
        if digit := self.take(re.compile(r"\d")):
            return number_of(int(digit[0]))
        return self.atom()

    def root(self) -> Node:
        degree = number_of(2)
        if self.takes("["):
            end = self.text.find("]", self.at)
            if end < 0:
                raise Unreadable(self.text)
            degree = _Reader(self.text[self.at : end], self.depth).whole()
            self.at = end + 1
        return Node("power", (self.argument(), Node("quotient", (number_of(1), degree))))

    def call(self, name: str) -> Node:
        base = self.subscript() if self.takes("_") else None
        power = self.exponent() if self.takes("^") else None
        if self.ends() or (self.at < len(self.text) and self.text[self.at] in "+=,;"):
            return Node("symbol", (name,))
        if name == "sqrt":
            return Node("power", (self.atom(), number_of(Fraction(1, 2))))
        argument = self.atom() if notation.OPENING.match(self.text, self.skip()) else self.bare_argument()
        is_inverse = power == Node("negative", (number_of(1),)) and name in notation.TRIGONOMETRIC
        name = f"arc{name}" if is_inverse else name
        arguments = argument.args if argument.kind == "tuple" else (argument,)
        if base is not None:
            arguments = (*arguments, _Reader(base, self.depth).whole())
        value = Node("call", (name, *arguments))
        return value if power is None or is_inverse else Node("power", (value, power))

    def bare_argument(self) -> Node:
        r"""Parse the argument of a function without brackets (`\sin 2x`): factors up to a sign, bracket or function."""
        value = self.factor()
        while self.begins_factor() and not notation.OPENING.match(self.text, self.at):
            match = notation.COMMAND.match(self.text, self.at)
            if match and match[1] in notation.FUNCTIONS:
                break
            value = Node("product", (value, self.factor()))
        return value

    def letter(self) -> Node:
        run = notation.RUN.match(self.text, self.skip())
        if run is None:
            raise Unreadable(self.text[self.at :])
        word = run[0]
        if word in notation.FUNCTIONS and len(word) > 1:
            self.at = run.end()
            return self.call(notation.FUNCTIONS[word])
        if word in notation.CONSTANTS or word in notation.GREEK:
            self.at = run.end()
            constant = notation.CONSTANTS.get(word)
            return Node("constant", (constant,)) if constant else Node("symbol", (word,))
        if not notation.is_product(word) and not self.text[run.start() - 1 : run.start()].isalpha():
            raise Unreadable(word)
        self.at += 1
        letter = word[0]
        return Node("constant", (letter,)) if letter in "ei" else Node("symbol", (letter,))

    def environment(self, name: str) -> Node:
        end = self.text.find(rf"\end{{{name}}}", self.at)
        if end < 0:
            raise Unreadable(self.text)
        body, self.at = self.text[self.at : end], end + len(rf"\end{{{name}}}")
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-zA-Z])|\\hline", body) if row.strip()]
        cells = tuple(tuple(_cell(cell, self.depth) for cell in row.split("&")) for row in rows)
        if not cells:
            raise Unreadable(self.text)
        return Node("cases" if name == "cases" else "matrix", cells)


def symbols(node: Any) -> frozenset[str]:
    if isinstance(node, Node):
        if node.kind == "symbol":
            return frozenset(node.args)
        return frozenset().union(*(symbols(each) for each in node.args))
    return frozenset().union(*(symbols(each) for each in node)) if isinstance(node, tuple) else frozenset()


def _name(node: Node) -> str:
    """Return the name of a symbol including an accent, a prime or a subscript."""
    if node.kind in ("symbol", "constant"):
        return str(node.args[0])
    if node.kind in ("product", "number", "text"):
        return "".join(_name(each) if isinstance(each, Node) else str(each) for each in node.args if each is not None)
    raise Unreadable(node.kind)


def _cell(text: str, depth: int) -> Node:
    text = text.strip().removesuffix(",").strip()
    if depth > MAX_DEPTH:
        raise Unreadable("too deep")
    try:
        return _Reader(text, depth + 1).whole()
    except Unreadable:
        return Node("text", (re.sub(r"\s+", "", phrase(text)),))


def _decimal(text: str) -> Node:
    """Return a number, and the unit of its last written digit (None for an integer)."""
    digits, _, exponent = text.lower().partition("e")
    places = len(digits.partition(".")[2])
    power = int(exponent or 0)
    if abs(power) > MAX_EXPONENT:
        raise Unreadable(text)
    last = Fraction(10) ** (power - places) if places or power < 0 else None
    return Node("number", (Fraction(digits.rstrip(".") or "0") * Fraction(10) ** power, last))


def _repeating(match: re.Match[str]) -> Fraction:
    whole, fixed, period = match[1] or "0", match[2], match[3] or match[4] or match[5]
    shift = 10 ** len(fixed)
    return Fraction(int(whole + fixed), shift) + Fraction(int(period), shift * (10 ** len(period) - 1))


def _grouped(opening: str, closing: str, items: list[Node]) -> Node:
    if opening in ("|", r"\vert", r"\lvert", r"\|", r"\lfloor", r"\lceil"):
        name = {r"\lfloor": "floor", r"\lceil": "ceil", r"\|": "norm"}.get(opening, "abs")
        return Node("call", (name, *items))
    if opening in (r"\{", r"\lbrace") or (opening == "{" and len(items) > 1):
        return Node("set", tuple(items))
    if len(items) == 1 and opening != r"\langle":
        return items[0]
    left, right = opening in ("[", r"\lbrack"), closing in ("]", r"\rbrack")
    if (left or right) and len(items) == 2:
        return Node("interval", (*items, left, right))
    return Node("tuple", tuple(items))
