"""What all episodes of a run share, and what those of one leased group share.

Which rendering a run has: by `environment.renderer`, `environment.tool_parser` and the prompts of its data set.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.chat.call_formats import CallFormat
from paceline.chat.completion_texts import text_of
from paceline.environment.counts import EpisodeCounts
from paceline.environment.hosting.pool import UserCode
from paceline.environment.protocols import EpisodeLease, Journal, SessionHost, TokenSource, TurnParams
from paceline.environment.rendering.family import FamilyRendering, family_of
from paceline.environment.rendering.protocol import Conversation, Rendering
from paceline.environment.rendering.template import TemplateRendering
from paceline.environment.rendering.texts import TextRendering
from paceline.environment.rows import TextOf
from paceline.errors import InvalidInput
from paceline.spec import RunSpec
from paceline.spec.sections.environment import EnvironmentSection

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Renderings:
    """The renderings of a run."""

    chat: Rendering
    """Of messages."""
    text: TextRendering
    """Of text prompts without a template."""
    wraps_texts: bool
    """Text prompts are messages of the user (`data.apply_chat_template` is `always`)."""

    def begin(self, prompt: Any) -> tuple[Rendering, Conversation]:
        """Return the rendering of a data set's prompt, and the conversation that it begins."""
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
            return (self.chat if self.wraps_texts else self.text), Conversation(messages)
        return self.chat, Conversation(list(prompt))


def choose_renderings(spec: RunSpec, tokenizer: Any) -> Renderings:
    """Return the renderings of a run. Raises InvalidInput for a renderer that cannot be used."""
    environment, kwargs = spec.environment, spec.data.chat_template_kwargs
    parser = environment.tool_parser
    calls: CallFormat | None = None if parser == "auto" else parser
    name = environment.renderer
    chat: Rendering
    if name == "auto":
        chat = _automatic(spec, tokenizer, calls)
    elif name != "template":
        if calls is not None:
            raise InvalidInput(
                f"environment.renderer {name!r} reads tool calls by itself, but environment.tool_parser is {parser!r}; set one "
                "of them to auto"
            )
        chat = FamilyRendering(tokenizer, name, kwargs)
    else:
        chat = TemplateRendering(tokenizer, kwargs, calls)
    return Renderings(
        chat, TextRendering(tokenizer, calls or "none"), spec.data.apply_chat_template == "always"
    )


def _automatic(spec: RunSpec, tokenizer: Any, calls: CallFormat | None) -> Rendering:
    kwargs = spec.data.chat_template_kwargs
    name = family_of(spec.policy.tokenizer_name or spec.policy.model_name) if calls is None else ""
    if name:
        try:
            rendering = FamilyRendering(tokenizer, name, kwargs)
        except InvalidInput as error:
            log.warning("conversations are rendered by the chat template: %s", error)
        else:
            log.info("conversations are rendered by the family %r of renderers", name)
            return rendering
    return TemplateRendering(tokenizer, kwargs, calls)


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
        return self.spec.environment

    def room(self, prompt_tokens: int) -> int:
        """Return the tokens that a turn may have behind a prompt; below 1 there is no room."""
        return self.spec.policy.max_total_sequence_length - prompt_tokens

    def no_room(self, prompt_tokens: int) -> str:
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
        return f"{self.lease.group_id}/{sample}"
