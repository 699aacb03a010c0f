"""What hostile files are: changes of a file's bytes and of its values, and what is no file at all. A seed makes the same again."""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 8 << 20

INSERTIONS = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc3\x28", b"\r", b"[" * 20_000, b'{"a":' * 20_000, b"9" * 5000, b"NaN", b"Infinity",
    b"-1", b"1e999", b"null", b"true", b'""', b"[]", b"{}", b"&a [*a]", b"<<: *a", b"!!python/object:x", b"\n\n", b",", b'"', b"'",
    b"\\u0000", b"\\ud800", b"A" * 100_000, b"%s%n", b"../../x", b"=", b"- " * 3000, b"? " * 3000, b"\t",
)  # fmt: skip
VALUES = (
    None,
    True,
    -1,
    0,
    2**70,
    -(2**63),
    1e308,
    "",
    "x" * 10_000,
    "\x00",
    "\ud800",
    [],
    {},
    [[[]]],
    {"a": {}},
    "NaN",
)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


OBJECTS: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a loop of links": lambda path: path.symlink_to(path.name),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a full device": lambda path: path.symlink_to("/dev/full"),
}
"""What may be in the place of a file. The hole of a terabyte is only for files of services, which bound what they read."""


def changed(content: bytes, dice: random.Random) -> bytes:
    """Return the content with a few changes: bits, cuts, repetitions, insertions."""
    made = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        place = dice.randrange(len(made) + 1)
        match dice.randrange(6):
            case 0:
                for _ in range(dice.randrange(1, 9)):
                    if made:
                        made[dice.randrange(len(made))] ^= 1 << dice.randrange(8)
            case 1:
                del made[place:]
            case 2:
                end = dice.randrange(place, len(made) + 1)
                del made[place : min(end, place + 200)]
            case 3:
                end = min(len(made), place + dice.randrange(200))
                made[place:place] = made[place:end] * dice.choice((1, 2, 100))
            case 4:
                made[place:place] = dice.choice(INSERTIONS)
            case _:
                end = min(len(made), place + dice.randrange(1, 20))
                made[place:end] = dice.choice(INSERTIONS)
    return bytes(made[:MAX_FILE_BYTES])


def changed_value(value: Any, dice: random.Random) -> Any:
    """Return a JSON value with one part replaced, removed or added."""
    value = copy.deepcopy(value)
    parent, key = _place(value, dice)
    if parent is None:
        return dice.choice(VALUES)
    match dice.randrange(4):
        case 0 if isinstance(parent, dict):
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[dice.choice(("x", "", "\x00", "a.b"))] = dice.choice(VALUES)
        case 2 if isinstance(parent, list):
            parent[:] = parent * dice.choice((0, 2, 50))
        case _:
            parent[key] = dice.choice(VALUES)
    return value


def _place(value: Any, dice: random.Random) -> tuple[Any, Any]:
    """Return a part of a value and the key or index of one of its parts; None for a value without any."""
    parent, key = None, None
    while isinstance(value, dict | list) and value and (parent is None or dice.random() < 0.7):
        parent, key = value, dice.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        value = value[key]
    return parent, key


def put_back(path: Path, content: bytes) -> None:
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
