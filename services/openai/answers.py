"""Answers in the shapes of the OpenAI API, for chat and text, whole and as chunks of a stream. Each choice has an
additional field `versions`, a list of [session, step, start, end): the weights of each range of tokens. `model` names
the newest of these versions, and `system_fingerprint` names all of them, oldest first. A whole choice has `completion`
if reward functions read more than its content: reasoning, calls or the stop string."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from paceline.chat.answer_reader import AnswerPart, TextPart
from paceline.chat.call_formats import ToolCall
from paceline.chat.messages import Json
from paceline.groups import Version, VersionSpan
from paceline.services.openai.frames import Choice, Delta, Echo, Event, Frame, model_name, ranges, usage, version_name
from paceline.services.openai.requests import ChatAsk, CompletionAsk


class Answer(Frame):
    """The answer to a chat or a completion. `decode` turns token ids into text."""

    def __init__(
        self,
        answer_id: str,
        ask: ChatAsk | CompletionAsk,
        run_id: str,
        at_first: Version,
        decode: Callable[[list[int]], str],
    ) -> None:
        super().__init__(answer_id, run_id, at_first)
        self._chat = isinstance(ask, ChatAsk)
        self._logprobs, self._token_ids = ask.wants_logprobs, bool(ask.return_token_ids)
        self._top_logprobs = isinstance(ask, CompletionAsk) and ask.logprobs == 1
        self._include_usage, self._decode = ask.include_usage, decode
        self._versions: set[tuple[int, int]] = set()

    def whole(self, choices: Sequence[Choice]) -> Json:
        entries = []
        for choice in choices:
            self._note(choice.spans)
            content = {"message": message_of(choice, self._id)} if self._chat else {"text": choice.content}
            entry = self._choice(choice, content, 0, reason_of(choice) if self._chat else choice.finish_reason)
            entry["versions"] = ranges(choice.spans)
            if choice.text != choice.content:
                entry["completion"] = choice.text
            if self._token_ids:
                entry["prompt_token_ids"] = choice.prompt_ids.tolist()
            if choice.echo is not None:
                self._put_before(entry, choice, choice.echo)
            entries.append(entry)
        return self._frame("chat.completion" if self._chat else "text_completion", entries) | {"usage": usage(choices)}

    def begin(self, num_choices: int) -> list[Event]:
        """Return the first chunk of each choice of a chat, which names the role."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(num_choices if self._chat else 0)
        ]

    def add(self, delta: Delta) -> list[Event]:
        self._note(delta.spans)
        content: Json = {"delta": self._delta(delta)} if self._chat else {"text": _content(delta.parts)}
        return [self._event(self._choice(delta, content, delta.offset, None))]

    def end(self, choice: Choice) -> list[Event]:
        """Return the last chunk of a choice, with its finish reason and its versions."""
        self._note(choice.spans)
        content: Json = {"delta": {}} if self._chat else {"text": ""}
        reason = reason_of(choice) if self._chat else choice.finish_reason
        entry = {"index": choice.index, **content, "logprobs": None, "finish_reason": reason}
        return [self._event(entry | {"versions": ranges(choice.spans)})]

    def finish(self, choices: Sequence[Choice]) -> list[Event]:
        """Return the chunk of `stream_options.include_usage`, if that is set."""
        if not self._include_usage:
            return []
        return [Event(self._frame(self._chunk_kind, []) | {"usage": usage(choices)})]

    def _event(self, choice: Json) -> Event:
        return Event(self._frame(self._chunk_kind, [choice]))

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _note(self, spans: Iterable[VersionSpan]) -> None:
        self._versions.update((span.session, span.step) for span in spans)

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        versions: list[tuple[int, ...]] = [*sorted(self._versions)] or [self._at_first]
        return {
            "id": self._id,
            "object": kind,
            "created": self._created_s,
            "model": model_name(self._run_id, versions[-1]),
            "system_fingerprint": "+".join(version_name(version) for version in versions),
            "choices": choices,
        }

    def _delta(self, delta: Delta) -> Json:
        fields: Json = {}
        if text := _content(delta.parts):
            fields["content"] = text
        if reasoning := _content(delta.parts, reasoning=True):
            fields["reasoning_content"] = reasoning
        calls = [part for part in delta.parts if isinstance(part, ToolCall)]
        if calls:
            fields["tool_calls"] = [
                {"index": number, **_call(call, self._id, delta.index, number)}
                for number, call in enumerate(calls, delta.num_calls)
            ]
        return fields or {"content": ""}

    def _choice(self, part: Choice | Delta, content: Json, offset: int, finish_reason: str | None) -> Json:
        entry = {"index": part.index, **content, "logprobs": None, "finish_reason": finish_reason}
        if self._logprobs:
            shape = self._chat_logprobs if self._chat else self._text_logprobs
            entry["logprobs"] = shape(part.token_ids, part.logprobs, offset)
        if self._token_ids:
            entry["token_ids"] = list(part.token_ids)
        return entry

    def _put_before(self, entry: Json, choice: Choice, echo: Echo) -> None:
        """Put the prompt before the text of a choice, and its log-probabilities before those of the sampled tokens."""
        prompt_ids = choice.prompt_ids.tolist()
        entry["text"] = self._decode(prompt_ids) + entry["text"]
        if echo.logprobs is None:
            return
        entry["prompt_version"] = list(echo.version or ())
        token_ids = [*prompt_ids, *choice.token_ids]
        numbers = self._text_logprobs(token_ids, [*echo.logprobs, *choice.logprobs], 0)
        numbers["token_logprobs"][0] = None
        if self._top_logprobs:
            # At temperature 0 a sampled token is the likeliest one.
            top_ids = [*echo.top_ids, *choice.token_ids]
            tops = [*echo.top_logprobs, *choice.logprobs]
            numbers["top_logprobs"] = [
                None if index == 0 else self._likeliest(token, logprob, top_id, top)
                for index, (token, logprob, top_id, top) in enumerate(
                    zip(numbers["tokens"], numbers["token_logprobs"], top_ids, tops, strict=True)
                )
            ]
        entry["logprobs"] = numbers

    def _likeliest(self, token: str, logprob: float, top_id: int, top_logprob: float) -> Json:
        """Return the log-probabilities of both tokens by their texts; the higher one if the texts are equal."""
        likeliest = {token: logprob}
        text = self._decode([top_id])
        likeliest[text] = max(top_logprob, likeliest.get(text, top_logprob))
        return likeliest

    def _chat_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float], _: int) -> Json:
        content = []
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            token = self._decode([token_id])
            whole = "\ufffd" not in token
            content.append(
                {
                    "token": token,
                    "logprob": logprob,
                    "bytes": list(token.encode()) if whole else None,
                    "top_logprobs": [],
                }
            )
        return {"content": content, "refusal": None}

    def _text_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float], offset: int) -> Json:
        tokens = [self._decode([token_id]) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {"tokens": tokens, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}


class PlainAnswer(Frame):
    """The answer of `/generate`: the texts alone."""

    def whole(self, choices: Sequence[Choice]) -> Json:
        texts = [choice.content for choice in choices]
        version = max((*((s.session, s.step) for c in choices for s in c.spans), self._at_first))
        reasons = {"finish_reasons": [choice.finish_reason for choice in choices], "usage": usage(choices)}
        return {"text": texts[0], "texts": texts, "model": model_name(self._run_id, version)} | reasons


def message_of(choice: Choice, answer_id: str) -> Json:
    """Return the assistant's message of a chat. `content` is null if the message has only calls."""
    calls = [_call(call, answer_id, choice.index, number) for number, call in enumerate(choice.calls)]
    message: Json = {"role": "assistant", "content": choice.content or (None if calls else ""), "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def reason_of(choice: Choice) -> str:
    """Return the finish reason of a chat's choice: `tool_calls` if it has calls and ended by itself."""
    return "tool_calls" if choice.calls and choice.finish_reason == "stop" else choice.finish_reason


def call_id(call: ToolCall, answer_id: str, index: int, number: int) -> str:
    """Return the id of a call: the call's own id, or a generated id, which is the same with and without `stream`."""
    return call.id or f"call_{hashlib.sha256(f'{answer_id}/{index}/{number}'.encode()).hexdigest()[:24]}"


def _call(call: ToolCall, answer_id: str, index: int, number: int) -> Json:
    return {
        "id": call_id(call, answer_id, index, number),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _content(parts: Iterable[AnswerPart], *, reasoning: bool = False) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart) and part.reasoning is reasoning)
