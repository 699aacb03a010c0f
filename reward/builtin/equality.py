"""Decides whether two answers, parsed into trees, have the same value.

Numbers without decimals are compared to 30 digits. If one of two numbers has decimals, they are compared to six
significant digits. Expressions with symbols are compared at points that depend only on the symbols' names. Promise: no
result depends on time, and no comparison takes long: a value with too many digits is not computed and equals only an
identical tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from paceline.reward.builtin.expressions import Node, number_of, symbols
from paceline.reward.builtin.values import UNCOMPUTABLE, context, count_of, has_decimals, point_of, real, values_of

MAX_ITEMS = 64
MAX_SIGNS = 3
COLLECTIONS = {
    "list", "tuple", "set", "interval", "union", "matrix", "cases", "ratio", "operation", "member", "text", "base", "point",
}  # fmt: skip
INFINITY, REALS = Node("constant", ("inf",)), Node("symbol", ("mathbb R",))
BELOW_ALL = Node("negative", (INFINITY,))
MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


def equal_values(gold: Node, answer: Node) -> bool:
    """Return whether `answer` has the value of `gold`, within the work limit of one comparison."""
    context().work = 0
    return same_value(gold, answer)


def same_value(gold: Node, answer: Node) -> bool:
    """Return whether `answer` has the value of `gold`. A bare value equals `x = value`; order matters only in tuples."""
    if gold == answer:
        return True
    if (units := _units(gold)) and (others := _units(answer)) and units != others:
        return False
    gold, answer = _expanded(_bare(gold)), _expanded(_bare(answer))
    if gold.kind == answer.kind == "relation":
        return _same_relation(gold, answer)
    if "relation" in (gold.kind, answer.kind):
        return _same_as_relation(gold, answer)
    if gold.kind in COLLECTIONS or answer.kind in COLLECTIONS:
        return _same_collection(gold, answer)
    return _same_number(gold, answer)


def _bare(node: Node) -> Node:
    while node.kind in ("quantity", "degrees") or (node.kind == "member" and node.args[0].kind == "symbol"):
        node = node.args[1] if node.kind == "member" else node.args[0]
    return node


def _units(node: Any) -> frozenset[str]:
    if isinstance(node, Node) and node.kind not in COLLECTIONS:
        if node.kind == "degrees":
            return frozenset(("degree",))
        if node.kind == "quantity":
            return (frozenset((node.args[1],)) if node.args[2] else frozenset()) | _units(node.args[0])
        return frozenset().union(*(_units(each) for each in node.args))
    return frozenset()


def _expanded(node: Node) -> Node:
    r"""Return the list of values of an expression with \pm, else `node`."""
    count = count_of(node, "either")
    if node.kind in ("list", "set") or not 0 < count <= MAX_SIGNS:
        return node
    found = [_chosen(node, sign) for sign in (1, -1)]
    return Node("list", tuple(each for value in found for each in (value.args if value.kind == "list" else (value,))))


def _chosen(node: Any, sign: int) -> Any:
    if isinstance(node, Node):
        if node.kind == "either":
            value = _chosen(node.args[0], sign)
            return value if sign * node.args[1] > 0 else Node("negative", (value,))
        return Node(node.kind, tuple(_chosen(each, sign) for each in node.args))
    return tuple(_chosen(each, sign) for each in node) if isinstance(node, tuple) else node


def _same_as_relation(gold: Node, answer: Node) -> bool:
    """Compare a value with a relation: with an assignment's right-hand side, or with an inequality's interval."""
    relation, value = (gold, answer) if gold.kind == "relation" else (answer, gold)
    operands, signs = relation.args
    if set(signs) <= {"=", "~"}:
        # The left-hand side of a gold answer is dropped only if it is a name; a completion may show how it got its
        # value.
        if relation is gold and not _is_name(operands[0]):
            return False
        candidates = [operands[-1]] if signs[-1] == "=" else [operands[-1], operands[-2]]
        if relation is answer and len(operands) == 2 and _is_name(operands[1]) and not _is_name(operands[0]):
            candidates.append(operands[0])
        return any(same_value(each, value) if relation is gold else same_value(value, each) for each in candidates)
    interval = _interval(relation)
    if interval is None or value.kind not in ("interval", "tuple", "union"):
        return False
    return _same_collection(interval, value)


def _is_name(node: Node) -> bool:
    """Return whether a left-hand side names a value: `x`, `f(x)`, `|AB|`, `AB/CD`, words."""
    if node.kind in ("product", "quotient", "ratio", "tuple", "call"):
        return all(_is_name(each) for each in node.args if isinstance(each, Node))
    return node.kind in ("symbol", "text") or (node.kind == "constant" and node.args[0] in ("e", "i"))


def _interval(relation: Node) -> Node | None:
    """Return the interval of `a < x <= b` or `x > a`; None for another relation."""
    operands, signs = relation.args
    if all(sign in (">", ">=") for sign in signs):
        operands, signs = operands[::-1], tuple(MIRRORED[sign] for sign in signs[::-1])
    if not all(sign in ("<", "<=") for sign in signs) or len(operands) > 3:
        return None
    if len(operands) == 3:
        low, middle, high = operands
        closed = (signs[0] == "<=", signs[1] == "<=")
    elif operands[0].kind == "symbol":
        middle, high = operands
        low, closed = BELOW_ALL, (False, signs[0] == "<=")
    else:
        low, middle, high, closed = operands[0], operands[1], INFINITY, (signs[0] == "<=", False)
    return Node("interval", (low, high, *closed)) if _is_name(middle) else None


def _same_relation(gold: Node, answer: Node) -> bool:
    (operands, signs), (others, other_signs) = gold.args, answer.args
    if len(operands) == len(others) == 2:
        return _same_equation(operands, signs[0], others, other_signs[0])
    if signs[-1] == other_signs[-1] == "=" and _is_name(operands[0]) and _is_name(others[0]):
        return same_value(operands[0], others[0]) and same_value(operands[-1], others[-1])
    if signs != other_signs:
        others, other_signs = others[::-1], tuple(MIRRORED.get(sign, sign) for sign in other_signs[::-1])
    return signs == other_signs and len(operands) == len(others) and _pairwise(operands, others)


def _same_equation(gold: tuple[Node, ...], sign: str, answer: tuple[Node, ...], other: str) -> bool:
    """Compare two relations of two sides each: side by side, or as multiples of each other."""
    if sign == other and _pairwise(gold, answer):
        return True
    if sign == MIRRORED.get(other) and _pairwise(gold, answer[::-1]):
        return True
    if any(each.kind in COLLECTIONS for each in (*gold, *answer)) or not set((sign, other)) <= set(MIRRORED):
        return False
    left, right = (Node("sum", (a, Node("negative", (b,)))) for a, b in (gold, answer))
    ratio = _constant_ratio(left, right)
    if ratio is None:
        return False
    return sign == other if ratio > 0 or (sign in ("=", "!=") and other == sign) else sign == MIRRORED.get(other)


def _pairwise(gold: Iterable[Node], answer: Iterable[Node]) -> bool:
    gold, answer = tuple(gold), tuple(answer)
    return len(gold) == len(answer) and all(map(same_value, gold, answer))


def _unordered(gold: tuple[Node, ...], answer: tuple[Node, ...]) -> bool:
    """Return whether the items pair one to one. The first match is taken, because equality is almost transitive."""
    if len(gold) != len(answer) or len(gold) > MAX_ITEMS:
        return False
    left = list(answer)  # compare each pair once: twice would double the work at each level of nested sets
    for item in gold:
        partner = next((index for index, other in enumerate(left) if same_value(item, other)), None)
        if partner is None:
            return False
        del left[partner]
    return True


def _distinct(items: tuple[Node, ...]) -> tuple[Node, ...]:
    found: list[Node] = []
    for item in items[:MAX_ITEMS]:
        if not any(same_value(item, other) for other in found):
            found.append(item)
    return tuple(found)


def _items(node: Node) -> tuple[Node, ...]:
    if node.kind not in ("list", "set"):
        return (node,)
    expanded = (_expanded(_bare(each)) for each in node.args)
    return tuple(each for item in expanded for each in (item.args if item.kind == "list" else (item,)))


def _same_collection(gold: Node, answer: Node) -> bool:
    kinds = {gold.kind, answer.kind}
    if "text" in kinds or "base" in kinds:
        return _word(gold) is not None and _word(gold) == _word(answer)
    if kinds == {"interval"}:
        return gold.args[2:] == answer.args[2:] and _pairwise(gold.args[:2], answer.args[:2])
    if REALS in (gold, answer) or kinds & {"interval", "union"}:
        try:
            left, right = _intervals(gold), _intervals(answer)
        except UNCOMPUTABLE:
            return False
        return left is not None and right is not None and _unordered(left, right)
    if kinds == {"matrix"} or kinds == {"cases"}:
        return len(gold.args) == len(answer.args) and all(map(_pairwise, gold.args, answer.args))
    if kinds in ({"tuple"}, {"ratio"}, {"point"}, {"list", "tuple"}):
        return _pairwise(gold.args, answer.args)
    if kinds == {"operation"}:
        return gold.args[0] == answer.args[0] and _pairwise(gold.args[1:], answer.args[1:])
    if kinds & {"list", "set"} and not kinds & COLLECTIONS - {"list", "set"}:
        left, right = _items(gold), _items(answer)
        if "set" in kinds:
            left, right = _distinct(left), _distinct(right)
        return _unordered(left, right)
    return False


def _intervals(node: Node) -> tuple[Node, ...] | None:
    """Return the intervals of a union, adjacent ones joined; a set's items are points. None for other nodes."""
    if node.kind == "operation" and node.args[:2] == ("setminus", REALS) and node.args[2].kind == "set":
        ends = [BELOW_ALL, *sorted(node.args[2].args, key=_float), INFINITY]
        return tuple(Node("interval", (*pair, False, False)) for pair in itertools.pairwise(ends))
    found = []
    for each in node.args if node.kind == "union" else (node,):
        if each.kind == "tuple" and len(each.args) == 2:
            found.append(Node("interval", (*each.args, False, False)))
        elif each.kind == "set":
            found += [Node("point", (item,)) for item in each.args]
        elif each.kind == "interval":
            found.append(each)
        elif each == REALS:
            found.append(Node("interval", (BELOW_ALL, INFINITY, False, False)))
        else:
            return None
    return _joined(found)


