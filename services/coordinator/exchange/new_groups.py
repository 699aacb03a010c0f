"""New groups enter the ledger, with their prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from services.coordinator.exchange.state import ActiveRun, Exchange
from services.coordinator.ledger.integrity import row_checksums

INSERTED_AT_ONCE = 64
"""Groups whose prompts are one parameter of a statement."""


MAX_INSERTED_CHARS = 16 << 20
"""Characters of prompts and columns after which a parameter takes no further group: SQLite takes 1 GB at most."""


def insert_groups(
    exchange: Exchange, run: ActiveRun, kind: str, groups: Iterable[tuple[int, int, object, object]]
) -> None:
    """New groups, admitted: id, place, prompt and columns of each. One statement inserts many of them: between two, another
    thread may take the interpreter.
    """
    rows: list[dict[str, object]] = []
    num_chars = 0
    for group_id, slot, prompt, columns in groups:
        prompt_json, columns_json = json.dumps(prompt), json.dumps(columns, default=str)
        row = {
            "run_id": run.run_id,
            "group_id": group_id,
            "prompt_json": prompt_json,
            "columns_json": columns_json,
        }
        rows.append({**row, "seal": row_checksums.of("prompts", row), "slot": slot})
        num_chars += len(prompt_json) + len(columns_json)
        if len(rows) == INSERTED_AT_ONCE or num_chars > MAX_INSERTED_CHARS:
            _insert(exchange, kind, rows)
            rows, num_chars = [], 0
    if rows:
        _insert(exchange, kind, rows)


def _insert(exchange: Exchange, kind: str, rows: Sequence[Mapping[str, object]]) -> None:
    as_json = json.dumps(rows)
    exchange.db.execute(
        "INSERT INTO groups (run_id, group_id, class, state, slot)"
        " SELECT json_extract(value, '$.run_id'), json_extract(value, '$.group_id'), ?, 'admitted',"
        " json_extract(value, '$.slot') FROM json_each(?)",
        (kind, as_json),
    )
    exchange.db.execute(
        "INSERT INTO prompts (run_id, group_id, prompt_json, columns_json, seal)"
        " SELECT json_extract(value, '$.run_id'), json_extract(value, '$.group_id'),"
        " json_extract(value, '$.prompt_json'), json_extract(value, '$.columns_json'), json_extract(value, '$.seal')"
        " FROM json_each(?)",
        (as_json,),
    )
