"""RecordsService.ListAttempts: pages of the rewards of scored groups with their prompts.

Groups that were dropped because all their completions were alike are included, so the pages say how hard a prompt is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.rewards import totals
from paceline.services.coordinator.audit.reading import page_tokens
from paceline.spec import RunSpec
from paceline.v1 import records_pb2 as pb

if TYPE_CHECKING:
    from paceline.services.coordinator.ledger.ledger import Ledger

GROUPS = 1000
"""Groups of a page."""
MAX_CHARACTERS = 4 << 20
"""Characters of the prompts of a page; the group that exceeds them is the last one."""


def list_attempts(ledger: Ledger, request: pb.ListAttemptsRequest, spec: RunSpec) -> pb.ListAttemptsResponse:
    """Return a page of scored training groups of a run with this spec. Raises InvalidInput."""
    (after,) = page_tokens.read(request.page_token, 1) or (-1,)
    size = page_tokens.page_size(request.page_size, GROUPS)
    rows = ledger.db.execute(
        "SELECT g.group_id, p.prompt_json, g.rewards, g.step FROM groups g JOIN prompts p USING (run_id, group_id)"
        " WHERE g.run_id = ? AND g.group_id > ? AND g.class = 'train' AND g.rewards IS NOT NULL AND g.rewards != ''"
        " ORDER BY g.group_id LIMIT ?",
        (request.run_id, after, size + 1),
    )
    response, characters = pb.ListAttemptsResponse(), 0
    for group_id, prompt_json, rewards, step in rows:
        if len(response.attempts) == size or characters > MAX_CHARACTERS:
            response.next_page_token = page_tokens.write(response.attempts[-1].group_id)
            break
        rewards_CF = np.frombuffer(rewards, "<f4").reshape(-1, len(spec.rewards))
        response.attempts.add(
            group_id=group_id,
            prompt_json=prompt_json,
            rewards=totals(rewards_CF, spec.rewards, step or 0).tolist(),
        )
        characters += len(prompt_json)
    return response
