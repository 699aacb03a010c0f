r"""Reads an answer in LaTeX or plain notation into a tree of nodes, without evaluating anything.

Promise: the whole text is read or none of it (None). Only spacing, styles, known units and words behind a number that cannot
change it are left out, and those stay in the tree as a `quantity`. Time and memory are linear in the text's length.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any, NamedTuple

MAX_CHARS = 2000
MAX_DEPTH = 40
"""Of brackets and arguments within one another. They and MAX_LEVELS keep a reader and a comparison far from Python's limit of
recursion, so that no result depends on the stack of the caller."""
MAX_LEVELS = 120
"""Of a tree; each factor of a product, sign and `!` is one."""
MAX_EXPONENT = 400


class Node(NamedTuple):
    """A number, symbol, operation or collection: `args` are nodes, texts and numbers, by `kind`."""

    kind: str
    args: tuple[Any, ...] = ()


class Unreadable(ValueError):
    """The text is not mathematics that is known here."""


UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "π": r"\pi ",
    "√": r"\sqrt ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "°": r"^\circ ", "ℝ": r"\mathbb{R}", "∖": r"\setminus ",
    "½": r"\frac12 ", "⅓": r"\frac13 ", "⅔": r"\frac23 ", "¼": r"\frac14 ", "¾": r"\frac34 ", "⅕": r"\frac15 ",
    "⅛": r"\frac18 ", "⁄": "/", "’": "'", "′": "'", "…": r"\dots ", "％": "%", "，": ",", "（": "(", "）": ")", "：": ":",
    "\u00a0": " ", "\u202f": " ", "\u2009": " ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ",
}  # fmt: skip
SMALL_DIGITS = [
    (sign, re.compile(f"[{small}]+"), str.maketrans(small, large))
    for sign, small, large in (("^", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-"), ("_", "₀₁₂₃₄₅₆₇₈₉", "0123456789"))
]
STYLES = r"text|textbf|textit|textrm|textsf|texttt|textnormal|mbox|hbox|mathrm|mathsf|mathit|mathnormal|operatorname\*?"
TEXT = re.compile(rf"\\(?:{STYLES})\s*\{{([^{{}}]*)\}}")
LAYOUT = re.compile(
    r"\\(?:left|right|middle)\s*\.|\\(?:left|right|middle|displaystyle|textstyle|[bB]igg?[lrm]?|limits|quad|qquad|hfill"
    r"|thinspace|enspace|phantom\s*\{[^{}]*\}|hspace\*?\s*\{[^{}]*\})(?![a-zA-Z])|(?<!\\)\\[,;:> ]|~|\{\\(?:rm|bf|it)(?=\s)"
)
ORDINAL = re.compile(
    rf"(?<=\d)\s*(?:\^\s*\{{\s*(?:\\(?:{STYLES})\s*\{{\s*(?:st|nd|rd|th)\s*\}}|(?:st|nd|rd|th))\s*\}}"
    rf"|\^?\s*\\(?:{STYLES})\s*\{{\s*(?:st|nd|rd|th)\s*\}}|(?:st|nd|rd|th)(?![a-zA-Z]))"
)
PERCENT = re.compile(rf"\\%|\s*(?:\\(?:{STYLES})\s*\{{\s*)?\b(?:percent|pct)\b(?:\s*\}})?")
SEPARATOR = re.compile(
    rf"[,;]?\s*(?:\\(?:{STYLES})\s*\{{\s*,?\s*(?:and|or)\s*\}}|(?:and|or|&)(?![a-zA-Z])|\\(?:lor|land|vee|wedge|And)(?![a-zA-Z]))|[,;]",
    re.IGNORECASE,
)
THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d+)?|[1-9]\d{0,2}(?: \d{3})+(?!\d)(?:\.\d+)?")
EUROPEAN = re.compile(r"\d{1,3}(?:\.\d{3})+,\d+(?!\d)")
REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\))")
NUMBER = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4}(?![\w.]))?")
HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+(?!\w)")
BASED = re.compile(rf"(\w+)_\s*(?:\{{\s*(?:\\(?:{STYLES})\s*\{{)?\s*(\w+)\s*\}}?\s*\}}|(\d))")
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12,
         "sixteen": 16}  # fmt: skip
MIXED = re.compile(
    r"\s*(?:(\d+)\s*/\s*(\d+)(?![\d.!^])|\\[dtc]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d)))"
)
CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", r"\pounds": "pound", r"\euro": "euro"}
CURRENCY = re.compile(r"\\?[$€£¥]|\\pounds(?![a-zA-Z])|\\euro(?![a-zA-Z])")
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
SCALE = re.compile(
    rf"\s*(?:\\(?:{STYLES})\s*\{{\s*)?({'|'.join(SCALES)})s?(?![a-zA-Z])(?:\s*\}})?", re.IGNORECASE
)

RELATIONS = {"=": "=", "==": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", r"\le": "<=", r"\leq": "<=",
             r"\leqslant": "<=", r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">=", r"\lt": "<", r"\gt": ">", r"\ne": "!=",
             r"\neq": "!=", r"\approx": "~", r"\in": "in", r"\equiv": "equiv", r"\to": "to", r"\rightarrow": "to"}  # fmt: skip
RELATION = re.compile(
    r"[<>!=]=|[<>=]|\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt|neq|ne|approx|in|equiv|to|rightarrow)(?![a-zA-Z])"
)
SET_OPERATION = re.compile(r"\\(cup|cap|setminus|backslash)(?![a-zA-Z])")
TIMES = re.compile(r"\*(?!\*)|\\(?:cdot|times|ast)(?![a-zA-Z])")
OVER = re.compile(r"/|\\div(?![a-zA-Z])")
CLOCK = re.compile(r"[ap]\.m|[AP]M(?![a-zA-Z])")
OVER_COMMAND = re.compile(r"\\over(?![a-zA-Z])")
SIGN = re.compile(r"\\(pm|mp)(?![a-zA-Z])|([+-])")
FUNCTIONS = {name: name for name in ["sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "exp", "ln", "log", "sqrt", "abs", "floor", "ceil", "gcd", "lcm", "max", "min", "det", "arg", "Re", "Im", "deg", "dim"]}  # fmt: skip
FUNCTIONS |= {f"arc{name}": f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
FUNCTIONS |= {f"a{name}": f"arc{name}" for name in ("sin", "cos", "tan")} | {"lg": "lg", "ceiling": "ceil"}
GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma",
    "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega",
}  # fmt: skip
CONSTANTS = {
    "pi": "pi",
    "infty": "inf",
    "infinity": "inf",
    "inf": "inf",
    "oo": "inf",
    "e": "e",
    "i": "i",
    "imath": "i",
}
CLOSING = {"(": ")]", "[": ")]", r"\{": r"\}", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", r"\langle": r"\rangle",
           r"\lvert": r"\rvert", r"\lbrace": r"\rbrace", r"\lbrack": r"\rbrack", r"\|": r"\|", "|": "|", r"\vert": r"\vert"}  # fmt: skip
OPENING = re.compile(r"\\(?:lfloor|lceil|langle|lvert|lbrace|lbrack|vert)(?![a-zA-Z])|\\[{|]|[(\[{|]")
COMMAND = re.compile(r"\\([a-zA-Z]+)\*?")
RUN = re.compile(r"[^\W\d_]+")
WORDS = re.compile(rf"(?:\\(?:{STYLES})\s*\{{[^{{}}]*\}}|[^\W\d_]+|[\d\s.%'’:\-/&!?()\\])+")
TAIL = re.compile(
    rf"(?:\\(?:{STYLES})\s*\{{[^{{}}]*\}}|(?!(?:and|or)(?![a-zA-Z]))[^\W\d_]+\.?|\\cdot|\\ |[/*\s.²³-]|\^\s*\{{?-?[1-4]\}}?)+"
)
ENVIRONMENT = re.compile(r"\\begin\s*\{(\w+)\*?\}(?:\s*\{[clr|]+\})?")
NO_SOLUTION = {
    "no solution",
    "no solutions",
    "no real solution",
    "no real solutions",
    "empty set",
    "the empty set",
    "none",
}

UNITS = {name: names[0] for names in (line.split() for line in (
    "m meter meters metre metres", "cm centimeter centimeters centimetre centimetres", "mm millimeter millimeters",
    "km kilometer kilometers kilometre kilometres", "in inch inches", "ft foot feet", "yd yard yards", "mi mile miles",
    "g gram grams gm", "kg kilogram kilograms", "mg milligram milligrams", "lb lbs pound pounds", "oz ounce ounces",
    "s sec secs second seconds", "min mins minute minutes", "h hr hrs hour hours", "day days", "week weeks", "month months",
    "year years yr yrs", "L l liter liters litre litres", "mL ml milliliter milliliters", "gal gallon gallons",
    "mph", "kmh kph", "N newton newtons", "J joule joules", "W watt watts", "kW kilowatt kilowatts", "V volt volts", "Hz",
    "degree degrees deg", "radian radians rad", "dollar dollars", "cent cents", "euro euros", "am a.m", "pm p.m", "unit units",
)) for name in names}  # fmt: skip
SQUARES = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
SINGLE = set("msghLlNJWV")
MEANINGFUL = {
    "and", "or", "not", "no", "if", "is", "are", "was", "where", "when", "for", "with", "than", "to", "over",
    "under", "minus", "plus", "times", "divided", "by", "multiplied", "squared", "cubed", "root", "roots", "square",
    "half", "halves", "third", "thirds", "quarter", "quarters", "fourth", "fourths", "fifth", "fifths", "sixth",
    "sixths", "eighth", "eighths", "tenth", "tenths", "hundredth", "hundredths", "thousandth", "thousandths",
    "hundred", "thousand", "million", "billion", "trillion", "dozen", "power", "negative", "pi", "infinity", "sqrt",
    "log", "ln", "sin", "cos", "tan", "mod", "modulo", "base", "one", "two", "three", "four", "five", "six",
    "seven", "eight", "nine", "ten", "eleven", "twelve", "twenty", "percent", "pct", "since", "because", "so",
    "which", "that", "double", "twice", "factorial", "exp", "point", "between", "thus", "hence", "therefore",
    "wrong", "incorrect",
}  # fmt: skip
"""Words that may change the number before them, so that they are never left out."""
SHORT_WORDS = {
    "and", "or", "not", "no", "yes", "is", "are", "was", "the", "of", "to", "in", "on", "at", "by", "if", "so",
    "as", "we", "it", "an", "for", "all", "any", "has", "but", "odd", "one", "two", "six", "ten", "let", "its",
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Node | None:
    """Return the tree of the whole `text`, or None if a part of it is not known."""
    if len(text) > MAX_CHARS or not text.strip():
        return None
    try:
        tree = _Reader(_normal(text)).whole()
        return None if _is_deep(tree) else tree
    except (Unreadable, RecursionError, ZeroDivisionError):
        return None


def _is_deep(tree: Node) -> bool:
    level: list[tuple[Any, ...]] = [tree]
    for _ in range(2 * MAX_LEVELS):  # a node and its args are a tuple each
        level = [each for found in level for each in found if isinstance(each, tuple)]
    return bool(level)


def spelling(text: str) -> str:
    """Return `text` without layout and without the spaces that divide no words or numbers."""
    return re.sub(r"(?<!\w) | (?!\w)", "", _normal(text))


def phrase(text: str) -> str:
    """Return the words of `text` for a comparison: without styles, case, spacing and punctuation at the ends."""
    text = TEXT.sub(r" \1 ", text.replace(r"\%", "%").replace(r"\$", "$"))
    return re.sub(r"\s+", " ", LAYOUT.sub(" ", text)).strip(" .,;:!?'\"`*").casefold()


def _normal(text: str) -> str:
    for sign, pattern, digits in SMALL_DIGITS:
        text = pattern.sub(rf"{sign}{{\g<0>}}", text).translate(digits)
    text = "".join(UNICODE.get(each, each) for each in text).replace("{,}", ",")
    text = re.sub(r"\\!\s*", "", text)
    if r"\begin" not in text:  # a text with the escapes of JSON or a program
        text = re.sub(r"\\\\+(?=[a-zA-Z])", r"\\", text)
    text = LAYOUT.sub(lambda match: "{" if match[0].startswith("{") else " ", text)
    text = ORDINAL.sub("", PERCENT.sub("%", text)).replace("**", "^")
    return re.sub(r"\s+", " ", text).strip()


class _Reader:
    """A recursive descent over a text. `brackets`: how many ( [ \\{ are open, where a comma separates and never groups digits."""

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
        while self.take(SEPARATOR):
            if not self.ends():
                found.append(self.item())
        return found

    def ends(self) -> bool:
        return self.skip() >= len(self.text) or self.sees(
            ")", "]", "}", r"\}", "&", r"\\", r"\end", r"\r", r"\|"
        )

    def item(self) -> Node:
        """Read one value with its unit, or words alone."""
        start = self.at
        try:
            value = self.quantity(self.relation())
            if self.ends() or SEPARATOR.match(self.text, self.at) or (self.bars and self.sees("|", r"\vert")):
                return value
        except Unreadable:
            if self.brackets:
                raise
        self.at = start
        return self.words()

    def words(self) -> Node:
        match = self.take(WORDS)
        if match is None or not re.search(r"[^\W\d_]", TEXT.sub(r"\1", match[0])):
            raise Unreadable(self.text[self.at :])
        found = phrase(match[0])
        return Node("set") if found in NO_SOLUTION else Node("text", (found,))

    def quantity(self, value: Node) -> Node:
        """Add the unit behind `value`, if there is one."""
        match = TAIL.match(self.text, self.skip())
        if match is None or not RUN.search(match[0]) or SEPARATOR.match(self.text, self.at):
            return value
        unit = _unit(match[0], is_number=not symbols(value))
        if unit is None:
            raise Unreadable(match[0])
        self.at = match.end()
        return Node("quantity", (value, *unit))

    def relation(self) -> Node:
        operands, signs = [self.ratio()], []
        while match := self.take(RELATION):
            signs.append(RELATIONS[match[0]])
            operands.append(self.ratio())
        if signs == ["in"]:
            return Node("member", tuple(operands))
        return Node("relation", (tuple(operands), tuple(signs))) if signs else operands[0]

    def ratio(self) -> Node:
        parts = [self.set_operation()]
        if self.take(OVER_COMMAND):
            parts = [Node("quotient", (parts[0], self.set_operation()))]
        while self.takes(":"):
            parts.append(self.set_operation())
        return parts[0] if len(parts) == 1 else Node("ratio", tuple(parts))

    def set_operation(self) -> Node:
        left = self.sum()
        while True:
            if match := self.take(SET_OPERATION):
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
            sign = self.take(SIGN)
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
            if self.take(TIMES):
                value = Node("product", (value, self.signed()))
            elif self.take(OVER):
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
        """Return whether a factor follows without a sign of multiplication; a unit or a word is none."""
        at = self.skip()
        if at >= len(self.text) or self.text[at] in ")]}&,;:=<>+-*/^_!%.'0123456789":
            return False
        if self.text[at] == "|" or self.sees(r"\vert", r"\|"):
            return not self.bars
        if CLOCK.match(self.text, at) and self.text[at - 1 : at] == " ":
            return False
        if run := RUN.match(self.text, at):
            return not self.is_unit(run) and _is_product(run[0]) and not (run[0] == "U" and self.sees("U (", "U[", "U("))  # fmt: skip
        if text := TEXT.match(self.text, at):
            return _is_inline(text[1]) and (text[1] not in UNITS or text[1] in "ei")
        if match := COMMAND.match(self.text, at):
            return match[1] not in STOPS
        return bool(OPENING.match(self.text, at)) and not self.sees(r"\{")

    def is_unit(self, run: re.Match[str]) -> bool:
        """Return whether letters are a unit: `5 cm`, `5 m`, `3 m/s`, but not `5m`."""
        if self.brackets or run[0] not in UNITS:
            return False
        if run[0] not in SINGLE:
            return run[0] not in FUNCTIONS
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
        if money := self.take(CURRENCY):
            is_negative, value = self.takes("-"), self.number()
            if value is None:
                raise Unreadable(self.text)
            value = Node("negative", (value,)) if is_negative else value
            return Node("quantity", (value, CURRENCIES.get(money[0]) or CURRENCIES[money[0][1:]], True))
        if match := self.take(HEXADECIMAL):
            return Node("number", (Fraction(int(match[0], 16)), None))
        start = self.skip()
        if (match := BASED.match(self.text, start)) and match[1][0].isdigit():
            base = match[2] or match[3]
            self.at = match.end()
            return Node("base", (match[1].casefold(), str(BASES.get(base, base))))
        if match := self.take(REPEATING):
            return Node("number", (_repeating(match), None))
        match = None if self.brackets else self.take(EUROPEAN)
        if match:
            return _decimal(match[0].replace(".", "").replace(",", "."))
        match = (None if self.brackets else self.take(THOUSANDS)) or self.take(NUMBER)
        if match is None:
            return None
        value = _decimal(match[0].replace(",", "").replace(" ", ""))
        if re.match(r"\s*\d", self.text[self.at :]) and not MIXED.match(self.text, self.at):
            raise Unreadable(self.text)
        if match[0].isdigit() and (mixed := self.take(MIXED)):
            top, bottom = mixed[1] or mixed[3] or mixed[4], mixed[2] or mixed[5] or mixed[6]
            return Node("number", (value.args[0] + Fraction(int(top), int(bottom)), None))
        if scale := self.take(SCALE):
            return Node("number", (value.args[0] * SCALES[scale[1].lower()], None))
        if match := self.take(re.compile(r"\\?[$€£]")):
            return Node("quantity", (value, CURRENCIES[match[0][-1]], True))
        return value

    def group(self) -> Node | None:
        match = OPENING.match(self.text, self.skip())
        if match is None:
            return None
        opening, self.at = match[0], match.end()
        closings = (")", "]", r"\rbrack") if opening in "([" or opening == r"\lbrack" else (CLOSING[opening],)
        is_bar, is_bracket = CLOSING[opening] == opening, opening != "{"
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
        if match := self.take(ENVIRONMENT):
            return self.environment(match[1])
        match = self.take(COMMAND)
        if match is None:
            return None
        name = match[1]
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return Node("quotient", (self.argument(), self.argument()))
        if name in ("binom", "dbinom", "tbinom"):
            return Node("call", ("binomial", self.argument(), self.argument()))
        if name == "sqrt":
            return self.root()
        if name in FUNCTIONS:
            return self.call(FUNCTIONS[name])
        if name in CONSTANTS:
            return Node("constant", (CONSTANTS[name],))
        if name in ("emptyset", "varnothing"):
            return Node("set")
        if name in ACCENTS:
            return Node("symbol", (f"{name} {_name(self.argument())}",))
        if name in STOPS:
            raise Unreadable(name)
        return Node("symbol", (name,))

    def styled(self, match: re.Match[str]) -> Node:
        content = match[1].strip()
        if content in FUNCTIONS:
            return self.call(FUNCTIONS[content])
        if _is_inline(content):
            return _Reader(_normal(content), self.depth).whole()
        if "operatorname" in match[0] or not content:
            return Node("symbol", (content,))
        if (tree := read(content)) is not None and tree.kind == "quantity":  # \text{5 hours}
            return tree
        found = phrase(content)
        return Node("set") if found in NO_SOLUTION else Node("text", (found,))

    def argument(self) -> Node:
        r"""Read the argument of a command: a group in braces, one digit (`\frac12`), or one atom."""
        if digit := self.take(re.compile(r"\d")):
            return Node("number", (Fraction(int(digit[0])), None))
        return self.atom()

    def root(self) -> Node:
        degree = Node("number", (Fraction(2), None))
        if self.takes("["):
            end = self.text.find("]", self.at)
            if end < 0:
                raise Unreadable(self.text)
            degree = _Reader(self.text[self.at : end], self.depth).whole()
            self.at = end + 1
        return Node(
            "power", (self.argument(), Node("quotient", (Node("number", (Fraction(1), None)), degree)))
        )

    def call(self, name: str) -> Node:
        base = self.subscript() if self.takes("_") else None
        power = self.exponent() if self.takes("^") else None
        if self.ends() or (self.at < len(self.text) and self.text[self.at] in "+=,;"):
            return Node("symbol", (name,))
        if name == "sqrt":
            return Node("power", (self.atom(), Node("number", (Fraction(1, 2), None))))
        argument = self.atom() if OPENING.match(self.text, self.skip()) else self.bare_argument()
        is_inverse = (
            power == Node("negative", (Node("number", (Fraction(1), None)),)) and name in TRIGONOMETRIC
        )
        name = f"arc{name}" if is_inverse else name
        arguments = argument.args if argument.kind == "tuple" else (argument,)
        if base is not None:
            arguments = (*arguments, _Reader(base, self.depth).whole())
        value = Node("call", (name, *arguments))
        return value if power is None or is_inverse else Node("power", (value, power))

    def bare_argument(self) -> Node:
        r"""Read the argument of `\sin 2x`: factors up to a sign, a bracket or another function."""
        value = self.factor()
        while (
            self.begins_factor()
            and not OPENING.match(self.text, self.at)
            and not ((match := COMMAND.match(self.text, self.at)) and match[1] in FUNCTIONS)
        ):
            value = Node("product", (value, self.factor()))
        return value

    def letter(self) -> Node:
        run = RUN.match(self.text, self.skip())
        if run is None:
            raise Unreadable(self.text[self.at :])
        word = run[0]
        if word in FUNCTIONS and len(word) > 1:
            self.at = run.end()
            return self.call(FUNCTIONS[word])
        if word in CONSTANTS or word in GREEK:
            self.at = run.end()
            return Node("constant", (CONSTANTS[word],)) if word in CONSTANTS else Node("symbol", (word,))
        if not _is_product(word) and not self.text[run.start() - 1 : run.start()].isalpha():
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


STOPS = {
    "cup", "cap", "setminus", "backslash", "le", "leq", "ge", "geq", "lt", "gt", "ne", "neq", "in", "pm", "mp",
    "cdot", "times", "div", "approx", "to", "rightarrow", "equiv", "end", "rangle", "rfloor", "rceil", "rvert",
    "rbrace", "rbrack", "lbrace", "lor", "land", "vee", "wedge", "mid", "leqslant", "geqslant", "ast", "circ",
    "degree", "boxed", "fbox", "over", "text",
}  # fmt: skip
ACCENTS = {
    "overline", "vec", "hat", "bar", "tilde", "mathbf", "mathbb", "mathcal", "mathfrak", "boldsymbol", "bm",
    "overrightarrow", "widehat", "underline", "dot", "overarc",
}  # fmt: skip
TRIGONOMETRIC = {
    "sin", "cos", "tan", "cot", "sec", "csc",
}  # fmt: skip


def symbols(node: Any) -> frozenset[str]:
    """Return the names of the symbols below `node`."""
    if isinstance(node, Node):
        if node.kind == "symbol":
            return frozenset(node.args)
        return frozenset().union(*(symbols(each) for each in node.args))
    return frozenset().union(*(symbols(each) for each in node)) if isinstance(node, tuple) else frozenset()


def words_of(tree: Node) -> list[str]:
    """Return the words of an answer that is, or lists, words."""
    return [each.args[0] for each in (tree.args if tree.kind == "list" else (tree,)) if each.kind == "text"]


def _is_product(word: str) -> bool:
    """Return whether letters are a product of symbols, a function or a constant, and not a word."""
    return (
        word in FUNCTIONS
        or word in CONSTANTS
        or word in GREEK
        or (len(word) <= 3 and word.lower() not in SHORT_WORDS)
    )


def _is_inline(content: str) -> bool:
    """Return whether the content of a style is mathematics: a number, a letter, a letter in brackets."""
    return bool(
        re.fullmatch(r"\s*(?:[\d.,+\-/%\s]*\d[\d.,%]*|\(?\s*[A-Za-z]\s*\)?|\d+[a-zA-Z]*)\s*", content)
    )


def _name(node: Node) -> str:
    """Return the name of a symbol with an accent, a prime or a subscript."""
    if node.kind in ("symbol", "constant"):
        return str(node.args[0])
    if node.kind in ("product", "number", "text"):
        return "".join(
            _name(each) if isinstance(each, Node) else str(each) for each in node.args if each is not None
        )
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
    """Return a number and the size of its last written digit, None for an integer."""
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


def _unit(text: str, *, is_number: bool) -> tuple[str, bool] | None:
    """Return a unit's canonical name with True, or other words behind a number with False; None for what may change the value."""
    text = TEXT.sub(r" \1 ", text).replace("²", "^2").replace("³", "^3").replace(r"\cdot", "*")
    tokens = re.findall(r"[^\W\d_]+(?:\.[a-z])?|[/*]|-?\d", text.replace("{", "").replace("}", ""))
    words = [token for token in tokens if token[0].isalpha()]
    if all(word in UNITS or word.lower() in UNITS or word in SQUARES or word == "per" for word in words):
        return _canonical(tokens), True
    if not is_number or any(word.lower() in MEANINGFUL for word in words) or re.search(r"\d|/\s*\d", text):
        return None
    if any(len(word) == 1 and word not in "aAI" for word in words) or len(words) > 8:
        return None
    return " ".join(words).lower(), False


def _canonical(tokens: list[str]) -> str:
    found, power = [], ""
    for token in tokens:
        if token in SQUARES:
            power = SQUARES[token]
        elif token == "per":
            found.append("/")
        elif token[0].isalpha():
            found.append(UNITS.get(token) or UNITS[token.lower()])
            found.append(power)
            power = ""
        else:
            found.append(f"^{token}" if token[-1].isdigit() else token)
    return "".join(found)
