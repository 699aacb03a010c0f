"""RecordsService: books, batches and checkpoints of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.services.coordinator.audit.reading import page_tokens
from paceline.v1 import records_pb2 as pb

if TYPE_CHECKING:
    from paceline.services.coordinator.ledger.ledger import Ledger

BATCHES = 1000
CHECKPOINTS = 1000


def get_books(ledger: Ledger, request: pb.GetBooksRequest) -> pb.GetBooksResponse:
    """Return the token accounting of a run. Raises NotFound."""
    ledger.run(request.run_id)
    books = ledger.token_books(request.run_id)
    reasons = {
        name.removeprefix("dropped:"): tokens for name, tokens in books.items() if name.startswith("dropped:")
    }
    return pb.GetBooksResponse(
        generated=books["generated"],
        trained=books["trained"],
        dropped=books["dropped"],
        live=books["live"],
        wasted=books["wasted"],
        dropped_by_reason=reasons,
        groups=ledger.groups_by_state(request.run_id),
        failures=ledger.failures(request.run_id),
        balanced=books["generated"] == books["trained"] + books["dropped"] + books["live"],
    )


def list_batches(ledger: Ledger, request: pb.ListBatchesRequest) -> pb.ListBatchesResponse:
    """Return a page of batches. Raises NotFound, InvalidInput."""
    ledger.run(request.run_id)
    size, key = page_tokens.page_size(request.page_size, BATCHES), page_tokens.read(request.page_token, 1)
    if request.newest_first:
        bound, order = (key[0] if key else page_tokens.LARGEST), "step < ? ORDER BY step DESC"
    else:
        bound = key[0] if key else min(request.from_step, page_tokens.LARGEST) - 1
        order = "step > ? ORDER BY step"
    rows = ledger.db.execute(
        "SELECT step, digest, chain, trained, revision, (SELECT COUNT(*) FROM groups INDEXED BY step_groups"
        " WHERE groups.run_id = batches.run_id AND groups.step = batches.step AND groups.step IS NOT NULL) AS num_groups"
        f" FROM batches WHERE run_id = ? AND {order} LIMIT ?",
        (request.run_id, bound, size + 1),
    ).fetchall()
    response = pb.ListBatchesResponse()
    for row in rows[:size]:
        response.batches.add(
            step=row["step"],
            digest=row["digest"],
            chain=row["chain"],
            trained=bool(row["trained"]),
            revision=row["revision"],
            num_groups=row["num_groups"],
        )
    if len(rows) > size:
        response.next_page_token = page_tokens.write(rows[size - 1]["step"])
    return response


def list_checkpoints(ledger: Ledger, request: pb.ListCheckpointsRequest) -> pb.ListCheckpointsResponse:
    """Return the checkpoints of a run. Raises NotFound."""
    response = pb.ListCheckpointsResponse(export_path=ledger.export_path(request.run_id))
    for checkpoint in ledger.checkpoints.kept(request.run_id)[-CHECKPOINTS:]:
        response.checkpoints.add(
            session=checkpoint.session,
            step=checkpoint.step,
            path=checkpoint.path,
            sha256=checkpoint.sha256,
            chain=checkpoint.chain,
            damaged=checkpoint.damaged,
        )
    return response