def _joined(intervals: list[Node]) -> tuple[Node, ...]:
    """Join adjacent intervals such as (1, 2] and (2, 3). Intervals without numeric ends stay unchanged."""
    try:
        ends = [tuple(_float(end) for end in each.args[:2]) for each in intervals]
    except UNCOMPUTABLE:
        return tuple(intervals)
    if any(len(each) == 1 for each in ends):
        return tuple(intervals)
    found: list[Node] = []
    for _, each in sorted(zip(ends, intervals, strict=True), key=lambda pair: pair[0]):
        last = found[-1] if found else None
        if last and (last.args[3] or each.args[2]) and same_value(last.args[1], each.args[0]):
            found[-1] = Node("interval", (last.args[0], each.args[1], last.args[2], each.args[3]))
        else:
            found.append(each)
    return tuple(found)


def _float(node: Node) -> float:
    if symbols(node):
        raise ValueError(node)
    return float(values_of((node,), {})[0][0])


def _word(node: Node) -> Any:
    """Return the comparable form of words: a single letter's symbol, or the digits and base of a number in a base."""
    if node.kind == "base":
        return _based(node)
    if node.kind == "text":
        return node.args[0]
    if node.kind in ("symbol", "constant"):
        return str(node.args[0]).casefold()
    if node.kind == "product" and not count_of(node, "number"):
        parts = [_word(each) for each in node.args]
        return None if None in parts else "".join(parts)
    return None


