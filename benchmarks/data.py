"""Memory and time that opening a large JSONL file takes.

    python benchmarks/data.py [--gigabytes 1] [--file train.jsonl]

Without --file a file of that size is made in a temporary folder. Prints one JSON object: rows, seconds to check and index all
of them, and the peak of this process' resident memory in MB, the imports included.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from paceline.data.rows import open_prompts
from paceline.spec import DataSection


def write(path: Path, size_bytes: int) -> None:
    """Write rows of some 200 bytes."""
    with path.open("w") as file:
        number = 0
        while file.tell() < size_bytes:
            rows = (
                {"prompt": f"What is {n} + {n}? " + "Think. " * 20, "answer": str(2 * n)}
                for n in range(number, number + 10_000)
            )
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            number += 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "train.jsonl"
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
