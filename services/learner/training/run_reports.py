"""Sends the reports of the ranks on their work on one run, and makes their parts: the numbers of single tokens, the
exception that ended a rank in a step, a step's pace, and metrics of the completions of a whole batch. The metrics of
completions are taken from the groups, not from the training samples, because `grpo.overlong_filtering` removes the
tokens of truncated completions."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from paceline.groups import Group
from paceline.learner.collectives import rows_of_all_ranks
from paceline.learner.step.token_statistics import TokenNumbers, TokenStatistics
from paceline.models.shape import peak_flops
from paceline.spec import RunSpec
from paceline.v1 import worker_pb2

log = logging.getLogger(__name__)


class RunReports:
    """Sends the reports of one rank. Rank 0 keeps the newest report of each kind; other ranks report only faults."""

    def __init__(
        self, run_id: str, session: int, send: Callable[[worker_pb2.ConnectRequest], None], is_first: bool
    ) -> None:
        self._run_id, self._session = run_id, session
        self._send, self._is_first = send, is_first
        self._kept: list[worker_pb2.ConnectRequest] = []
        self._lock = threading.Lock()
        """Lock that guards the kept reports, because uploads report checkpoints from another thread."""

    def fail(self, **facts: Any) -> None:
        """Report a fault of this rank; `facts` are fields of `RunReport`."""
        self._send(self._message(facts))

    def warn(self, message: str) -> None:
        """Log a warning; rank 0 also adds it to the run's events."""
        log.warning("run %s: %s", self._run_id, message)
        if self._is_first:
            self._send(self._message({"warning": message}))

    def report(self, **facts: Any) -> None:
        """Report facts that all ranks have; `facts` are fields of `RunReport`."""
        self.keep(self._message(facts))

    def keep(self, report: worker_pb2.ConnectRequest) -> None:
        """Send a report that all ranks have, and keep it for `repeat`."""
        if not self._is_first:
            return
        kind = report.WhichOneof("report")
        with self._lock:
            self._kept = [r for r in self._kept if r.WhichOneof("report") != kind] + [report]
        self._send(report)

    def repeat(self) -> None:
        """Send the kept reports again, because the coordinator was unreachable."""
        for report in self._kept:
            self._send(report)

    def _message(self, facts: dict[str, Any]) -> worker_pb2.ConnectRequest:
        report = worker_pb2.RunReport(run_id=self._run_id, session=self._session, **facts)
        return worker_pb2.ConnectRequest(run_report=report)


MAX_TOKENS = 100_000
"""Largest number of tokens in one report of token statistics; further completions are left out."""


def observed(spec: RunSpec, rank: int, groups: Sequence[Group]) -> TokenStatistics | None:
    """Return the statistics for rank 0's first groups of a step; None if the spec wants none."""
    number = spec.logger.keep_token_stats
    if rank != 0 or not number or not groups or not spec.samples:
        return None
    return TokenStatistics([group.group_id for group in groups[:number]])


def report_of(
    numbers: Sequence[TokenNumbers], run_id: str, session: int, step: int, max_tokens: int = MAX_TOKENS
) -> worker_pb2.ConnectRequest:
    report = worker_pb2.TokenStatistics(run_id=run_id, session=session, step=step)
    tokens = 0
    for each in numbers:
        tokens += len(each.logprobs_T)
        if tokens > max_tokens:
            break
        report.completions.add(
            group_id=each.group_id,
            index=each.index,
            logprobs=each.logprobs_T.tolist(),
            entropies=each.entropies_T.tolist(),
        )
    return worker_pb2.ConnectRequest(token_statistics=report)


MAX_TEXT = 2000
"""Largest number of characters of an exception's text in a report."""
MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of torch's errors that mean a lack of memory."""


def describe(
    error: Exception, spec: RunSpec, device: torch.device, longest: int
) -> tuple[worker_pb2.Fault.ValueType, str]:
    """Return kind and message of the report about an exception that ended a step. If memory ran out, the message has
    the memory used and the settings to lower. `longest`: tokens of the batch's longest sequence (0: unknown)."""
    text = f"{type(error).__name__}: {str(error)[:MAX_TEXT]}"
    if not is_lack_of_memory(error):
        return worker_pb2.FAULT_STEP, text
    facts = [f"the peak was {_peak_bytes(device) / 2**30:.1f} GiB"]
    facts.append(f"a micro-batch holds up to policy.train_mb_tokens = {spec.policy.row_tokens} tokens")
    if longest:
        facts.append(f"the longest sequence has {longest} tokens")
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
    return worker_pb2.FAULT_MEMORY, message


