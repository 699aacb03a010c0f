"""Holds what all episodes of a run share, and what the episodes of one leased group share.

`environment.renderer`, `environment.tool_parser` and the prompts of the data set choose the rendering of a run.

The time of an episode counts only while its user code runs, not while it waits for the policy, because a loaded or dead
engine must not cut an episode off.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.chat.call_formats import CallFormat
from paceline.chat.completion_texts import text_of
from paceline.environment.hosting.pool import UserCode
from paceline.environment.life import EpisodeCounts
from paceline.environment.protocols import ConversationHost, EpisodeLease, TokenSource, TurnLog, TurnParams
from paceline.environment.rendering.family import FamilyRendering, family_of
from paceline.environment.rendering.protocol import Conversation, Rendering, TextRendering
from paceline.environment.rendering.template import TemplateRendering
from paceline.environment.transcripts import TextOf
from paceline.errors import InvalidInput
from paceline.spec import RunSpec
from paceline.spec.sections.user_code import EnvironmentSection

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Renderings:
    chat: Rendering
    text: TextRendering
    """Rendering of text prompts that do not become messages."""
    wraps_texts: bool
    """True if text prompts become user messages (`data.apply_chat_template` is `always`)."""

    def begin(self, prompt: Any) -> tuple[Rendering, Conversation]:
        """Return the rendering of a prompt of the data set, and the conversation that begins with it."""
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
                f"environment.renderer {name!r} parses tool calls itself, but environment.tool_parser is {parser!r}; set one "
                "of them to auto"
            )
        chat = FamilyRendering(tokenizer, name, kwargs)
    else:
        chat = TemplateRendering(tokenizer, kwargs, calls)
    return Renderings(chat, TextRendering(tokenizer, calls or "none"), spec.data.apply_chat_template == "always")


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
    """Holds what all episodes of a run share."""

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
        """Return the number of tokens that are left for a turn after a prompt; below 1 there is no room."""
        return self.spec.policy.max_total_sequence_length - prompt_tokens

    def no_room(self, prompt_tokens: int) -> str:
        return (
            f"the prompt of {prompt_tokens} tokens leaves no room for a turn in policy.max_total_sequence_length "
            f"{self.spec.policy.max_total_sequence_length}"
        )


@dataclass(frozen=True)
class GroupContext:
    setting: EpisodeSetting
    lease: EpisodeLease
    source: TokenSource
    turn_log: TurnLog
    code: UserCode
    conversations: ConversationHost | None

    def params(self, room: int, limit: int | None = None) -> TurnParams:
        """Return the sampling parameters of a turn, limited to `room` and `limit` tokens."""
        params = self.lease.params
        longest = min(params.max_new_tokens, room, limit or room)
        return params._replace(max_new_tokens=longest, min_new_tokens=min(params.min_new_tokens, longest))

    @property
    def row(self) -> dict[str, Any]:
        """Return the columns of the row in the data set. The prompt has two keys: `prompt` and its column's name."""
        key = self.setting.spec.data.prompt_key
        prompts = dict.fromkeys(("prompt", key), self.lease.prompt) if key else {}
        return {**prompts, **self.lease.columns}

    def conversation(self, sample: int) -> str:
        return f"{self.lease.group_id}/{sample}"


CHARS_PER_TOKEN = 64
"""Longer texts are cut to this many characters per token before counting, because encoding megabytes takes long."""


class Stopwatch:
    """Counts the seconds of user code against a limit."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._used_s = 0.0
        self._since_s: float | None = None

    @property
    def used_s(self) -> float:
        running_s = 0.0 if self._since_s is None else self._clock() - self._since_s
        return self._used_s + running_s

    @property
    def left_s(self) -> float:
        """Return the seconds that are left, not below 0."""
        return max(0.0, self.limit_s - self.used_s)

    def start(self) -> None:
        if self._since_s is None:
            self._since_s = self._clock()

    def stop(self) -> None:
        if self._since_s is not None:
            self._used_s += self._clock() - self._since_s
            self._since_s = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()


def cut_to_tokens(text: str, max_tokens: int, tokenizer: Any) -> str:
    """Return `text` cut to at most `max_tokens` tokens. A notice follows a text that was cut."""
    if len(text.encode(errors="replace")) <= max_tokens:  # a token has at least one byte
        return text
    head = text[: max_tokens * CHARS_PER_TOKEN]
    encoded = tokenizer(head, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids = encoded["input_ids"]
    if len(ids) <= max_tokens and len(head) == len(text):
        return text
    if tokenizer.is_fast:  # cut behind the last character whose tokens are all kept
        offsets = [*encoded["offset_mapping"], (len(head), len(head))]
        kept = head[: min(offsets[min(len(ids), max_tokens)][0], max(end for _, end in offsets[:max_tokens]))]
    else:
        kept = tokenizer.decode(ids[:max_tokens], skip_special_tokens=False)
    return f"{kept}\n[cut off after {max_tokens} tokens]"
