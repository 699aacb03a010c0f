"""A user's function on the rows of a data set, in a process of its own: `f(row) -> row, list of rows, or None`.

Promise: the function sees rows in their order, a fault names the row, and a call that hangs ends with its time limit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

from paceline.data.joined_rows import Part
from paceline.errors import DataError, InvalidInput
from paceline.user_code.ends import ProcessDied, ProcessTimeout
from paceline.user_code.frames import encode
from paceline.user_code.process import UserProcess
from paceline.user_code.surroundings import Surroundings

BATCH_ROWS = 256
"""Rows of one call of the process."""
START_TIMEOUT_S = 120.0


class Processor:
    """An async context manager around the function `path/to/file.py:name`."""

    def __init__(self, function: str, timeout_s: float) -> None:
        """`timeout_s` is the limit for `BATCH_ROWS` rows."""
        self._function, self._timeout_s = function, timeout_s
        self._process = UserProcess(
            "paceline.data.preparation.processor_child",
            encode({"load": function}),
            START_TIMEOUT_S,
            Surroundings((function.rpartition(":")[0],)),
        )

    async def __aenter__(self) -> Processor:
        """Raises InvalidInput when the function cannot be loaded."""
        try:
            await self._process.start()
        except (ProcessDied, ProcessTimeout) as error:
            await self._process.close()
            raise InvalidInput(
                f"the process of {self._function} {error} while it loaded the function"
            ) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._process.close()

    async def process(self, rows: Part) -> AsyncIterator[tuple[int, list[dict[str, Any]]]]:
        """Yield the index of each row, and what the function makes of it. Raises DataError: it raised, hung, died, or returned
        something else."""
        for first in range(0, len(rows), BATCH_ROWS):
            batch = [rows[index] for index in range(first, min(first + BATCH_ROWS, len(rows)))]
            for index, made in enumerate(await self._batch(batch, first), start=first):
                yield index, made

    async def _batch(self, batch: Sequence[dict[str, Any]], first: int) -> list[list[dict[str, Any]]]:
        try:
            reply = await self._process.ask(encode({"rows": list(batch)}), timeout_s=self._timeout_s)
        except (ProcessTimeout, ProcessDied) as error:
            raise DataError(
                f"{self._function} {error} in rows {first} to {first + len(batch) - 1}; correct it, or raise data.preparation.timeout_s"
            ) from None
        if "failed" in reply:
            raise DataError(f"{self._function} raised {reply['failed']}, for row {first + int(reply['at'])}")
        made: list[list[dict[str, Any]]] = reply["rows"]
        return made
