"""The log of a run: its events, its metrics by step, its summary. The ledger has them; files show them. `write_down` is
called inside the transaction of the cause, so an event exists exactly if its cause does. The metrics of a step are
collected from the batch, the learner's rank 0, the workers' heartbeats and the last publish."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.host.gpu_gauges import ENERGY, XID
from paceline.host.resources import process_gauges
from paceline.rate_limited_log import unforeseen
from paceline.services.common.worker.score_extras import FunctionSums, LoggedMetrics
from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.exchange.workers import Throughput
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.reporting.metrics_files import SUMMARY_NAME, MetricsFiles, write_summary
from paceline.services.coordinator.reporting.otel import StepMeters, WeightMeters
from paceline.services.coordinator.reporting.rules import Rules, no_signal, out_of_scale, rules_of
from paceline.services.coordinator.reporting.weight_metrics import VersionRecord, WeightRecords
from paceline.services.coordinator.text_limits import bounded_metrics, cut, one_line, seconds
from paceline.v1 import worker_pb2
from paceline.wire import decode_result, decode_rewards

TIME = "milliseconds"
"""Name of the counter of milliseconds for which a run was active."""

STEP_WARNINGS = {"steps:no_signal": no_signal, "steps:out_of_scale": out_of_scale}
"""Functions that warn of a step. The key is the name of the counter of the steps with this warning."""

POOL_NAMES = {"reward": "reward_workers", "environment": "environment_workers"}
"""Names of pools in metrics, where they differ from the role: `reward/` has metrics of the run's reward functions, and
`environment/` those of its episodes. The key is the role."""

log = logging.getLogger(__name__)


class RunLog:
    def __init__(self, ledger: Ledger, exchange: Exchange, members: Members):
        self._ledger = ledger
        self._exchange = exchange
        self._members = members
        self._recorder: MetricsFiles | None = None
        self._learner: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._versions = WeightRecords()
        self._meters, self._step_meters = WeightMeters(), StepMeters()
        self._energy = Energy()
        self._pace = SamplingPace(exchange.workers.throughput)
        self._rules: Rules | None = None
        """Rules on the run's metrics; None before the first step that this coordinator records."""
        self._run_id = ""
        self._counted_s = time.monotonic()
        """Monotonic time up to which the ledger has counted the run's active time."""

    def open(self, run_id: str, directory: Path, *, tensorboard: bool) -> None:
        """Create or continue the files of a run. Raises OSError."""
        next_step = int(self._ledger.run(run_id)["next_step"])
        evaluated = self._ledger.evaluations.finished_steps(run_id)

        def is_ahead(kind: str, step: int) -> bool:
            if kind == "eval":
                return step not in evaluated
            return step >= next_step if kind == "train" else step > next_step

        self._recorder = MetricsFiles(directory, tensorboard=tensorboard, next_step=next_step, is_ahead=is_ahead)
        self._run_id, self._counted_s = run_id, time.monotonic()
        self._learner, self._weights, self._versions, self._rules = {}, {}, WeightRecords(), None
        self._pace = SamplingPace(self._exchange.workers.throughput)

    def close(self, summary: dict[str, Any] | None = None) -> None:
        if self._recorder is not None:
            self._write_versions(self._versions.close())
            if summary is not None:
                self._summarize(self._recorder.directory, summary)
            self._recorder.close()
            self._recorder = None

    def summarize(self, run_id: str) -> None:
        """Write the summary of a paused run, so that its reason can be read beside the run."""
        directory = self._ledger.run_directory(run_id)
        if os.path.isdir(directory):
            self._summarize(directory, self.summary(run_id))

    def resume(self, run_id: str) -> None:
        """Measure the pace anew, because a run continues, and remove its summary. If the removal fails, the summary is
        overwritten at the end of the run."""
        if run_id == self._run_id:
            self._pace = SamplingPace(self._exchange.workers.throughput)
        with contextlib.suppress(OSError):
            (self._ledger.run_directory(run_id) / SUMMARY_NAME).unlink(missing_ok=True)

    def summarize_if_missing(self, run_id: str) -> None:
        """Write an ended run's summary if a kill or an unwritable folder left none, or only the pause's summary."""
        directory = self._ledger.run_directory(run_id)
        if os.path.isdir(directory) and _summarized_state(directory) in (None, "paused"):
            self._summarize(directory, self.summary(run_id))

    def _summarize(self, directory: Path, summary: dict[str, Any]) -> None:
        """Write a summary. An unwritable folder does not prevent the run's end, because the ledger has all data."""
        try:
            write_summary(directory, summary)
        except OSError as error:
            log.warning("%s cannot be written: %s; the next start retries", directory / SUMMARY_NAME, error)

    def write_down(self, notices: list[Notice]) -> None:
        """Record events and metrics of the exchange's notices, and begin due evaluations."""
        run = self._exchange.active
        if run is None:
            return
        for notice in notices:
            match notice.kind:
                case "metrics":
                    self._learner = bounded_metrics(notice.content["metrics"])
                case "step":
                    self._on_step(run, notice.content["step"], notice.content["metrics"])
                case "evaluated":
                    self._ledger.add_event(run.run_id, "evaluation", notice.content)
                    self._record("eval", notice.content["step"], _numbers(notice.content))
                    self._write_text(run, notice.content)
                case "extra":
                    if self._recorder is not None:
                        self._recorder.write_extra(notice.content["line"])
                case "warning":
                    log.warning("run %s: %s", run.run_id, one_line(notice.content["message"]))
                    self._ledger.add_event(run.run_id, "warning", notice.content)

    def note_staged(self, report: worker_pb2.StagedReport, epoch: int, members: int) -> None:
        self._weights |= {
            "weights/gather_s": seconds(report.gather_s),
            "weights/wait_s": seconds(max(report.wait_s, report.gather_s)),
        }
        self._write_versions(self._versions.stage(report, epoch, members))

    def note_pause(self, ack: worker_pb2.WeightAck) -> None:
        self._weights |= {"weights/pause_s": seconds(ack.pause_s), "weights/swap_s": seconds(ack.swap_s)}
        self._versions.acknowledge(ack)

    def note_publish(self, report: worker_pb2.PublishReport) -> None:
        self._write_versions(self._versions.publish(report))
        if not report.ok:
            return
        self._weights["weights/publish_s"] = seconds(report.publish_s)
        self._weights["weights/transfer_s"] = seconds(report.transfer_s)
        self._weights["weights/size_bytes"] = float(report.size_bytes)

    def summary(self, run_id: str) -> dict[str, Any]:
        """Return the content of summary.json: outcome, token accounting, evaluations. Raises NotFound."""
        row, books = self._ledger.run(run_id), self._ledger.token_books(run_id)
        evaluations = self._ledger.evaluations.results(run_id)
        rewards = [e["reward"] for e in evaluations if e.get("reward") is not None]
        tokens = {f"{name}_tokens": books[name] for name in ("generated", "trained", "dropped", "live", "wasted")}
        return {
            "run_id": run_id,
            "state": row["state"],
            "message": row["message"],
            "steps": row["next_step"],
            "samples": self._ledger.trained_samples(run_id),
            "seconds": self._seconds(run_id),
            "reward_before": rewards[0] if len(rewards) > 1 else None,
            "reward_after": rewards[-1] if rewards else None,
            "evaluations": evaluations,
            **tokens,
            "groups": self._ledger.groups_by_state(run_id),
            "failures": self._ledger.failures(run_id),
            "learner_sessions": row["session"],
            "chain": row["chain"],
            "export_path": self._ledger.export_path(run_id),
        }

    def _seconds(self, run_id: str) -> float:
        """Return the active time over all lives of the coordinator, not by the wall clock, which may be set back."""
        seconds = self._ledger.counters(run_id).get(TIME, 0) / 1000
        if run_id == self._run_id and self._recorder is not None:
            seconds += time.monotonic() - self._counted_s
        return round(seconds, 3)

    def _count_time(self) -> None:
        """Add the active time since the last call to the ledger. Call it inside a transaction."""
        now_s = time.monotonic()
        elapsed_ms = int((now_s - self._counted_s) * 1000)
        self._ledger.count(self._run_id, TIME, elapsed_ms)
        self._counted_s += elapsed_ms / 1000

    def _on_step(self, run: ActiveRun, step: int, metrics: dict[str, float]) -> None:
        self._count_time()
        metrics = metrics | self._learner | self._weights | self._pool_gauges() | self._logged()
        metrics |= self._energy.metrics(
            [member.measures.gauges for member in self._members.all()], metrics.get("trained_tokens", 0.0)
        )
        for state, number in self._ledger.groups_by_state(run.run_id).items():
            metrics[f"groups/{state}"] = number
        counters = self._ledger.counters(run.run_id)
        metrics |= _totals(counters)
        if run.prompts is not None and len(run.prompts):
            metrics["epochs"] = counters.get("groups:ever_admitted", 0) / len(run.prompts)
        self._learner = {}
        for prefix, version in (("validation_before/", step), ("validation/", step + 1)):
            metrics = self._note_validation(run, metrics, prefix, version)
        self._ledger.add_event(run.run_id, "step", {"step": step, "time": time.time(), **_numbers(metrics)})
        self._record("train", step, metrics)
        self._warn_of_step(run, step, metrics)
        self._apply_rules(run, step, metrics)
        grpo, trained = run.spec.grpo, step + 1
        final = trained == run.num_steps
        due = grpo.val_period and trained % grpo.val_period == 0
        if run.validation is not None and (grpo.val_at_end if final else due):
            evaluation.begin(self._exchange, run, trained)

    def _warn_of_step(self, run: ActiveRun, step: int, metrics: dict[str, float]) -> None:
        """Warn of a step that trained nothing or is out of scale: at the first such step, the second, the fourth, the
        eighth and so on."""
        for counter, explain in STEP_WARNINGS.items():
            text = explain(run.spec, metrics)
            if not text:
                continue
            self._ledger.count(run.run_id, counter)
            number = self._ledger.counters(run.run_id)[counter]
            if number & (number - 1) == 0:
                so_far = f" ({number} such steps in this run)" if number > 1 else ""
                message = f"step {step}: {text}{so_far}"
                log.warning("run %s: %s", run.run_id, message)
                self._ledger.add_event(run.run_id, "warning", {"message": message})

    def _apply_rules(self, run: ActiveRun, step: int, metrics: dict[str, float]) -> None:
        if self._rules is None:
            self._rules = Rules(rules_of(run.spec.logger))
            self._rules.replay(self._ledger.step_metrics(run.run_id, step, self._rules.reach))
        for broken in self._rules.check(metrics):
            message = f"step {step}: {broken.message}"
            log.warning("run %s: %s", run.run_id, one_line(message))
            content = {"message": message, "rule": str(broken.rule), "metric": broken.metric, "value": broken.value}
            self._ledger.add_event(run.run_id, "warning", content)

    def _write_versions(self, records: list[VersionRecord]) -> None:
        for record in records:
            self._meters.record(self._run_id, record)
            self._record("weights", record.version.step, record.metrics())

    def _note_validation(
        self, run: ActiveRun, metrics: dict[str, float], prefix: str, version: int
    ) -> dict[str, float]:
        """Record the learner's metrics on held-out examples at a version; return the other metrics."""
        found = {n.removeprefix(prefix): v for n, v in metrics.items() if n.startswith(prefix)}
        if found:
            result = {"step": version, **_numbers(found)}
            self._ledger.evaluations.add_result(run.run_id, version, result)
            self._ledger.add_event(run.run_id, "evaluation", result)
            self._record("eval", version, found)
        return {name: value for name, value in metrics.items() if not name.startswith(prefix)}

    def _pool_gauges(self) -> dict[str, float]:
        paces = self._pace.take()
        totals = {"coordinator/unforeseen_errors": float(unforeseen.total)}
        totals.update((f"coordinator/{name}", value) for name, value in process_gauges().items())
        for member in self._members.all():
            pool = POOL_NAMES.get(member.role_name, member.role_name)
            for name, value in member.measures.gauges.items():
                if not is_added_up(name):
                    continue
                totals[f"{pool}/{name}"] = paces.get(name, totals.get(f"{pool}/{name}", 0.0) + value)
        return totals

    def _logged(self) -> dict[str, float]:
        """Return means of metrics that reward functions logged since the last step, and their times and failures."""
        logged, functions = LoggedMetrics(), FunctionSums()
        for member in self._members.all():
            logged.add(member.measures.logged.take())
            functions.add(member.measures.functions.take())
        return logged.means() | functions.metrics()

    def _write_text(self, run: ActiveRun, result: dict[str, Any]) -> None:
        if self._recorder is not None and run.spec.logger.tensorboard:
            functions = [reward.label for reward in run.spec.rewards]
            text = evaluation_text(self._ledger, run.run_id, f"eval:{result['requested_step']}", functions)
            self._recorder.write_text("eval/samples", result["step"], text)

    def _record(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if kind != "weights":  # weights have meters with histograms
            self._step_meters.record(self._run_id, kind, step, metrics)
        if self._recorder is not None:
            self._recorder.write(kind, step, metrics)


def _totals(counters: dict[str, int]) -> dict[str, float]:
    """Return the run's numbers of dropped groups and of failed attempts until now, by reason, as metrics."""
    named = {"groups:dropped:": "dropped/", "failures:": "failures/"}
    return {
        metric + name.removeprefix(counter): float(value)
        for name, value in counters.items()
        for counter, metric in named.items()
        if name.startswith(counter)
    }


def _summarized_state(directory: Path) -> str | None:
    """Return the state in a folder's summary; None without a summary, empty for one that cannot be read."""
    try:
        summary: Any = json.loads((directory / SUMMARY_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return ""
    return str(summary.get("state", "")) if isinstance(summary, dict) else ""


def _numbers(content: dict[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in content.items() if isinstance(v, int | float) and math.isfinite(v)}


MAX_GPUS = 10_000


class Energy:
    """Computes the energy of the GPUs by step, from the differences of the counters in the members' gauges. A GPU of
    several members counts once. A new GPU, or one whose driver was reloaded, counts from its second reading on."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def metrics(self, members: Iterable[Mapping[str, float]], trained_tokens: float) -> dict[str, float]:
        """Return the energy since the last call in joules, and joules per trained token; empty without GPUs."""
        now: dict[str, float] = {}
        for gauges in members:
            for name, value in gauges.items():
                if name.startswith(ENERGY) and (name in now or len(now) < MAX_GPUS):
                    now[name] = max(value, now.get(name, value))
        increases = [value - self._before[name] for name, value in now.items() if name in self._before]
        self._before |= now
        if not increases:
            return {}
        joules = sum(value for value in increases if value > 0)
        found = {"gpu_energy_j": joules}
        return found | ({"joules_per_trained_token": joules / trained_tokens} if trained_tokens > 0 else {})


class SamplingPace:
    """Measures the pace of sampling between two steps. Groups come in bursts, so a worker's pace at its last heartbeat
    differs from the mean of a step."""

    def __init__(self, throughput: Throughput, clock: Callable[[], float] = time.monotonic):
        self._throughput, self._clock = throughput, clock
        self._counted = (clock(), throughput.tokens, throughput.turns)
        """Clock, tokens and turns at the last step."""

    def take(self) -> dict[str, float]:
        """Return the means since the last call, by the name of the workers' gauge."""
        since_s, tokens, turns = self._counted
        now_s, throughput = self._clock(), self._throughput
        self._counted = (now_s, throughput.tokens, throughput.turns)
        elapsed_s = max(now_s - since_s, 1e-6)
        return {
            "tokens_per_s": (throughput.tokens - tokens) / elapsed_s,
            "turns_per_s": (throughput.turns - turns) / elapsed_s,
        }


def is_added_up(gauge: str) -> bool:
    """Return whether the sum of a gauge over members is meaningful."""
    return gauge != XID and not gauge.startswith(ENERGY)


PROMPTS = 3
"""Largest number of prompts in the text of an evaluation."""

MAX_BYTES = 2000
"""Largest number of bytes of a prompt or a completion in the text of an evaluation."""


def evaluation_text(ledger: Ledger, run_id: str, kind: str, functions: Sequence[str]) -> str:
    """Return the first scored groups of an evaluation's class as Markdown; empty if none is kept or can be read."""
    rows = [row for row in ledger.group_queries.of_class(run_id, kind) if row["state"] == State.SCORED]
    try:
        texts = [_group_text(ledger, run_id, row, functions) for row in rows[:PROMPTS]]
    except PacelineError:  # `verify` reports damage; the text is optional
        return ""
    return "\n\n---\n\n".join(texts)


def _group_text(ledger: Ledger, run_id: str, row: sqlite3.Row, functions: Sequence[str]) -> str:
    payload = ledger.payload(run_id, row["group_id"])
    if payload is None:
        return ""
    texts, arrays = payload.read()
    _, completions = decode_result(arrays, texts)
    rewards_CF = decode_rewards(np.frombuffer(row["rewards"], "<f4").tolist(), len(completions))
    prompt = json.loads(ledger.group_queries.prompt(run_id, row["group_id"]) or '""')
    if not isinstance(prompt, str):
        prompt = "\n".join(f"[{message['role']}] {message['content']}" for message in prompt)
    parts = [_quoted(prompt)]
    for completion, rewards_F in zip(completions, rewards_CF.tolist(), strict=True):
        values = ", ".join(f"{name} {value:.3g}" for name, value in zip(functions, rewards_F, strict=True))
        parts.append(f"**{values}** ({len(completion.token_ids)} tokens)\n\n{_quoted(completion.text)}")
    return "\n\n".join(parts)


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in cut(text, MAX_BYTES).splitlines() or [""])