def is_lack_of_memory(error: Exception) -> bool:
    """Return whether device or host had no memory left; some of torch's errors show this only by their text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_TEXTS)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pace(metrics: Mapping[str, float], ranks: int, device: torch.device) -> dict[str, float]:
    """Return the metrics of a step's pace, from the step's other metrics and the number of `ranks`."""
    reached = {"learner/tokens_per_s": metrics["tokens"] / metrics["step_s"]}
    if "teraflop" not in metrics:
        return reached
    reached["learner/teraflops"] = metrics["teraflop"] / metrics["step_s"] / ranks
    if device.type == "cuda":
        reached["learner/peak_gpu_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        peak = peak_flops(torch.cuda.get_device_name(device))
        if peak is not None:
            reached["learner/mfu"] = reached["learner/teraflops"] * 1e12 / peak
    return reached


@contextlib.contextmanager
def collective_time(wanted: bool, device: torch.device) -> Iterator[dict[str, float]]:
    """Yield a dict that gets the times of collectives once the block has ended; nothing is profiled unless `wanted`.
    `learner/collectives_s` counts a moment once, however many collectives run in it. On GPUs
    `learner/exposed_collectives_s` is the part in which the GPU computed nothing else."""
    metrics: dict[str, float] = {}
    if not wanted:
        yield metrics
        return
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        yield metrics
        if on_gpu:
            torch.cuda.synchronize(device)
    metrics |= collective_metrics(profiler.events() or (), on_gpu)


def collective_metrics(events: Iterable[Any], on_gpu: bool) -> dict[str, float]:
    """Return the metrics of `collective_time` from a profiler's events; none if a GPU's driver refuses profiling."""
    intervals = [
        (event.name.startswith("nccl" if on_gpu else "gloo:"), (event.time_range.start, event.time_range.end))
        for event in events
        if not on_gpu or event.device_type.name == "CUDA"
    ]
    if on_gpu and not intervals:
        return {}
    metrics = {"learner/collectives_s": covered(each for is_collective, each in intervals if is_collective) / 1e6}
    if on_gpu:
        arithmetic = covered(each for is_collective, each in intervals if not is_collective)
        metrics["learner/exposed_collectives_s"] = (covered(each for _, each in intervals) - arithmetic) / 1e6
    return metrics


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


PERCENTILES = (50, 90, 99)


def completion_metrics(groups: Sequence[Group], device: torch.device) -> dict[str, float]:
    """Return minimum, maximum and percentiles of the lengths in tokens, and the share of completions that reached a
    limit, over the batch of all ranks; nothing without completions. An episode counts as one completion of the
    tokens that it sampled, with further metrics of its transcripts, turns and versions. A collective call: every
    rank gives its part, which may be empty, and returns the same values."""
    local = [facts for group in groups for facts in _facts(group)]
    rows, _ = rows_of_all_ranks(torch.tensor(local, dtype=torch.float64, device=device).reshape(-1, 5))
    if not len(rows):
        return {}
    lengths, truncated, num_rows, num_turns, mixed = rows.cpu().numpy().T
    percentiles = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
    metrics = {
        "completion_length/min": float(lengths.min()),
        "completion_length/max": float(lengths.max()),
        **{f"completion_length/p{p}": float(n) for p, n in zip(PERCENTILES, percentiles, strict=True)},
        "truncated_fraction": float(truncated.mean()),
    }
    if num_turns.any():
        metrics |= {
            "environment/rows_per_sample": float(num_rows.mean()),
            "environment/turns_per_sample": float(num_turns.mean()),
            "environment/mixed_version_fraction": float(mixed.mean()),
        }
    return metrics


def _facts(group: Group) -> list[tuple[float, ...]]:
    """For each sample with tokens, return its number of sampled tokens, whether it is truncated, its numbers of
    transcripts and of turns (0 without an environment), and whether its tokens have several versions."""
    if group.rows is None:
        return [(len(c.token_ids), c.finish_reason == "length", 0, 0, False) for c in group.completions]
    turns = Counter(group.rows.samples[turn.row] for turn in group.rows.turns)
    facts: dict[int, tuple[float, ...]] = {}
    versions: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for sample, row in zip(group.rows.samples, group.completions, strict=True):
        versions[sample] |= {(span.session, span.step) for span in row.spans}
        tokens, truncated, num_rows = facts.get(sample, (0.0, False, 0.0))[:3]
        cut_off = bool(truncated) or row.finish_reason == "length"
        facts[sample] = (tokens + row.num_sampled, cut_off, num_rows + 1, turns[sample], len(versions[sample]) > 1)
    return list(facts.values())
