"""Ledgers on disk in both forms: plain, and encrypted with a storage key that the test's environment has."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from paceline.encryption.storage_key import storage_key
from paceline.services.coordinator.ledger import database

KEY_TEXT = "0123456789abcdef" * 4
OTHER_KEY_TEXT = "fedcba9876543210" * 4

both_forms = pytest.mark.parametrize("at_rest", ["plain", "encrypted"], indirect=True)
"""Runs a test with a plain ledger and with an encrypted one."""


def opened(path: Path) -> sqlite3.Connection:
    """A connection to a ledger as another program with its key would have one: it knows nothing of checksums."""
    return database.connect(path, storage_key())
