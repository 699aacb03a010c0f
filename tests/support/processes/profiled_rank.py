"""One of two ranks whose collectives are timed; rank 0 leaves the metrics as a file."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.host.process import end_process
from paceline.services.learner.training.run_reports import collective_time

CPU = torch.device("cpu")


def main(out: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    values = torch.ones(1 << 20)
    dist.all_reduce(values)
    is_first = dist.get_rank() == 0
    with collective_time(is_first, CPU) as waiting:
        dist.barrier()  # the profiler takes its time to begin
        if not is_first:
            time.sleep(1.5)
        dist.all_reduce(values)
    with collective_time(is_first, CPU) as alone:
        values @ values
    if is_first:
        out.write_text(json.dumps([waiting, alone]))
    dist.barrier()
    end_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