def _based(node: Node) -> Any:
    try:
        return int(node.args[0], int(node.args[1])), int(node.args[1])
    except ValueError:
        return node.args


def _same_number(gold: Node, answer: Node) -> bool:
    if gold.kind == "percent" or answer.kind == "percent":
        return _same_percent(gold, answer)
    if gold.kind == answer.kind == "number" and gold.args[1] is answer.args[1] is None:
        return bool(gold.args[0] == answer.args[0])
    names = symbols(gold) | symbols(answer)
    is_folded = all(len({each.casefold() for each in symbols(side)}) == len(symbols(side)) for side in (gold, answer))
    try:
        points = [point_of(names, index, is_folded) for index in range(3 if names else 1)]
        outcomes = [_agree(gold, answer, point, is_last=index == 2) for index, point in enumerate(points)]
    except UNCOMPUTABLE:
        return False
    return False not in outcomes and outcomes.count(True) >= (2 if names else 1)


def _same_percent(gold: Node, answer: Node) -> bool:
    """Compare two percentages by their numbers. A number may be a percentage's value or the number before its `%`."""
    if gold.kind == answer.kind:
        return _same_number(_bare(gold.args[0]), _bare(answer.args[0]))
    hundred = number_of(100)
    if gold.kind == "percent":
        inner = _bare(gold.args[0])
        return _same_number(inner, answer) or _same_number(inner, Node("product", (answer, hundred)))
    inner = _bare(answer.args[0])
    return _same_number(gold, inner) or _same_number(gold, Node("quotient", (inner, hundred)))


