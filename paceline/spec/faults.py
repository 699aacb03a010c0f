"""Explains faults of a spec's keys and values, suggests the intended key, and describes all keys. A fault is one line:
the dotted key as it was typed, the value, and the remedy. An unknown key is looked up in the dictionary of other
libraries' names, then by spelling, then by its last parts in other sections. A wrong suggestion is worse than none.
Pages of the documentation are made from the spec's classes and the dictionary."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from paceline.spec.foreign import EXAMPLES, ForeignName, key_for, look_up, values
from paceline.spec.keys import ITEM, dotted, keys, keys_of

FAULTS_SHOWN = 20
MAX_LEVELS = 8
"""Keys of an unknown section are looked up at most this many levels deep."""


def explain(error: ValidationError, algorithm: object = "grpo") -> str:
    """Return one line per fault of a spec with this `algorithm`, at most FAULTS_SHOWN."""
    items = error.errors()
    lines: list[str] = []
    for item in items[:FAULTS_SHOWN]:
        lines += [line for line in _explain_one(item, str(algorithm)) if line not in lines]
    hidden = len(items) - FAULTS_SHOWN + max(0, len(lines) - FAULTS_SHOWN)
    more = [f"and {hidden} more faults"] if hidden > 0 else []
    return "\n".join([*lines[:FAULTS_SHOWN], *more])


def unknown_key(location: tuple[Any, ...], value: Any, algorithm: str = "grpo") -> list[str]:
    """Return the lines of the message about an unknown key with this `value`."""
    head = _typed(location)
    typed = _leaves(head, value)
    entries = {path: look_up(_without_indices(path)) for path in typed}
    if any(entries.values()) and not _misspelt_section(location, value):
        answers = {
            path: _foreign(path, entry, algorithm) if entry else _own(location, path) for path, entry in entries.items()
        }
        return [f"{path}: unknown key; {answer}" for path, answer in _once(answers).items()]
    path = typed[0] if len(typed) == 1 else head
    return [f"{path}: unknown key; {_own(location, path)}"]


def _explain_one(item: Any, algorithm: str) -> list[str]:
    location, value = item["loc"], item["input"]
    typed, message = _typed(location), str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return unknown_key(location, value, algorithm)
    if item["type"] == "missing":
        if dotted(location) in keys():
            return [f"{typed}: missing; every spec must set it"]
        parent = location[:-1]
        wanted = f"have {_num_values(dotted(parent))} values" if dotted(parent) in keys() else "have more values"
        return [f"{_typed(parent)}: must {wanted} (got {reprlib.repr(value)})"]
    if item["type"] == "value_error":
        return [f"{typed}: {message}" if typed else message]
    union = _union_above(location)
    typed = typed if union is None else _typed(union)
    if isinstance(value, dict) and (foreign := _foreign_below(typed, value, algorithm)):
        return foreign
    if union is not None:  # pydantic reports one fault for each member of the union
        wanted = keys()[dotted(union)].type_text
        wanted = "have at least 1 value" if value == [] and "list" in wanted else f"be {wanted}"
        return [f"{typed}: must {wanted} (got {reprlib.repr(value)})"]
    return [f"{typed}: {value_fault(dotted(location), item)} (got {reprlib.repr(value)})"]


def _num_values(key: str) -> int:
    """Return the number of values of a key that takes a list of this length, or null."""
    annotation = keys()[key].field.annotation
    (values,) = (get_args(each) for each in (annotation, *get_args(annotation)) if get_origin(each) is tuple)
    return len(values)


def _union_above(location: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the location of the key if pydantic names a member of the key's union (`data.train.str`); else None."""
    for length in range(1, len(location)):
        key = keys().get(dotted(location[:length]))
        if key is not None and key.section is None and isinstance(location[length], str):
            return location[:length]
    return None


def _foreign_below(typed: str, value: dict[Any, Any], algorithm: str) -> list[str]:
    """Return the lines for keys of other libraries below one of our plain values (`algorithm.adv_estimator`)."""
    entries = {path: look_up(path) for path in _leaves(typed, value)}
    return [f"{path}: unknown key; {_foreign(path, entry, algorithm)}" for path, entry in entries.items() if entry]


