"""Prepares the data of a spec (`data.preparation`) into files in a folder of this machine. Promise: the user's function
(`f(row) -> row, list of rows, or None`) runs in a process of the machine that submits the spec. The function gets the
rows in their order. A fault names the row, and a call that hangs ends at its time limit. Rows left out are counted by
reason."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.data.examples import check_example, exchange_of
from paceline.data.preparation.filters import Attempts, Filter, filters_of
from paceline.data.row_checks import row_check
from paceline.data.rows import Rows, by_reason, open_source
from paceline.errors import DataError, InvalidInput, counted
from paceline.files.whole_file import written_whole
from paceline.spec import RunSpec
from paceline.spec.sections.data import distinct_names
from paceline.user_code.ends import ProcessDied, ProcessTimeout
from paceline.user_code.frames import encode
from paceline.user_code.process import UserProcess
from paceline.user_code.surroundings import Surroundings

BY_FUNCTION = "by the function"
Row = dict[str, Any]


@dataclass
class PreparedSet:
    paths: list[Path] = field(default_factory=list)
    """One file for each entry of a list of data sets, in the order of the list."""
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Prepared:
    """The data sets that a spec's preparation changes, each under the field that names it."""

    sets: dict[str, PreparedSet]
    report: Path | None = None

    @property
    def files(self) -> dict[str, list[Path]]:
        """Return for each field the files that travel with the run."""
        report = {} if self.report is None else {"data.preparation": [self.report]}
        return {name: each.paths for name, each in self.sets.items()} | report

    def spec(self, spec: RunSpec) -> RunSpec:
        """Return the spec with the prepared files as its data sets."""
        train, validation = (
            [str(path) for path in self.sets.get(name, PreparedSet()).paths]
            for name in ("data.train", "data.validation")
        )
        return spec.model_copy(update={"data": spec.data.with_prepared(train, validation)})

    @property
    def lines(self) -> list[str]:
        """Return a sentence on the rows of each data set, for people."""
        return [
            f"{name}: {counted(each.rows, 'row')} after data.preparation; left out: {by_reason(+each.left_out)}"
            for name, each in self.sets.items()
        ]


@contextmanager
def prepared_data(spec: RunSpec, attempts_of: Attempts, *, validation_alone: bool = False) -> Iterator[Prepared]:
    """Prepare the data of a spec in a folder that exists while the context is open; without data.preparation, no data
    are read. Raises InvalidInput for a function that cannot be loaded, or a filter without a set to compare with;
    DataError for a function that fails, a row that the algorithm cannot read, or a set without rows; Unreadable."""
    section = spec.data.preparation
    with tempfile.TemporaryDirectory(prefix="paceline-prepared-") as folder:
        sets: dict[str, PreparedSet] = {}
        if section.function is not None and spec.data.validation is not None:
            sets["data.validation"] = _run(_prepare(spec, Path(folder), (), validation=True))
        if section.is_used and not validation_alone:
            filters = filters_of(spec, Prepared(sets).spec(spec), attempts_of)
            sets["data.train"] = _run(_prepare(spec, Path(folder), filters))
        report = Path(folder, "report.txt")
        report.write_text("\n".join(Prepared(sets).lines))
        yield Prepared(sets, report if sets else None)


def _run(preparation: Coroutine[Any, Any, PreparedSet]) -> PreparedSet:
    """Run a preparation to its end, also while an event loop runs, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(preparation)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, preparation).result()


async def _prepare(spec: RunSpec, folder: Path, filters: Sequence[Filter], *, validation: bool = False) -> PreparedSet:
    source, found = spec.data.source(validation=validation), PreparedSet()
    names = spec.data.names(validation=validation)
    for index, (name, stem) in enumerate(zip(names, distinct_names(names), strict=True)):
        # A separate folder for each file keeps its stem, which names a source in metrics.
        name_of_file = re.sub(r"[^\w.-]+", "_", stem)
        path = folder / source.field.removeprefix("data.") / f"{index:04d}" / f"{name_of_file}.jsonl"
        path.parent.mkdir(parents=True)
        rows = open_source(source._replace(name=name))
        number = await _write(rows, path, spec, filters, found.left_out, f"{source.field}: {name!r}")
        found.paths.append(path)
        found.rows += number
    return found


async def _write(
    rows: Rows, path: Path, spec: RunSpec, filters: Sequence[Filter], left_out: Counter[str], where: str
) -> int:
    """Write the rows that pass the filters, and count the other rows; return the number of rows written."""
    has_tools = spec.prompts_have_tools
    check = row_check(spec.data, has_tools=has_tools) if spec.examples is None else check_example(spec)
    section, before, written = spec.data.preparation, Counter(left_out), 0
    # The generator is closed here, because at the end of the loop its process would be left behind.
    async with aclosing(_processed(rows, section.function, section.timeout_s)) as processed:
        with written_whole(path) as partial, partial.open("w", encoding="utf-8") as file:
            async for index, made in processed:
                left_out[BY_FUNCTION] += not made
                for row in made:
                    try:
                        check(row)
                        reason = _reason(row, spec, filters)
                    except DataError as error:
                        raise DataError(f"{where}, row {index}: {error}") from None
                    if reason:
                        left_out[reason] += 1
                        continue
                    file.write(json.dumps(row, default=str) + "\n")
                    written += 1
            if not written:
                raise DataError(f"{where}: data.preparation leaves no row; left out: {by_reason(left_out - before)}")
    return written


def _reason(row: Row, spec: RunSpec, filters: Sequence[Filter]) -> str:
    """Return why a row is left out, or an empty text. A text that trains as a whole is filtered like a prompt."""
    if not filters:
        return ""
    prompt, completion, _ = exchange_of(row, spec)
    compared = completion if prompt is None else prompt
    return next((reason for each in filters if (reason := each(compared, row))), "")


async def _processed(rows: Rows, function: str | None, timeout_s: float) -> AsyncGenerator[tuple[int, list[Row]], None]:
    if function is None:
        for index in range(len(rows)):
            yield index, [rows[index]]
        return
    async with Processor(function, timeout_s) as processor:
        async for index, made in processor.process(rows):
            yield index, made


BATCH_ROWS = 256
"""Number of rows in one call of the process, for which `timeout_s` is the limit."""
START_TIMEOUT_S = 120.0


class Processor:
    """Runs the function `path/to/file.py:name` in a process. An async context manager."""

    def __init__(self, function: str, timeout_s: float) -> None:
        self._function, self._timeout_s = function, timeout_s
        self._process = UserProcess(
            "paceline.data.preparation.processor_child",
            encode({"load": function}),
            START_TIMEOUT_S,
            Surroundings((function.rpartition(":")[0],)),
        )

    async def __aenter__(self) -> Processor:
        """Start the process. Raises InvalidInput if the function cannot be loaded."""
        try:
            await self._process.start()
        except (ProcessDied, ProcessTimeout) as error:
            await self._process.close()
            raise InvalidInput(f"the process of {self._function} {error} while it loaded the function") from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._process.close()

    async def process(self, rows: Rows) -> AsyncIterator[tuple[int, list[dict[str, Any]]]]:
        """Yield each row's index and results. Raises DataError if the function raises, hangs, dies or gives no row."""
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
