"""Digests that name a batch and everything that was trained before it. The coordinator, `ledger verify` and every rank
compute them from their own records."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence


def batch_digest(groups: Sequence[sqlite3.Row]) -> str:
    """Return SHA-256 over a batch's groups in their order: id, digest and digest of the scores of each. `groups` are rows of
    the table `groups`.
    """
    content = [[group["group_id"], group["digest"], group["scores_digest"]] for group in groups]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def extend_chain(chain: str, step: int, digest: str) -> str:
    """Return the hash chain over the batches up to and including `step`."""
    return hashlib.sha256(f"{chain}/{step}/{digest}".encode()).hexdigest()
