"""The ranks of one script as forks of this process, which imports the script's modules once for all of them.

    python forked_ranks.py SCRIPT RANKS [ARGUMENT]...

It ends once all ranks have ended well, or as soon as one has failed; `ranks.py` then kills its process group.
"""

from __future__ import annotations

import os
import runpy
import sys


def main(script: str, ranks: int, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="imports")
    for rank in range(ranks):
        if os.fork() == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            runpy.run_path(script, run_name="__main__")
            return
    for _ in range(ranks):
        if os.waitstatus_to_exitcode(os.wait()[1]):
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
