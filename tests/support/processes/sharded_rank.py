"""One rank of two: the gradients of every architecture's model, sharded, on half of the sequences."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from model_checks import TEMPERATURE, samples
from model_zoo import WORKING
from safetensors.torch import save_file
from tiny_policy import CPU, make_spec
from torch.distributed.tensor import DTensor

from paceline.host.process import end_process
from paceline.learner.batch.samples import pack_samples
from paceline.learner.model.policy import load_policy, packed_logprobs


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    for architecture in WORKING:
        policy = load_policy(make_spec(out / architecture.class_name).policy, CPU)
        own = samples()[rank::2]
        logprobs_N, _ = packed_logprobs(policy, pack_samples(own, CPU), temperature=TEMPERATURE, chunk_tokens=7)
        logprobs_N.sum().backward()
        gradients = {}
        for name, parameter in policy.named_parameters():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor), name
                gradients[name] = parameter.grad.full_tensor().contiguous()
        if rank == 0:
            save_file(gradients, out / f"{architecture.class_name}.safetensors")
    end_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
