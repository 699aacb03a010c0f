"""Description of an exception that ended a rank in a step: its type and text and, where memory ran out, the memory used and
the settings to lower."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from paceline.spec import RunSpec
from paceline.v1 import worker_pb2

MAX_TEXT = 2000
"""Characters of an exception's text that are reported."""

MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of torch's errors that mean a lack of memory."""


@dataclass(frozen=True)
class StepFault:
    """Kind and message of the report."""

    kind: worker_pb2.Fault.ValueType
    message: str


def describe(error: Exception, spec: RunSpec, device: torch.device, longest: int) -> StepFault:
    """Return the fault of an exception; `longest` is the number of tokens in the batch's longest sequence (0: not known)."""
    text = f"{type(error).__name__}: {str(error)[:MAX_TEXT]}"
    if not is_lack_of_memory(error):
        return StepFault(worker_pb2.FAULT_STEP, text)
    facts = [f"the peak was {_peak_bytes(device) / 2**30:.1f} GiB"]
    facts.append(f"a micro-batch holds up to policy.train_mb_tokens = {spec.policy.row_tokens} tokens")
    if longest:
        facts.append(f"the longest sequence has {longest}")
    remedies = []
    if spec.policy.row_tokens > max(longest, 1):
        remedies.append("lower policy.train_mb_tokens")
    if spec.policy.activation_checkpointing in ("none", "selective"):
        remedies.append("set policy.activation_checkpointing to full")
    if device.type == "cuda" and not spec.policy.cpu_offload and not spec.policy.optimizer.offload:
        remedies.append("set policy.optimizer.offload to true")
    if not spec.policy.cpu_offload:
        remedies.append("set policy.cpu_offload to true")
    remedies.append("generate shorter completions (policy.generation.max_new_tokens)")
    message = f"{text}. Memory ran out: {', '.join(facts)}. For the next run {', or '.join(remedies)}"
    return StepFault(worker_pb2.FAULT_MEMORY, message)


def is_lack_of_memory(error: Exception) -> bool:
    """Return whether the device or the host had no memory left; not all of torch's errors have a type for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_TEXTS)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
