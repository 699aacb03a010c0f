"""Digests that name a batch and everything that was trained before it. The coordinator, `ledger verify` and every rank
compute them from their own records."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence


def batch_digest(groups: Sequence[sqlite3.Row], *, with_scores: bool) -> str:
    """Return SHA-256 over a batch's groups in their order: id and digest of each, and `with_scores` also the digest of
    its scores.

    `groups` are rows of the table `groups`. Batches that were fixed before ledgers had digests of scores are without
    them.
    """
    columns = ("group_id", "digest", "scores_digest") if with_scores else ("group_id", "digest")
    content = [[group[column] for column in columns] for group in groups]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def extend_chain(chain: str, step: int, digest: str) -> str:
    """Return the hash chain over the batches up to and including `step`."""
    return hashlib.sha256(f"{chain}/{step}/{digest}".encode()).hexdigest()
