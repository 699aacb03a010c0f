"""Seeds of turns: the same whenever a turn is asked for again, another one in each life of a sample."""

from __future__ import annotations

import hashlib


def turn_seed(group_seed: int, sample: int, life: int, turn: int) -> int:
    """Return the seed, of 63 bits, of a turn of a sample's life."""
    digest = hashlib.sha256(f"{group_seed}/{sample}/{life}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
