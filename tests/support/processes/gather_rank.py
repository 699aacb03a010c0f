"""One of three ranks that gather a sharded module; rank 0 leaves the result as a file."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline.host.process import end_process
from paceline.learner.weights import gather


class Uneven(nn.Module):
    """Rows that three ranks cannot share evenly, fewer rows than ranks, tied weights, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.wide = nn.Parameter(torch.randn(7, 5, generator=generator))
        self.few = nn.Parameter(torch.randn(2, 3, generator=generator))
        self.vector = nn.Parameter(torch.randn(11, generator=generator))
        self.tall = nn.Parameter(torch.randn(64, 9, generator=generator))
        self.tied = self.tall
        self.register_buffer("count", torch.arange(4))
        self.register_buffer("scale", torch.tensor(1.5))


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    module = Uneven()
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for bucket_bytes in (64, 1 << 20):  # several buckets; one
        gather.BUCKET_BYTES = bucket_bytes
        for name, dtype in (("same", None), ("bf16", torch.bfloat16)):
            tensors = gather.gather_weights(module, dtype)
            if dist.get_rank() == 0:
                assert tensors["tied"].data_ptr() == tensors["tall"].data_ptr()
                save_file(
                    {key: tensor.clone() for key, tensor in tensors.items()},
                    out / f"{name}.{bucket_bytes}.safetensors",
                )
            else:
                assert tensors == {}
    (out / f"rank.{dist.get_rank()}.json").write_text(json.dumps("done"))
    end_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
