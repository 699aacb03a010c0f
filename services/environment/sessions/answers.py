"""The answer to an agent's request in the shapes of the OpenAI API, whole and as the events of a stream.

A turn is recorded before it is answered, so a stream has the whole answer in few events: role, message, end. Further fields
are those of the endpoint (docs/endpoint.md): `versions`, and with `return_token_ids` the ids of prompt and answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from environment.protocols import AgentAnswer
from paceline.chat.choices import model_name, version_name
from paceline.chat.messages import Json
from paceline.groups import Version


class SessionAnswer:
    """One answer to a chat. `decode` turns token ids into text."""

    def __init__(
        self,
        answer_id: str,
        run_id: str,
        answer: AgentAnswer,
        *,
        logprobs: bool,
        token_ids: bool,
        decode: Any,
    ) -> None:
        self._id, self._run_id, self._answer = answer_id, run_id, answer
        self._logprobs, self._token_ids, self._decode = logprobs, token_ids, decode
        self._created_s = int(time.time())

    def whole(self) -> Json:
        """Return the answer to a request without `stream`."""
        choice = self._choice({"message": self._message()}) | self._ids()
        return self._frame("chat.completion", [choice]) | {"usage": self._usage()}

    def events(self, *, include_usage: bool) -> Iterator[Json]:
        """Yield the chunks of a stream."""
        message = self._message()
        opening = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        yield self._chunk([opening])
        delta = {name: value for name, value in message.items() if name not in ("role", "refusal") and value}
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        yield self._chunk([self._choice({"delta": delta}) | {"finish_reason": None}])
        closing = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": self._reason}
        yield self._chunk([closing | self._ids()])
        if include_usage:
            yield self._chunk([]) | {"usage": self._usage()}

    def _message(self) -> Json:
        return {"refusal": None, **self._answer.message}

    @property
    def _reason(self) -> str:
        reason = self._answer.turn.finish_reason
        return "tool_calls" if self._answer.message.get("tool_calls") and reason == "stop" else reason

    def _choice(self, content: Json) -> Json:
        return {
            "index": 0,
            **content,
            "logprobs": self._token_logprobs() if self._logprobs else None,
            "finish_reason": self._reason,
        }

    def _ids(self) -> Json:
        turn = self._answer.turn
        ids: Json = {"versions": [list(span) for span in turn.spans]}
        if self._token_ids:
            ids |= {
                "token_ids": turn.token_ids.tolist(),
                "prompt_token_ids": self._answer.prompt_ids.tolist(),
            }
        return ids

    def _token_logprobs(self) -> Json:
        turn, content = self._answer.turn, []
        for token_id, logprob in zip(turn.token_ids.tolist(), turn.logprobs.tolist(), strict=True):
            token = self._decode([token_id])
            whole = "�" not in token
            content.append(
                {
                    "token": token,
                    "logprob": logprob,
                    "bytes": list(token.encode()) if whole else None,
                    "top_logprobs": [],
                }
            )
        return {"content": content, "refusal": None}

    def _usage(self) -> Json:
        prompt, completion = len(self._answer.prompt_ids), len(self._answer.turn.token_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        return self._frame("chat.completion.chunk", choices)

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        versions = sorted({Version(span.session, span.step) for span in self._answer.turn.spans})
        return {
            "id": self._id,
            "object": kind,
            "created": self._created_s,
            "model": model_name(self._run_id, versions[-1]),
            "system_fingerprint": "+".join(version_name(version) for version in versions),
            "choices": choices,
        }


def token_answer(answer_id: str, answer: AgentAnswer) -> Json:
    """Return the answer of `/inference/v1/generate`, vLLM's route for token ids: logprobs name tokens by their ids."""
    turn = answer.turn
    content = [
        {"token": f"token_id:{token_id}", "logprob": logprob, "top_logprobs": []}
        for token_id, logprob in zip(turn.token_ids.tolist(), turn.logprobs.tolist(), strict=True)
    ]
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": turn.finish_reason,
        "token_ids": turn.token_ids.tolist(),
        "versions": [list(span) for span in turn.spans],
    }
    return {"request_id": answer_id, "choices": [choice]}
