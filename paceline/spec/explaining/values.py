"""The fault of a value, in our words and with the value to write, from pydantic's description."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args, get_origin

from paceline.spec.explaining.nearest import nearest
from paceline.spec.foreign.names import values
from paceline.spec.keys import ITEM, keys

_KINDS = {
    "int": "has to be an integer",
    "float": "has to be a number",
    "bool": "has to be true or false",
    "string": "has to be a text",
    "dict": "has to be a mapping",
    "tuple": "has to be a list",
    "finite_number": "has to be a finite number",
}
_SIGNS = {
    "greater_than": "has to be greater than {gt}",
    "greater_than_equal": "has to be greater than or equal to {ge}",
    "less_than": "has to be less than {lt}",
    "less_than_equal": "has to be less than or equal to {le}",
}


def value_fault(key: str, item: Any) -> str:
    """Return the clause for one of pydantic's faults at our dotted `key`, such as "has to be an integer"."""
    kind, value, context = str(item["type"]), item["input"], item.get("ctx", {})
    hint = _foreign_value(key, value)
    if key == "rewards" or key == f"rewards.{ITEM}":
        return _rewards(key, value)
    if kind in _SIGNS:
        return _with(_SIGNS[kind].format(**{name: f"{each:g}" for name, each in context.items()}), hint)
    if kind == "literal_error":
        return _with(_choices(key), hint or _guess(key, value))
    if kind == "string_pattern_mismatch":
        return _with(_pattern(key, value), hint)
    if kind.startswith("model") or kind == "dataclass_type":
        return _with(f"is a section: keys with values, such as {_example(key)}", hint)
    if kind in ("too_long", "too_short", "missing_argument"):
        return _with(f"has to have {context.get('max_length', context.get('min_length'))} values", hint)
    words = _KINDS.get(kind.removesuffix("_from_float").removesuffix("_parsing").removesuffix("_type"))
    return _with(words or str(item["msg"]), hint)


def _with(clause: str, hint: str) -> str:
    return f"{clause}; {hint}" if hint else clause


def _foreign_value(key: str, value: Any) -> str:
    """Return what to write for a value of another library; empty for a value that none has."""
    found = values().get(key, {})
    if not isinstance(value, str | int | float | None) or value not in found:
        return ""
    ours = found[value]
    return ours if isinstance(ours, str) and " " in ours else f"write {_word(ours)}"


def _guess(key: str, value: Any) -> str:
    """Return the choice that a misspelt one means, also one of a preset (`algorithm: dapo`)."""
    if not isinstance(value, str):
        return ""
    if key == "algorithm" and value in _literals("loss_fn.preset"):
        return f"write algorithm: grpo with loss_fn.preset: {value}"
    guesses = nearest(value, _literals(key))
    return f"did you mean {' or '.join(map(repr, guesses))}?" if guesses else ""


def _choices(key: str) -> str:
    return f"has to be one of {', '.join(map(repr, _literals(key)))}"


def _literals(key: str) -> list[str]:
    """Return the choices of a key."""
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
        return f"may have letters, digits, dots, dashes and underscores, {reason}, and 63 of them at most; write name={remedy}"
    if key == "checkpointing.metric_name":
        return "has to be val: or train: and a metric, such as val:reward or train:loss"
    return "has a form that is not allowed"


def _rewards(key: str, value: Any) -> str:
    if key != "rewards":
        return f"is a section {{function: …}}; write {{function: {value if isinstance(value, str) else 'math_accuracy'}}}"
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
