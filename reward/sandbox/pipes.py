"""The three pipes of a sandboxed program, served by one thread: its input is written, its output read up to a bound."""

from __future__ import annotations

import contextlib
import os
import select

PIECE_BYTES = 65536


class Pipes:
    """The caller's ends, which it closes."""

    def __init__(
        self, ends: tuple[int, int, int], data: bytes, output_bytes: int, skip_bytes: int, pid: int
    ) -> None:
        """Take the ends of standard input, output and error. data: what the program reads. output_bytes: bound of each
        output; skip_bytes: bytes at the beginning of standard error that are the sandbox's. pid: the process whose end
        ends a wait."""
        stdin, stdout, stderr = ends
        self._rest = memoryview(data)
        self._output_bytes, self._skip_bytes = output_bytes, skip_bytes
        self._stdin = stdin
        self._read: dict[int, tuple[bytearray, int]] = {
            stdout: (bytearray(), output_bytes),
            stderr: (bytearray(), output_bytes + skip_bytes),
        }
        self.stdout_bytes, self.stderr_bytes = (target for target, _ in self._read.values())
        self._poller = select.poll()
        for stream in (stdin, stdout, stderr):
            os.set_blocking(stream, False)
            self._poller.register(stream, select.POLLOUT if stream == stdin else select.POLLIN)
        self._open = {stdin, stdout, stderr}
        with contextlib.suppress(OSError):  # a kernel without it, or a process that has ended
            self._end = os.pidfd_open(pid)
            self._open.add(self._end)
            self._poller.register(self._end, select.POLLIN)

    @property
    def full(self) -> bool:
        """Return whether the program has written more than its bound."""
        return any(len(target) > most for target, most in self._read.values())

    @property
    def stdout(self) -> bytes:
        """Return what the program wrote to standard output, up to the bound."""
        return bytes(self.stdout_bytes[: self._output_bytes])

    @property
    def stderr(self) -> bytes:
        """Return what the program wrote to standard error, up to the bound."""
        return bytes(self.stderr_bytes[self._skip_bytes : self._skip_bytes + self._output_bytes])

    def serve(self, timeout_s: float) -> None:
        """Wait for at most `timeout_s`, and write and read what is possible."""
        for stream, _ in self._poller.poll(1000 * timeout_s + 1):
            if stream == self._stdin:
                self._write()
            elif stream in self._read:
                self._read_piece(stream)

    def read_rest(self) -> None:
        """Read what is in the pipes after the program's end, up to the bound."""
        for stream in list(self._read):
            while stream in self._open and self._read_piece(stream) and not self.full:
                pass

    def close(self) -> None:
        """Close all ends."""
        for stream in list(self._open):
            self._close(stream)

    def _write(self) -> None:
        try:
            if self._rest:
                self._rest = self._rest[os.write(self._stdin, self._rest[:PIECE_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:
            self._rest = self._rest[:0]  # nobody reads it
        if not self._rest:
            self._close(self._stdin)

    def _read_piece(self, stream: int) -> bool:
        """Read once; return whether there was something."""
        target, most = self._read[stream]
        try:
            piece = os.read(stream, max(1, min(PIECE_BYTES, most + 1 - len(target))))
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        target += piece
        if not piece:
            self._close(stream)
        return bool(piece)

    def _close(self, stream: int) -> None:
        self._open.discard(stream)
        with contextlib.suppress(KeyError):
            self._poller.unregister(stream)
        with contextlib.suppress(OSError):
            os.close(stream)
