"""Device of a learner's rank."""

from __future__ import annotations

import logging
import os

import torch

from paceline.errors import Unavailable
from paceline.learner.model.determinism import reserve_workspace
from paceline.services.common.gpus import unused_gpus
from paceline.services.learner.rank_group import form_rank_group

log = logging.getLogger(__name__)


def set_up_device(device: str, host: str) -> torch.device:
    """Return the device of this rank, and make the process group when there are several ranks.

    Args:
        device: `auto`, `cuda` or `cpu`.
        host: address that the service listens on.

    Raises:
        Unavailable: the GPU cannot be used.
    """
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable(
            f"--device is cuda, and torch {torch.__version__} finds no GPU that it can use; see `paceline doctor`"
        )
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if cuda and rank >= (number := torch.cuda.device_count()):
        raise Unavailable(
            f"rank {rank} of the learner needs a GPU for itself, and torch sees {number} here, counted from 0; see "
            "`paceline doctor`, or start fewer ranks (cluster.learner_ranks)"
        )
    if device == "auto" and not cuda and (idle := unused_gpus("learner")):
        log.warning("%s", idle)
    if cuda:
        reserve_workspace()
        os.environ.setdefault(
            "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
        )  # rows of ever new lengths leave holes
        torch.cuda.set_device(rank)
    form_rank_group(host, cuda=cuda)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
