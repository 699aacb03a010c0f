"""RecordsService.GetTokenStatistics: what the learner computed of the tokens of a step's groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from paceline.services.coordinator.audit.reading import page_tokens
from paceline.services.coordinator.reporting.token_files import MAX_REPORT_BYTES, path_of
from paceline.v1 import records_pb2 as pb
from paceline.v1 import worker_pb2

if TYPE_CHECKING:
    from paceline.services.coordinator.ledger.ledger import Ledger


def get_token_statistics(
    ledger: Ledger, request: pb.GetTokenStatisticsRequest
) -> pb.GetTokenStatisticsResponse:
    """Return the numbers of a step; none where nothing is kept, or the file is damaged. Raises NotFound: no such run."""
    ledger.run(request.run_id)
    response = pb.GetTokenStatisticsResponse()
    report = worker_pb2.TokenStatistics()
    try:
        path = path_of(ledger.path.parent, request.run_id, min(request.step, page_tokens.LARGEST))
        with path.open("rb") as file:
            report.ParseFromString(file.read(MAX_REPORT_BYTES + 1))
    except (OSError, DecodeError):
        return response
    for each in sorted(report.completions, key=lambda one: (one.group_id, one.index)):
        if not request.HasField("group_id") or each.group_id == request.group_id:
            response.completions.add(
                group_id=each.group_id, index=each.index, logprobs=each.logprobs, entropies=each.entropies
            )
    return response
