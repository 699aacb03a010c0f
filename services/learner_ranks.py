"""Several ranks of the learner under torchrun, whose process this becomes: `services/learner.py` executes it.

torchrun hands SIGTERM on to the ranks and waits for them, then ends with a traceback. Here that is an end in good order.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main as torchrun


def main(arguments: list[str]) -> None:
    """Runs torchrun with its own arguments. Its status is 0 when it was told to stop."""
    try:
        torchrun(arguments)
    except SignalException:
        sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
