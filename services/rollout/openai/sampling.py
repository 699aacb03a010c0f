"""The generation of one choice of an answer: from a request to text, token by token for a stream.

A choice of `<run>@<version>` has tokens of that version alone. The engine takes new weights while it generates, so a
request may outlive its version; then it ends with VersionGone and none of its tokens count.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from paceline.chat.answer_reader import AnswerPart, AnswerReader, calls_of, content_of, joined
from paceline.chat.choices import Choice, Delta, cut_spans, model_name
from paceline.chat.messages import Unsupported
from paceline.chat.preparing import PreparedChat, prepare_chat
from paceline.chat.rendering import ChatTemplate
from paceline.chat.requests import GREEDY, Ask, ChatAsk
from paceline.chat.text_stream import TextStream
from paceline.data.tokens import encode_prompt
from paceline.errors import InvalidInput, NotFound, Unavailable
from paceline.groups import Completion, IntArray, Version
from paceline.spec import RunSpec
from rollout.engine import MAX_ID, Engine, GenerationRequest, SamplingParams

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


@dataclass
class Sampler:
    """Generator of choice number `index` of an answer. `on_delta` gets each delta; None waits for the end."""

    served: Served
    prompt_ids: IntArray
    params: SamplingParams
    request_id: str
    seed: int
    index: int
    reader: AnswerReader
    """Reader of the text, new."""
    stop: tuple[str, ...] = ()
    pinned: Version | None = None
    on_delta: Callable[[Delta], None] | None = None
    _parts: list[AnswerPart] = field(default_factory=list)
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
        self._tell(completion, [*self.reader.push(tail), *self.reader.finish()], num_tokens, last=True)
        return Choice(
            self.index,
            self.prompt_ids,
            joined(self._parts),
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
        if parts := self.reader.push(text):
            self._tell(completion, parts, self._stream.num_tokens)

    def _tell(
        self, completion: Completion, parts: list[AnswerPart], num_tokens: int, *, last: bool = False
    ) -> None:
        """Hand parts on, with the tokens since the last ones: those of text that was held back come with what it became."""
        if self.on_delta is not None and (parts or (last and num_tokens > self._told)):
            new = slice(self._told, num_tokens)
            self.on_delta(
                Delta(
                    self.index,
                    parts,
                    completion.token_ids[new].tolist(),
                    completion.logprobs[new].tolist(),
                    len(content_of(self._parts)),
                    len(calls_of(self._parts)),
                    cut_spans(completion.spans, num_tokens),
                )
            )
        self._told = num_tokens
        self._parts = joined([*self._parts, *parts])

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


def encode_text(served: Served, prompt: str | list[int]) -> IntArray:
    """Return the [P] tokens of a prompt of `/v1/completions`, a text or ids: it never goes through the chat template.

    Raises InvalidInput for ids or a text that no sequence could hold, and as `encode_prompt` does.
    """
    limit = served.spec.policy.max_total_sequence_length
    if isinstance(prompt, list):
        if len(prompt) > limit or max(prompt) > MAX_ID:
            raise InvalidInput(
                f"a prompt of {len(prompt)} token ids up to {max(prompt)}: {limit} ids are the most"
            )
        return np.array(prompt, np.int32)
    check_size(served, len(prompt))
    return encode_prompt(served.tokenizer, prompt, "never")


def prepare(served: Served, ask: ChatAsk) -> PreparedChat:
    """Return a chat made ready, with the run's arguments of the template and its way to write calls.

    Raises InvalidInput for a text that no sequence could hold, and as `prepare_chat` does.
    """
    spec = served.spec
    try:
        check_size(served, len(json.dumps([ask.rendered(), ask.tools])))
        template = ChatTemplate(served.tokenizer)
        return prepare_chat(ask, template, spec.data.chat_template_kwargs, spec.environment.tool_parser)
    except RecursionError:
        raise InvalidInput("messages or tools are nested too deeply") from None


def check_size(served: Served, size: int) -> None:
    """Raises InvalidInput for a prompt of `size` characters if no sequence could hold it."""
    limit = served.spec.policy.max_total_sequence_length
    if size > MAX_CHARS_PER_TOKEN * limit:
        raise InvalidInput(
            f"a prompt of {size} characters cannot be {limit} tokens, as many as prompt and completion may have"
        )


def sampling_params(ask: Ask, default: SamplingParams, limit: int) -> SamplingParams:
    """Return the parameters of a request, with `default` for missing fields. Raises InvalidInput beyond `limit` tokens in
    all."""
    most = ask.max_tokens or default.max_new_tokens
    if most > limit:
        raise Unsupported(
            f"max_tokens {most} exceeds {limit}, the tokens of prompt and completion together", "max_tokens"
        )
    temperature = default.temperature if ask.temperature is None else max(ask.temperature, GREEDY)
    return SamplingParams(
        max_new_tokens=most,
        min_new_tokens=min(default.min_new_tokens, most) if ask.min_tokens is None else ask.min_tokens,
        temperature=temperature,
        top_p=default.top_p if ask.top_p is None else ask.top_p,
        top_k=default.top_k if ask.top_k is None else max(ask.top_k, 0),
        stop_token_ids=tuple(dict.fromkeys((*default.stop_token_ids, *(ask.stop_token_ids or ())))),
        min_p=default.min_p if ask.min_p is None else ask.min_p,
        repetition_penalty=ask.repetition_penalty or default.repetition_penalty,
    )


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """Return the text of tokens, without special ones."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))
