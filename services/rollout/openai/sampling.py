"""The generation of one choice of an answer: from a request to text, token by token for a stream.

A choice of `<run>@<version>` has tokens of that version alone. The engine takes new weights while it generates, so a
request may outlive its version; then it ends with VersionGone and none of its tokens count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from paceline.chat.rendering import ChatTemplate
from paceline.data.tokens import NO_KWARGS, encode_prompt
from paceline.errors import InvalidInput, NotFound, Unavailable
from paceline.groups import Completion, IntArray, Version, VersionSpan
from paceline.spec import RunSpec
from rollout.engine import MAX_ID, Engine, GenerationRequest, SamplingParams
from services.rollout.openai.text import TextStream

MAX_CHARS_PER_TOKEN = 64
"""Limit on a prompt's characters for each token of the longest sequence; a longer prompt is not even tokenized."""


class Served(Protocol):
    """A run that a worker samples for; `services.rollout.run.RolloutRun` implements it."""

    run_id: str
    spec: RunSpec
    engine: Engine
    tokenizer: Any
    params: SamplingParams

    async def generate_external(self, request: GenerationRequest) -> Completion:
        """Generate a completion outside of all leases. Raises the errors of `Engine.generate`."""


class VersionGone(NotFound):
    """The requested version is not the one that the worker holds."""


@dataclass(frozen=True)
class Choice:
    """A finished completion, cut at its stop string if it met one."""

    index: int
    prompt_ids: IntArray
    text: str
    token_ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish_reason: str


@dataclass(frozen=True)
class Delta:
    """New text and tokens since the last delta of the same choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    offset: int
    """Characters before `text`."""
    spans: tuple[VersionSpan, ...]
    """Spans of the whole choice so far."""


@dataclass
class Sampler:
    """Generator of choice number `index` of an answer. `on_delta` gets each delta; None waits for the end."""

    served: Served
    prompt_ids: IntArray
    params: SamplingParams
    request_id: str
    seed: int
    index: int
    stop: tuple[str, ...] = ()
    pinned: Version | None = None
    on_delta: Callable[[Delta], None] | None = None
    _text: str = ""
    _told: int = 0
    _stream: TextStream = field(init=False)

    async def run(self) -> Choice:
        """Generate the choice. Raises VersionGone, Unavailable (a run that ended, a worker that leaves), InvalidInput."""
        self._stream = TextStream(lambda ids: decode(self.served.tokenizer, ids), self.stop)
        watched = self.on_delta is not None or bool(self.stop) or self.pinned is not None
        request = GenerationRequest(
            self.request_id,
            self.prompt_ids,
            self.params,
            self.seed,
            on_progress=self._progress if watched else None,
        )
        completion = await self.served.generate_external(request)
        self._refuse_other_versions(completion)
        ended = completion.finish_reason == "stop"
        # The token that ends a completion is not part of its text, special or not.
        self._take(completion, len(completion.token_ids) - ended)
        tail = self._stream.finish()
        num_tokens = self._stream.num_tokens
        if not self._stream.stopped:
            num_tokens = len(completion.token_ids)
            if completion.finish_reason == "abort":
                raise Unavailable(
                    f"the worker stopped serving {self.served.run_id} while it generated; ask another or later"
                )
        self._tell(completion, tail, num_tokens)
        return Choice(
            self.index,
            self.prompt_ids,
            self._text,
            completion.token_ids[:num_tokens].tolist(),
            completion.logprobs[:num_tokens].tolist(),
            cut_spans(completion.spans, num_tokens),
            "stop" if self._stream.stopped else completion.finish_reason,
        )

    def _progress(self, completion: Completion) -> None:
        if self._stream.stopped or self._gone(completion):
            self.served.engine.abort(self.request_id)
            return
        if np.isfinite(completion.logprobs).all():  # otherwise the engine ends the request with an error
            self._take(completion, len(completion.token_ids))
        if self._stream.stopped:
            self.served.engine.abort(self.request_id)

    def _take(self, completion: Completion, num_tokens: int) -> None:
        text = self._stream.push(completion.token_ids[self._stream.num_tokens : num_tokens].tolist())
        if text:
            self._tell(completion, text, self._stream.num_tokens)

    def _tell(self, completion: Completion, text: str, num_tokens: int) -> None:
        if self.on_delta is not None and (text or num_tokens > self._told):
            new = slice(self._told, num_tokens)
            self.on_delta(
                Delta(
                    self.index,
                    text,
                    completion.token_ids[new].tolist(),
                    completion.logprobs[new].tolist(),
                    len(self._text),
                    cut_spans(completion.spans, num_tokens),
                )
            )
        self._told = num_tokens
        self._text += text

    def _gone(self, completion: Completion) -> bool:
        pinned = self.pinned
        return pinned is not None and any(span[:2] != tuple(pinned) for span in completion.spans)

    def _refuse_other_versions(self, completion: Completion) -> None:
        if self._gone(completion):
            assert self.pinned is not None
            raise VersionGone(
                f"the worker took new weights while it generated; it serves {served_names(self.served)} now. "
                f"Ask for {self.served.run_id!r} to let a completion live through updates"
            )


def resolve(served: Served, model: str) -> Version | None:
    """Return the version that `model` pins; None for the run's name alone. Raises VersionGone for any other name."""
    version = served.engine.version
    if version is None:
        raise Unavailable(f"the worker holds no weights of {served.run_id} yet; try again in a moment")
    if model == served.run_id:
        return None
    if model == model_name(served.run_id, version):
        return version
    raise VersionGone(f"this worker does not serve {model!r}; it serves {served_names(served)}")


