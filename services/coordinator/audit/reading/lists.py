"""RecordsService: books, batches and checkpoints of a run.

RecordsService.GetSpec and CompareSpecs: the values of resolved specs, what differs from the defaults and from another run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.services.coordinator.audit.reading import page_tokens
from paceline.v1 import records_pb2 as pb

if TYPE_CHECKING:
    from paceline.services.coordinator.ledger.ledger import Ledger
import json
from collections.abc import Iterator
from typing import Any

import yaml

from paceline.spec import RunSpec
from paceline.spec.keys import dotted, keys
from paceline.spec.reading import spec_to_yaml

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


Location = tuple[str | int, ...]


def get_spec(spec: RunSpec) -> pb.GetSpecResponse:
    """Return a spec with its values by key."""
    response, known = pb.GetSpecResponse(spec_yaml=spec_to_yaml(spec)), keys()
    for location, value in values(spec):
        key = known.get(dotted(location))
        default = key.default_text if key is not None else ""
        response.keys.add(
            path=".".join(map(str, location)),
            value_json=json.dumps(value),
            default=default,
            differs=not _is_default(value, default),
            description=key.description if key is not None else "",
            type=key.type_text if key is not None else "",
        )
    return response


def compare_specs(spec: RunSpec, other: RunSpec) -> pb.CompareSpecsResponse:
    """Return the values that differ."""
    ours, theirs = dict(values(spec)), dict(values(other))
    response = pb.CompareSpecsResponse()
    for location in dict.fromkeys([*ours, *theirs]):
        if location in ours and location in theirs and ours[location] == theirs[location]:
            continue
        response.differences.add(
            path=".".join(map(str, location)),
            value_json=json.dumps(ours[location]) if location in ours else "",
            other_json=json.dumps(theirs[location]) if location in theirs else "",
        )
    return response


def values(spec: RunSpec) -> Iterator[tuple[Location, Any]]:
    """Yield every value of a spec with its location: a section's keys one by one, all else whole."""
    yield from _below(spec.model_dump(mode="json"), ())


def _below(tree: Any, location: Location) -> Iterator[tuple[Location, Any]]:
    key = keys().get(dotted(location)) if location else None
    is_section = (
        not location or isinstance(location[-1], int) or (key is not None and key.section is not None)
    )
    if isinstance(tree, dict) and is_section:
        for name, value in tree.items():
            yield from _below(value, (*location, name))
    elif isinstance(tree, list) and key is not None and key.section is not None:
        for index, value in enumerate(tree):
            yield from _below(value, (*location, index))
    else:
        yield location, tree


def _is_default(value: Any, default: str) -> bool:
    if default == "required":
        return False
    try:
        return bool(yaml.safe_load(default) == value)
    except yaml.YAMLError:
        return False
