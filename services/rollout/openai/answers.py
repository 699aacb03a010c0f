"""Answers in the shapes of the OpenAI API, for chat and text, whole and as chunks of a stream.

Each choice has an additional field `versions`, a list of [session, step, start, end): the weights of each range of
tokens. `model` names the newest of them and `system_fingerprint` all of them, oldest first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.groups import Version, VersionSpan
from services.rollout.openai.sampling import Choice, Delta, model_name, version_name

Json = dict[str, Any]


class Answer:
    """The frame of an answer. `decode` turns token ids into text, `at_first` is the version when the request came."""

    def __init__(
        self,
        answer_id: str,
        *,
        chat: bool,
        run_id: str,
        at_first: Version,
        logprobs: bool,
        token_ids: bool,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._id = answer_id
        self._chat = chat
        self._run_id = run_id
        self._at_first = at_first
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._decode = decode
        self._created_s = int(time.time())
        self._versions: set[tuple[int, int]] = set()

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the answer to a request without `stream`."""
        entries = []
        for choice in choices:
            self._note(choice.spans)
            text = {"role": "assistant", "content": choice.text, "refusal": None}
            entry = self._choice(choice, choice.text, 0, {"message": text}, choice.finish_reason)
            entry["versions"] = _ranges(choice.spans)
            if self._token_ids:
                entry["prompt_token_ids"] = choice.prompt_ids.tolist()
            entries.append(entry)
        return self._frame("chat.completion" if self._chat else "text_completion", entries) | {
            "usage": usage(choices)
        }

    def opening(self, index: int) -> Json:
        """Return a chat stream's first chunk of a choice, which names the role."""
        delta = {"role": "assistant", "content": ""}
        entry = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._frame("chat.completion.chunk", [entry])

    def chunk(self, delta: Delta) -> Json:
        """Return a chunk with the text since the last chunk of the same choice."""
        self._note(delta.spans)
        entry = self._choice(delta, delta.text, delta.offset, {"delta": {"content": delta.text}}, None)
        return self._frame(self._chunk_kind, [entry])

    def closing(self, choice: Choice) -> Json:
        """Return a choice's last chunk: its finish reason and its versions."""
        self._note(choice.spans)
        content: Json = {"delta": {}} if self._chat else {"text": ""}
        entry = {"index": choice.index, **content, "logprobs": None, "finish_reason": choice.finish_reason}
        return self._frame(self._chunk_kind, [entry | {"versions": _ranges(choice.spans)}])

    def counts(self, choices: Sequence[Choice]) -> Json:
        """Return the chunk of `stream_options.include_usage`."""
        return self._frame(self._chunk_kind, []) | {"usage": usage(choices)}

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

    def _choice(
        self, part: Choice | Delta, text: str, offset: int, chat: Json, finish_reason: str | None
    ) -> Json:
        content = chat if self._chat else {"text": text}
        entry = {"index": part.index, **content, "logprobs": None, "finish_reason": finish_reason}
        if self._logprobs:
            shape = self._chat_logprobs if self._chat else self._text_logprobs
            entry["logprobs"] = shape(part.token_ids, part.logprobs, offset)
        if self._token_ids:
            entry["token_ids"] = part.token_ids
        return entry

    def _chat_logprobs(self, token_ids: list[int], logprobs: list[float], _: int) -> Json:
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

    def _text_logprobs(self, token_ids: list[int], logprobs: list[float], offset: int) -> Json:
        tokens = [self._decode([token_id]) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }


def usage(choices: Sequence[Choice]) -> Json:
    """Return token counts; a prompt that several choices share counts once."""
    prompts = {id(choice.prompt_ids): len(choice.prompt_ids) for choice in choices}
    prompt_tokens = sum(prompts.values())
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _ranges(spans: Iterable[VersionSpan]) -> list[list[int]]:
    return [list(span) for span in spans]
