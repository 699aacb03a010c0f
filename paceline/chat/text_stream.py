"""Text from token ids that are still coming: whole characters only, and nothing of a stop string.

The promise: the joined results of `push` and `finish` are the text of all tokens decoded at once, cut before the first
stop string, and no returned text changes later. So text is held back while it may be the beginning of a stop string or
of a character whose other bytes are still to come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

UNFINISHED = "\ufffd"
"""Character that a decoder writes for bytes that are no character (yet)."""


class TextStream:
    """The text of one completion. `decode` turns token ids into text; `stop` are strings that end it."""

    def __init__(self, decode: Callable[[list[int]], str], stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        """True when a stop string was met; later tokens are ignored."""
        self.num_tokens = 0
        """Number of tokens taken, including those that completed the stop string."""
        self._decode = decode
        self._stop = stop
        self._window: list[int] = []
        self._read = 0
        self._held = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Take tokens and return the text that is certain by now."""
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
        """Return the text of the last token. It is decoded with the tokens before it, because a decoder may join
        neighbours."""
        before, now = self._decode(self._window[: self._read]), self._decode(self._window)
        if len(now) <= len(before) or now.endswith(UNFINISHED):
            return ""
        self._window, self._read = self._window[self._read :], len(self._window) - self._read
        return now[len(before) :]

    def _release(self, new: str) -> str:
        """Return the held text with `new`, up to a stop string or to a possible beginning of one."""
        text, self._held = self._held + new, ""
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
