"""Stop strings: a completion ends with the token that completes one of them. Promise: tokens and log-probabilities are
those that were sampled, because the engine samples nothing after that token. The text ends with the stop string, even
if the token has further characters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.chat.completion_texts import text_of
from paceline.groups import Completion, IntArray, cut_spans

UNFINISHED = "\ufffd"
"""Character that a decoder writes for bytes that are not, or not yet, a character."""
Decode = Callable[[list[int]], str]


class StopStrings:
    """Strings that end a completion, with the decoders of the run's tokenizer. `decode` gives the text of a completion;
    `decode_all` also writes the special tokens of the chat, so that such a token may be a stop string too."""

    def __init__(self, strings: tuple[str, ...], decode: Decode, decode_all: Decode | None = None) -> None:
        """Raise ValueError for an empty string, which every text contains."""
        if not all(strings):
            raise ValueError("a stop string is empty; every text would end with it")
        self.strings, self._decode, self._decode_all = strings, decode, decode_all or decode

    @classmethod
    def of(cls, tokenizer: Any, strings: tuple[str, ...]) -> StopStrings | None:
        """Return the stop strings of completions for a tokenizer; None without any."""
        decode_all = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        return cls(strings, partial(text_of, tokenizer), decode_all) if strings else None

    def scanner(self, min_tokens: int = 0, prefix: Completion | None = None) -> StopScanner:
        """Return a scanner after `prefix`. Strings that are complete before `min_tokens` tokens end nothing."""
        scanner = StopScanner(self.strings, self._decode_all, min_tokens)
        if prefix is not None:
            scanner.push(prefix.token_ids.tolist())
        return scanner

    def end(self, token_ids: IntArray) -> str | None:
        """Return a completion's text, up to and including the stop string that the last token completes; None if the
        last token completes none. A stop string with a special token of the chat is not text, so the text ends before
        it."""
        ids = token_ids.tolist()
        for decode in (self._decode, self._decode_all):
            text, before = decode(ids), len(decode(ids[:-1]).rstrip(UNFINISHED))
            starts = [(text.find(string, max(0, before - len(string) + 1)), string) for string in self.strings]
            ends = [start + len(string) for start, string in starts if start >= 0]
            if ends and decode is self._decode:
                return text[: min(ends)]
            if ends:
                start = min(start for start, _ in starts if start >= 0)
                kept = next(n for n in range(len(ids), -1, -1) if len(decode(ids[:n])) <= start)
                return self._decode(ids[:kept])
        return None


class StopScanner:
    """Search for stop strings in the text of one completion, token by token."""

    def __init__(self, strings: tuple[str, ...], decode: Decode, min_tokens: int) -> None:
        self.num_tokens = 0
        """Number of scanned tokens, up to the one that completes a stop string."""
        self.stopped = False
        self._strings, self._decode, self._min_tokens = strings, decode, min_tokens
        self._overlap = max(map(len, strings)) - 1
        self._window: list[int] = []
        """Last tokens: those with known text, then those with incomplete characters."""
        self._known = 0
        self._tail = ""
        """Last characters, which may begin a stop string."""

    def push(self, token_ids: Iterable[int]) -> bool:
        """Scan tokens up to the one that completes a stop string; return whether there was one."""
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            self._window.append(token_id)
            new = self._new_text()
            if not new:
                continue
            text = self._tail + new
            self._tail = text[-self._overlap :] if self._overlap else ""
            complete = any(string in text for string in self._strings)
            self.stopped = complete and self.num_tokens >= self._min_tokens
        return self.stopped

    def _new_text(self) -> str:
        """Return the last token's text, decoded with the tokens before it, because a decoder may join neighbours."""
        before, now = self._decode(self._window[: self._known]), self._decode(self._window)
        if len(now) <= len(before) or now.endswith(UNFINISHED):
            return ""
        self._window, self._known = self._window[self._known :], len(self._window) - self._known
        return now[len(before) :]


def cut(completion: Completion, num_tokens: int) -> Completion:
    """Return the first `num_tokens` tokens of a completion, as a completion that a stop string has ended."""
    return replace(
        completion,
        token_ids=completion.token_ids[:num_tokens],
        logprobs=completion.logprobs[:num_tokens],
        spans=cut_spans(completion.spans, num_tokens),
        finish_reason="stop",
    )