def served_names(served: Served) -> str:
    """Return the names that can be requested now, for messages."""
    version = served.engine.version
    return f"{served.run_id!r}" + (f" and {model_name(served.run_id, version)!r}" if version else "")


def encode(
    served: Served, prompt: Any, *, chat: bool, template_kwargs: Mapping[str, Any] = NO_KWARGS
) -> IntArray:
    """Return the [P] tokens of one prompt. A chat goes through the chat template, with the run's arguments and those of
    the request; a text of `/v1/completions` never does.

    Raises InvalidInput for ids or a text that no sequence could hold, for a field of a message that the template does
    not render, and as `encode_prompt` does.
    """
    limit = served.spec.policy.max_total_sequence_length
    if isinstance(prompt, list) and not chat:
        if len(prompt) > limit or max(prompt) > MAX_ID:
            raise InvalidInput(
                f"a prompt of {len(prompt)} token ids up to {max(prompt)}: {limit} ids are the most"
            )
        return np.array(prompt, np.int32)
    size = sum(len(message["content"]) for message in prompt) if chat else len(prompt)
    if size > MAX_CHARS_PER_TOKEN * limit:
        raise InvalidInput(
            f"a prompt of {size} characters cannot be {limit} tokens, as many as prompt and completion may have"
        )
    kwargs = {**served.spec.data.chat_template_kwargs, **template_kwargs}
    if chat:
        return ChatTemplate(served.tokenizer).encode(prompt, template_kwargs=kwargs)
    return encode_prompt(served.tokenizer, prompt, "never", kwargs)


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """Return the text of tokens, without special ones."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def version_name(version: tuple[int, ...]) -> str:
    """Return `<session>.<step>`."""
    return f"{version[0]}.{version[1]}"


def model_name(run_id: str, version: tuple[int, ...]) -> str:
    """Return `<run>@<session>.<step>`."""
    return f"{run_id}@{version_name(version)}"


def cut_spans(spans: tuple[VersionSpan, ...], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return the `spans` of the first `num_tokens` tokens."""
    return tuple(
        VersionSpan(s.session, s.step, s.start, min(s.end, num_tokens)) for s in spans if s.start < num_tokens
    )
