"""Generates one choice of an answer: from a request to text, token by token for a stream. A choice of `<run>@<version>`
has only tokens of that version: a request that outlives its version ends with VersionGone, and none of its tokens
count."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from paceline.chat.answer_reader import AnswerPart, AnswerReader, begun_chars, calls_of, content_of, joined
from paceline.chat.completion_texts import completion_text, text_of
from paceline.errors import NotFound, Unavailable
from paceline.groups import Completion, IntArray, Version, cut_spans
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams
from paceline.rollout.stop_strings import StopStrings, cut
from paceline.services.openai.frames import Choice, Delta, Echo, model_name
from paceline.spec import RunSpec

UNFINISHED = "\ufffd"
"""Character that a decoder writes for bytes that do not form a character (yet)."""


class TextStream:
    """The text of one completion. `decode` turns token ids into text; `stop` are strings that end it. The promise: the
    joined results of `push` and `finish` are the text of all tokens decoded at once, up to the first stop string,
    and no returned text changes later. So a possible beginning of a stop string, or of a character with missing
    bytes, is kept back."""

    def __init__(self, decode: Callable[[list[int]], str], stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        """True after a stop string; later tokens are ignored."""
        self.num_tokens = 0
        """Number of tokens read, including those that completed the stop string."""
        self._decode = decode
        self._stop = stop
        self._window: list[int] = []
        self._read = 0
        self._held = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Read tokens and return the text that is final by now."""
        out = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            self._window.append(token_id)
            out += self._release(self._new_text())
        return out

    def finish(self) -> str:
        """Return the rest of the text, because no more tokens will come."""
        if self.stopped:
            return ""
        out = self._release(self._decode(self._window)[len(self._decode(self._window[: self._read])) :])
        if not self.stopped:
            out, self._held = out + self._held, ""
        return out

    def _new_text(self) -> str:
        """Return the last token's text, decoded with the tokens before it, because a decoder may join neighbours."""
        before, now = self._decode(self._window[: self._read]), self._decode(self._window)
        if len(now) <= len(before) or now.endswith(UNFINISHED):
            return ""
        self._window, self._read = self._window[self._read :], len(self._window) - self._read
        return now[len(before) :]

    def _release(self, new: str) -> str:
        """Return the kept text with `new`, up to a stop string or to a possible beginning of one."""
        text, self._held = self._held + new, ""
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = max((begun_chars(text, stop) for stop in self._stop), default=0)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text


class Served(Protocol):
    """A run that a worker samples for; `paceline.services.rollout.run.RolloutRun` implements it."""

    run_id: str
    spec: RunSpec
    engine: Engine
    tokenizer: Any
    params: SamplingParams

    async def generate_external(self, request: GenerationRequest) -> Completion:
        """Generate a completion outside of all leases. Raises the errors of `Engine.generate`."""


class VersionGone(NotFound):
    """The worker does not hold the requested version."""


@dataclass
class Sampler:
    """Generates choice number `index` of an answer. `on_delta` gets each delta; None if the answer is not streamed."""

    served: Served
    prompt_ids: IntArray
    params: SamplingParams
    request_id: str
    seed: int
    index: int
    reader: AnswerReader
    """Reader that has not read any text."""
    stop: tuple[str, ...] = ()
    pinned: Version | None = None
    in_reasoning: bool = False
    """True if the chat template opened the reasoning."""
    on_delta: Callable[[Delta], None] | None = None
    echo: bool = False
    """True if the answer's text begins with the prompt."""
    scores_prompt: bool = False
    """True if, with `echo`, the prompt's log-probabilities are computed."""
    _parts: list[AnswerPart] = field(default_factory=list)
    _told: int = 0
    _stream: TextStream = field(init=False)

    async def run(self) -> Choice:
        """Generate the choice. Raises VersionGone, Unavailable (a run that ended, a worker that leaves), InvalidInput."""
        self._stream = TextStream(partial(text_of, self.served.tokenizer), self.stop)
        watched = self.on_delta is not None or bool(self.stop) or self.pinned is not None
        request = GenerationRequest(
            self.request_id, self.prompt_ids, self.params, self.seed, on_progress=self._progress if watched else None
        )
        completion = await self.served.generate_external(request)
        echo = await self._echo() if self.echo else None
        if self._gone(completion):
            raise self._other_version()
        ended = completion.finish_reason == "stop"
        # The token that ends a completion is not part of its text, special or not.
        self._take(completion, len(completion.token_ids) - ended)
        tail = self._stream.finish()
        num_tokens = self._stream.num_tokens
        if not self._stream.stopped:
            num_tokens = len(completion.token_ids)
            if completion.finish_reason == "abort":
                raise Unavailable(
                    f"the worker stopped serving {self.served.run_id} during the request; try another worker, "
                    "or try later"
                )
        self._tell(completion, [*self.reader.push(tail), *self.reader.finish()], num_tokens, last=True)
        if self._stream.stopped:
            completion = cut(completion, num_tokens)
        return Choice(
            self.index,
            self.prompt_ids,
            joined(self._parts),
            completion.token_ids.tolist(),
            completion.logprobs.tolist(),
            completion.spans,
            completion.finish_reason,
            self._text(completion),
            echo,
        )

    def _text(self, completion: Completion) -> str:
        stop = StopStrings.of(self.served.tokenizer, self.stop)
        end_of = stop.end if stop is not None else None
        return completion_text(self.served.tokenizer, completion, end_of, in_reasoning=self.in_reasoning)

    async def _echo(self) -> Echo:
        if not self.scores_prompt:
            return Echo()
        scored = await self.served.engine.prompt_logprobs(self.prompt_ids)
        if self.pinned is not None and scored.version != self.pinned:
            raise self._other_version()
        return Echo(
            scored.logprobs.tolist(), scored.top_ids.tolist(), scored.top_logprobs.tolist(), tuple(scored.version)
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

    def _tell(self, completion: Completion, parts: list[AnswerPart], num_tokens: int, *, last: bool = False) -> None:
        """Report parts with the tokens since the last report; tokens of text that was kept back come with that text."""
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

    def _other_version(self) -> VersionGone:
        return VersionGone(
            f"the worker received new weights during the request; the worker serves {served_names(self.served)} now. "
            f"Ask for {self.served.run_id!r} to let a completion continue through updates"
        )


def resolve(served: Served, model: str) -> Version | None:
    """Return the version that `model` pins; None for the run's name alone. Raises VersionGone for any other name."""
    version = served.engine.version
    if version is None:
        raise no_weights(served)
    if model == served.run_id:
        return None
    if model == model_name(served.run_id, version):
        return version
    raise VersionGone(f"this worker does not serve {model!r}; it serves {served_names(served)}")


def no_weights(served: Served) -> Unavailable:
    return Unavailable(f"the worker holds no weights of {served.run_id} yet; try again in a moment")


def served_names(served: Served) -> str:
    """Return the names that can be requested now, for messages."""
    version = served.engine.version
    return f"{served.run_id!r}" + (f" and {model_name(served.run_id, version)!r}" if version else "")


def decode_all(tokenizer: Any, token_ids: list[int]) -> str:
    """Return the text of tokens, including special tokens."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=False))