def _foreign(path: str, entry: ForeignName, algorithm: str) -> str:
    """Return the clause about another library's name, with the key of `algorithm`, or of the algorithm in `path`."""
    if not entry.key:
        return f"there is none, because {entry.none}"
    if entry.place:
        rest = path.removeprefix(entry.name.removesuffix(".*")).lstrip(".")
        if rest and f"{entry.key}.{rest}" not in keys() and (guesses := _elsewhere(rest)):
            return f"write {_listed(guesses)}"
        return f"{entry.place}; write {entry.key}.{rest}" if rest else entry.place
    name = path if entry.name.endswith(".*") else entry.name
    whose = f"{entry.library}'s {name!r}" if entry.library else repr(name)
    section = path.partition(".")[0]
    key = key_for(entry.key, section if section in EXAMPLES else algorithm) or entry.key
    clause = f"{whose} is {key} in Paceline"
    return f"{clause}; {entry.note}" if entry.note else clause


def _own(location: tuple[Any, ...], path: str) -> str:
    section = dotted(location[:-1])
    names = keys_of(f"{section}.{ITEM}" if f"{section}.{ITEM}" in keys() else section)
    names = names or keys_of("")
    guesses = nearest(str(location[-1]), names) or _elsewhere(_without_indices(path))
    if guesses:
        return f"did you mean {_listed([repr(guess) for guess in guesses])}?"
    return f"known keys: {', '.join(names)}"


def _misspelt_section(location: tuple[Any, ...], value: Any) -> bool:
    """Return whether the key resembles one of our sections, and that section has all keys of `value`."""
    above = dotted(location[:-1])
    sections = [f"{above}.{near}" if above else near for near in nearest(str(location[-1]), keys_of(above))]
    below = [str(name) for name in value] if isinstance(value, dict) else []
    return bool(below) and any(set(below) <= set(keys_of(section)) for section in sections)


def _elsewhere(path: str) -> list[str]:
    """Return the keys in other sections of the spec that share as many last parts with `path` as possible."""
    parts = path.split(".")
    for first in range(len(parts)):
        ending = ".".join(parts[first:])
        matches = [key for key in keys() if key == ending or key.endswith(f".{ending}")]
        if matches:
            return matches if len(matches) <= MAX_GUESSES else []
    return []


def _leaves(path: str, value: Any, levels: int = MAX_LEVELS) -> list[str]:
    """Return the dotted names below an unknown key, at most FAULTS_SHOWN + 1."""
    if not isinstance(value, dict) or not value or levels == 0:
        return [path]
    leaves: list[str] = []
    for name, below in value.items():
        if len(leaves) > FAULTS_SHOWN:
            break
        leaves += _leaves(f"{path}.{_part(name)}", below, levels - 1)
    return leaves[: FAULTS_SHOWN + 1]


def _once(answers: dict[str, str]) -> dict[str, str]:
    """Return each distinct answer once, with the first path that has this answer and the number of other such paths."""
    paths: dict[str, list[str]] = {}
    for path, answer in answers.items():
        paths.setdefault(answer, []).append(path)
    return {
        first if not others else f"{first} and {len(others)} more": answer for answer, (first, *others) in paths.items()
    }


def _typed(location: tuple[Any, ...]) -> str:
    return ".".join(_part(part) for part in location)


