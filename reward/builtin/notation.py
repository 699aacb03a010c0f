"""Defines words and signs of answers in LaTeX or plain notation: patterns, functions, units, words, layout."""

from __future__ import annotations

import re

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
MIXED = re.compile(r"\s*(?:(\d+)\s*/\s*(\d+)(?![\d.!^])|\\[dtc]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d)))")
CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "pounds": "pound", "euro": "euro"}
CURRENCY = re.compile(r"\\?[$€£¥]|\\pounds(?![a-zA-Z])|\\euro(?![a-zA-Z])")
SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
SCALE = re.compile(rf"\s*(?:\\(?:{STYLES})\s*\{{\s*)?({'|'.join(SCALES)})s?(?![a-zA-Z])(?:\s*\}})?", re.IGNORECASE)
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
    "pi": "pi", "infty": "inf", "infinity": "inf", "inf": "inf", "oo": "inf", "e": "e", "i": "i", "imath": "i",
}  # fmt: skip
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
    "no solution", "no solutions", "no real solution", "no real solutions", "empty set", "the empty set", "none",
}  # fmt: skip
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
"""Words that may change the number before them and are therefore never left out."""
SHORT_WORDS = {
    "and", "or", "not", "no", "yes", "is", "are", "was", "the", "of", "to", "in", "on", "at", "by", "if", "so",
    "as", "we", "it", "an", "for", "all", "any", "has", "but", "odd", "one", "two", "six", "ten", "let", "its",
}  # fmt: skip


def spelling(text: str) -> str:
    """Return `text` without layout; only spaces that separate words or numbers stay."""
    return re.sub(r"(?<!\w) | (?!\w)", "", normal(text))


def phrase(text: str) -> str:
    """Return the words of `text` in a comparable form: without styles, case, spacing, and punctuation at the ends."""
    text = TEXT.sub(r" \1 ", text.replace(r"\%", "%").replace(r"\$", "$"))
    return re.sub(r"\s+", " ", LAYOUT.sub(" ", text)).strip(" .,;:!?'\"`*").casefold()


def normal(text: str) -> str:
    for sign, pattern, digits in SMALL_DIGITS:
        text = pattern.sub(rf"{sign}{{\g<0>}}", text).translate(digits)
    text = "".join(UNICODE.get(each, each) for each in text).replace("{,}", ",")
    text = re.sub(r"\\!\s*", "", text)
    if r"\begin" not in text:  # a text with the escapes of JSON or a program
        text = re.sub(r"\\\\+(?=[a-zA-Z])", r"\\", text)
    text = LAYOUT.sub(lambda match: "{" if match[0].startswith("{") else " ", text)
    text = ORDINAL.sub("", PERCENT.sub("%", text)).replace("**", "^")
    return re.sub(r"\s+", " ", text).strip()


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
TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc"}


def is_product(word: str) -> bool:
    """Return whether letters are a product of symbols, a function or a constant, and not a word."""
    return (
        word in FUNCTIONS or word in CONSTANTS or word in GREEK or (len(word) <= 3 and word.lower() not in SHORT_WORDS)
    )


def is_inline(content: str) -> bool:
    """Return whether a style has mathematical content: a number, a letter, a letter in brackets."""
    return bool(re.fullmatch(r"\s*(?:[\d.,+\-/%\s]*\d[\d.,%]*|\(?\s*[A-Za-z]\s*\)?|\d+[a-zA-Z]*)\s*", content))


def unit_of(text: str, *, is_number: bool) -> tuple[str, bool] | None:
    """Return (canonical name, True) for a unit, (words, False) for other words; None if they may change the value."""
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
