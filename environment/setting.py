"""What all episodes of a run share, and what those of one leased group share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.chat.completion_texts import text_of
from paceline.environment.counts import EpisodeCounts
from paceline.environment.hosting.pool import UserCode
from paceline.environment.protocols import EpisodeLease, Journal, SessionHost, TokenSource, TurnParams
from paceline.environment.rendering.choosing import Renderings, choose_renderings
from paceline.environment.rows import TextOf
from paceline.spec import RunSpec
from paceline.spec.sections.environment import EnvironmentSection


@dataclass(frozen=True)
class EpisodeSetting:
    """What all episodes of a run share."""

    spec: RunSpec
    tokenizer: Any
    renderings: Renderings
    text_of: TextOf
    counts: EpisodeCounts = field(default_factory=EpisodeCounts)

    @classmethod
    def of(cls, spec: RunSpec, tokenizer: Any) -> EpisodeSetting:
        """Return the setting of a run. Raises InvalidInput for a renderer that cannot be used."""
        return cls(spec, tokenizer, choose_renderings(spec, tokenizer), partial(text_of, tokenizer))

    @property
    def environment(self) -> EnvironmentSection:
        """Return the spec's section."""
        return self.spec.environment

    def room(self, prompt_tokens: int) -> int:
        """Return the tokens that a turn may have behind a prompt; below 1 there is no room."""
        return self.spec.policy.max_total_sequence_length - prompt_tokens

    def no_room(self, prompt_tokens: int) -> str:
        """Return the sentence for a prompt without room."""
        return (
            f"the prompt of {prompt_tokens} tokens leaves no room for a turn in policy.max_total_sequence_length "
            f"{self.spec.policy.max_total_sequence_length}"
        )


@dataclass(frozen=True)
class GroupContext:
    """What the episodes of one leased group share."""

    setting: EpisodeSetting
    lease: EpisodeLease
    source: TokenSource
    journal: Journal
    code: UserCode
    sessions: SessionHost | None

    def params(self, room: int, limit: int | None = None) -> TurnParams:
        """Return the sampling parameters of a turn with so much room, and a limit of its own."""
        params = self.lease.params
        longest = min(params.max_new_tokens, room, limit or room)
        return params._replace(max_new_tokens=longest, min_new_tokens=min(params.min_new_tokens, longest))

    @property
    def row(self) -> dict[str, Any]:
        """Return the row of the data set: its prompt, under its own name too, and its other columns."""
        key = self.setting.spec.data.prompt_key
        prompts = dict.fromkeys(("prompt", key), self.lease.prompt) if key else {}
        return {**prompts, **self.lease.columns}

    def session(self, sample: int) -> str:
        """Return the name of a sample's session."""
        return f"{self.lease.group_id}/{sample}"