def _part(part: Any) -> str:
    text = str(part)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _without_indices(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", "", path)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


_KINDS = {
    "int": "must be an integer",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be a text",
    "dict": "must be a mapping",
    "tuple": "must be a list",
    "finite_number": "must be a finite number",
    "int_parsing_size": "must be an integer of at most 64 bits",
}
_SIGNS = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be greater than or equal to {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be less than or equal to {le}",
}

_LENGTHS = {"string_too_short": "at least", "string_too_long": "at most", "too_short": "at least"}


def value_fault(key: str, item: Any) -> str:
    """Return the clause for a pydantic fault at our dotted `key`, such as "must be an integer"."""
    kind, value, context = str(item["type"]), item["input"], item.get("ctx", {})
    hint = _foreign_value(key, value)
    if key == "rewards" or key == f"rewards.{ITEM}":
        return _rewards(key, value)
    if kind in _SIGNS:
        return _with(_SIGNS[kind].format(**{name: f"{each:g}" for name, each in context.items()}), hint)
    if kind == "literal_error":
        choices = ", ".join(map(repr, _literals(key)))
        return _with(f"must be one of {choices}", hint or _guess(key, value))
    if kind == "string_pattern_mismatch":
        return _with(_pattern(key, value), hint)
    if kind.startswith("model") or kind == "dataclass_type":
        return _with(f"is a section: keys with values, such as {_example(key)}", hint)
    if kind in ("too_long", "missing_argument"):
        return _with(f"must have {context.get('max_length', context.get('min_length'))} values", hint)
    if kind in _LENGTHS:
        bound = context.get("min_length", context.get("max_length"))
        return _with(
            f"must have {_LENGTHS[kind]} {bound} {'character' if 'string' in kind else 'value'}{'s' * (bound != 1)}",
            hint,
        )
    if kind == "string_type" and isinstance(value, dict | list):
        return f"must be a text; put it into quotes, because YAML reads this value as a {kind_of(value).split()[-1]}"
    words = _KINDS.get(kind) or _KINDS.get(
        kind.removesuffix("_from_float").removesuffix("_parsing").removesuffix("_type")
    )
    return _with(words or str(item["msg"]), hint)


def kind_of(value: Any) -> str:
    """Return a clause with the kind of a value that YAML has read, such as "is a list"."""
    names = {
        dict: "is a mapping",
        list: "is a list",
        str: "is a text",
        bool: "is true or false",
        int: "is a number",
        float: "is a number",
        type(None): "is empty",
    }
    return names.get(type(value), f"is a {type(value).__name__}")


def _with(clause: str, hint: str) -> str:
    return f"{clause}; {hint}" if hint else clause


def _foreign_value(key: str, value: Any) -> str:
    """Return the replacement for another library's value; empty if there is none."""
    found = values().get(key, {})
    if not isinstance(value, str | int | float | None) or value not in found:
        return ""
    ours = found[value]
    return ours if isinstance(ours, str) and " " in ours else f"write {_word(ours)}"


def _guess(key: str, value: Any) -> str:
    """Return the suggestion for a misspelt choice, or for a preset (`algorithm: dapo`)."""
    if not isinstance(value, str):
        return ""
    if key == "algorithm" and value in _literals("loss_fn.preset"):
        return f"write algorithm: grpo with loss_fn.preset: {value}"
    guesses = nearest(value, _literals(key))
    return f"did you mean {' or '.join(map(repr, guesses))}?" if guesses else ""


def _literals(key: str) -> list[str]:
    return _choices_in(keys()[key].field.annotation) if key in keys() else []


def _choices_in(annotation: Any) -> list[str]:
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [str(each) for each in arguments]
    return [choice for each in arguments for choice in _choices_in(each)]


def _pattern(key: str, value: Any) -> str:
    if key == "name":
        wrong = sorted(set(re.findall(r"[^A-Za-z0-9._-]", str(value))))
        remedy = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")[:63] or "run"
        reason = f"{' '.join(map(repr, wrong[:5]))} not" if wrong else "the first one a letter or a digit"
        return f"may have at most 63 letters, digits, dots, dashes and underscores, {reason}; write name={remedy}"
    if key == "checkpointing.metric_name":
        return "must be val: or train: with a metric after it, such as val:reward or train:loss"
    return "has a form that is not allowed"


def _rewards(key: str, value: Any) -> str:
    if key != "rewards":
        return (
            f"is a section {{function: …}}; write {{function: {value if isinstance(value, str) else 'math_accuracy'}}}"
        )
    if isinstance(value, dict) and "function" in value:
        return "is a list of {function: …}; write a list, rewards=[{…}], also for one function"
    name = value if isinstance(value, str) else "math_accuracy"
    return f"is a list of {{function: …}}; write rewards=[{{function: {name}}}]"


def _example(key: str) -> str:
    below = [path for path in keys() if path.startswith(f"{key}.") and keys()[path].section is None]
    return f"{below[0].removeprefix(f'{key}.')}: …" if below else "key: value"


def _word(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


MAX_LETTERS = 64
"""Longer words are not compared, because the time grows with the product of the lengths."""
MAX_GUESSES = 3
"""Largest number of names that are suggested for one word."""


def nearest(word: str, candidates: Iterable[str]) -> list[str]:
    """Return the names that `word` may mean, best first; empty if none is close. A name is close if it differs only in
    case and punctuation, or by few typing errors for its length, or if it has all parts of `word` in order
    (`max_step` in `max_num_steps`)."""
    if len(word) > MAX_LETTERS:
        return []
    names = list(candidates)
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
    """Return the typing errors allowed for a word's length: none up to 3 letters, one up to 7, then one for each 4."""
    return 0 if len(word) <= 3 else max(1, len(word) // 4)


def distance(word: str, other: str) -> int:
    """Return the number of letters to insert, delete, replace or swap between two words (optimal string alignment)."""
    before, last = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, letter in enumerate(word, start=1):
        row = [i]
        for j, against in enumerate(other, start=1):
            best = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != against))
            if i > 1 and j > 1 and letter == other[j - 2] and word[i - 2] == against:
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
