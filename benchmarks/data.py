"""Memory and time that opening a large file of each kind takes.

    python benchmarks/data.py [--gigabytes 1] [--kind jsonl|csv|parquet] [--file train.jsonl]

Without --file a file is made in a temporary folder, of rows that have this size as JSON lines. Prints one JSON object: rows,
seconds to check and index all of them, and the peak of this process' resident memory in MB, imports and the making of the
file included.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from short_form import parse

from paceline.data.prompts import open_prompts
from paceline.spec import DataSection


def blocks(size_bytes: int) -> Iterator[list[dict[str, str]]]:
    """Yield rows of some 200 bytes, as many as JSON lines of this size have."""
    number, written = 0, 0
    while written < size_bytes:
        rows = [
            {"prompt": f"What is {n} + {n}? " + "Think. " * 20, "answer": str(2 * n)}
            for n in range(number, number + 10_000)
        ]
        yield rows
        written += sum(len(json.dumps(row)) + 1 for row in rows)
        number += 10_000


def write(path: Path, size_bytes: int) -> None:
    """Write a file of the kind that its suffix names."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet

        schema = pa.schema([("prompt", pa.string()), ("answer", pa.string())])
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            for rows in blocks(size_bytes):
                writer.write_table(pa.Table.from_pylist(rows, schema))
        return
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, ["prompt", "answer"])
        if path.suffix == ".csv":
            table.writeheader()
        for rows in blocks(size_bytes):
            if path.suffix == ".csv":
                table.writerows(rows)
            else:
                file.write("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--kind", choices=("jsonl", "csv", "parquet"), default="jsonl")
    options = parse(parser, gigabytes=0.01)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder  # read when `datasets` is imported, which a table does
        path = options.file or Path(folder) / f"train.{options.kind}"
        if options.file is None:
            write(path, int(options.gigabytes * 1e9))
        started_s = time.monotonic()
        prompts = open_prompts(DataSection(train=str(path)), seed=1)
        seconds = time.monotonic() - started_s
        prompts.draw(len(prompts) // 2)
        facts = {
            "megabytes": round(path.stat().st_size / 1e6),
            "rows": len(prompts),
            "seconds": round(seconds, 1),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