def _agree(gold: Node, answer: Node, point: Mapping[str, Fraction], *, is_last: bool) -> bool | None:
    """Return whether two values agree at a point; None if they are not comparable."""
    (left, right), noise = values_of((gold, answer), point)
    mp = context()
    if mp.isnan(left) or mp.isnan(right):
        return None
    # Roots and logarithms of negative numbers have several values, and the texts do not say which one is meant.
    if is_last and (mp.im(left) or mp.im(right)):
        return None
    if mp.isinf(left) or mp.isinf(right):
        return bool(left == right)
    difference = abs(left - right)
    if difference <= noise:
        return True
    is_close = difference <= _tolerance(abs(left), gold, answer)
    return bool(is_close and all(mp.sign(part(left)) == mp.sign(part(right)) for part in (mp.re, mp.im)))


def _tolerance(size: Any, gold: Node, answer: Node) -> Any:
    """Return the allowed distance from a gold answer of this size: 0 if neither answer has decimals.

    It is half a unit of the sixth significant digit. If all answers with decimals are plain numbers, it is at most half
    a unit of their last written digit or 5e-7, whichever is larger: 1234567.9 is not 1234567.5. An integer must be
    exact. A gold answer with symbols has a relative tolerance of 2e-6, which keeps six digits of a coefficient.
    """
    mp = context()
    inexact = [each for each in (gold, answer) if has_decimals(each)]
    if not size or not inexact:
        return 0
    if symbols(gold):
        return size / 500_000
    if mp.isint(size) and not (gold.kind == "number" and gold.args[1] and gold.args[1] > 1):
        return 0
    tolerance = mp.mpf(10) ** (int(mp.floor(mp.log10(size))) - 5) / 2
    literals = [each.args[0] if each.kind == "negative" else each for each in inexact]
    if all(each.kind == "number" for each in literals):
        written = max(real(each.args[1]) for each in literals) / 2
        tolerance = min(tolerance, max(written, mp.mpf(5) / 10**7))
    return tolerance * (1 + mp.mpf(10) ** -9)


def _constant_ratio(left: Node, right: Node) -> int | None:
    """Return the sign of left/right if the quotient is the same at all points, else None."""
    names = symbols(left) | symbols(right)
    try:
        pairs = [values_of((left, right), point_of(names, index, True))[0] for index in range(3)]
        ratios = [a / b for a, b in pairs]
    except UNCOMPUTABLE:
        return None
    mp, first = context(), ratios[0]
    near = mp.mpf(10) ** (-6 if has_decimals(left) or has_decimals(right) else -25)
    if not first or not all(mp.isfinite(each) and abs(each - first) <= abs(first) * near for each in ratios):
        return None
    return 1 if mp.re(first) > 0 else -1
