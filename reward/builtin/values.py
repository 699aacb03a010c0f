"""Computes the values of trees as mpmath numbers of any precision.

Promise: no value depends on time, and none takes long, because a value with too many digits is never computed.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from paceline.reward.builtin.expressions import Node, number_of

MAX_SIZE_BITS = 25_000
MAX_TRANSCENDENTAL_BITS = 4_000
MAX_WORK = 60_000_000
"""Work limit of one comparison, about a second. Work is the number of values times their bits, with a higher weight
above 2,000 bits."""
MAX_FACTORIAL = 3_000


class TooLarge(ArithmeticError):
    """The value would have too many digits."""


UNCOMPUTABLE = (TooLarge, ValueError, ZeroDivisionError, OverflowError, TypeError, NotImplementedError)


def count_of(node: Any, kind: str) -> int:
    if not isinstance(node, tuple):
        return 0
    children = node.args if isinstance(node, Node) else node
    return int(isinstance(node, Node) and node.kind == kind) + sum(count_of(each, kind) for each in children)


def point_of(names: Iterable[str], index: int, is_folded: bool) -> dict[str, Fraction]:
    """Return symbols' values between 1/2 and 5/2: negative at the last point, and the same in every process."""
    values = {}
    for name in names:
        key = name.casefold() if is_folded else name
        digest = hashlib.sha256(f"{index} {key}".encode()).digest()
        value = Fraction(1, 2) + Fraction(int.from_bytes(digest[:8], "big"), 1 << 63)
        values[name] = -value if index == 2 else value
    return values


def values_of(nodes: Sequence[Node], point: Mapping[str, Fraction]) -> tuple[list[Any], Any]:
    """Return the values of trees with the symbols' values of `point`, and a bound of their rounding errors.

    Intermediate values decide the number of bits, so that `2^{2021} - 1` is not `2^{2021}`. Raises one of UNCOMPUTABLE.
    """
    mp, sizes = context(), [0]
    if mp.work > MAX_WORK:
        raise TooLarge("the comparison exceeds MAX_WORK")
    mp.prec = 64
    for node in nodes:
        _value(node, point, sizes)
    largest = max(map(abs, sizes))
    mp.prec = bits = 160 + 4 * largest
    # Arithmetic takes time proportional to the square of the digits.
    mp.work += len(sizes) * (bits * (1 + bits // 2000) + 4 * largest)
    if mp.work > MAX_WORK:
        raise TooLarge(f"{len(sizes)} values of {bits} bits")
    return [_value(node, point, sizes) for node in nodes], mp.mpf(2) ** (2 * largest + 24 - bits)


@functools.cache
def _contexts() -> threading.local:
    return threading.local()


def context() -> Any:
    local = _contexts()
    if not hasattr(local, "mp"):
        import mpmath

        local.mp = mpmath.MPContext()
        local.mp.work = 0
    return local.mp


def has_decimals(node: Any) -> bool:
    if isinstance(node, Node):
        return (node.kind == "number" and node.args[1] is not None) or any(map(has_decimals, node.args))
    return isinstance(node, tuple) and any(map(has_decimals, node))


def _value(node: Node, point: Mapping[str, Fraction], sizes: list[int]) -> Any:
    mp = context()
    if node.kind == "number":
        value = real(node.args[0])
    elif node.kind == "symbol":
        value = real(point[node.args[0]])
    elif node.kind == "constant":
        value = {"pi": mp.pi, "e": mp.e, "i": mp.j, "inf": mp.inf}[node.args[0]] * 1
    elif node.kind == "call":
        value = _called(node.args[0], node.args[1:], point, sizes)
    elif node.kind in OPERATIONS:
        value = OPERATIONS[node.kind](*(_value(each, point, sizes) for each in node.args if isinstance(each, Node)))
    else:
        raise ValueError(node.kind)
    size = int(mp.mag(value)) if value and mp.isfinite(value) else 0
    sizes.append(size)
    if abs(size) > MAX_SIZE_BITS:
        raise TooLarge(node.kind)
    return value


def real(value: Fraction) -> Any:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_SIZE_BITS:
        raise TooLarge("number")
    return context().mpf(value.numerator) / value.denominator


def _power(base: Any, exponent: Any) -> Any:
    mp = context()
    is_finite = base and mp.isfinite(base) and mp.isfinite(exponent)
    if is_finite and abs(exponent) * (abs(mp.log(abs(base), 2)) + 1) > 2 * MAX_SIZE_BITS:
        raise TooLarge("power")
    if not mp.isint(exponent):
        _check_transcendental()
    return mp.power(base, exponent)


def _check_transcendental() -> None:
    if context().prec > MAX_TRANSCENDENTAL_BITS:
        raise TooLarge("function")


OPERATIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda *terms: sum(terms[1:], terms[0]),
    "product": operator.mul,
    "quotient": operator.truediv,
    "negative": operator.neg,
    "power": _power,
    "percent": lambda value: value / 100,
    "quantity": lambda value: value,
    "degrees": lambda value: value,
}
TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = {name: name for name in (*TRIGONOMETRIC, "sinh", "cosh", "tanh", "coth", "exp", "floor", "ceil", "arg")}
FUNCTIONS |= {f"arc{name}": f"a{name}" for name in TRIGONOMETRIC}
FUNCTIONS |= {"log": "log", "ln": "log", "lg": "log10", "abs": "fabs", "Re": "re", "Im": "im", "factorial": "factorial",
              "factorial2": "fac2", "binomial": "binomial"}  # fmt: skip
"""Maps the name of a function in an answer to the name of the function in mpmath."""


def _called(name: str, arguments: tuple[Node, ...], point: Mapping[str, Fraction], sizes: list[int]) -> Any:
    mp = context()
    if name in TRIGONOMETRIC and count_of(arguments[0], "degrees"):
        half_turn = Node("quotient", (Node("constant", ("pi",)), number_of(180)))
        arguments = (Node("product", (arguments[0], half_turn)),)
    values = [_value(each, point, sizes) for each in arguments]
    if name in ("min", "max") and not any(map(mp.im, values)):
        return min(values) if name == "min" else max(values)
    if name in ("gcd", "lcm") and all(map(mp.isint, values)):
        return mp.mpf(getattr(math, name)(*map(int, values)))
    if name in ("factorial", "factorial2", "binomial"):
        if any(mp.im(each) or abs(each) > MAX_FACTORIAL for each in values):
            raise TooLarge(name)
    else:
        _check_transcendental()
    if name in FUNCTIONS:
        return getattr(mp, FUNCTIONS[name])(*values)
    # An undefined function has an arbitrary value that depends only on its name and its arguments.
    key = " ".join((name, *(mp.nstr(each, 15) for each in values)))
    return real(point_of((key,), 0, is_folded=False)[key])
