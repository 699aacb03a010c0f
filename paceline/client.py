"""The Python client: submit runs, watch and control them, request completions and scores from workers.

    with Client("127.0.0.1:7070") as client:
        run = client.submit("spec.yaml", ["grpo.max_num_steps=50"])
        for event in client.watch(run.run_id): ...

Runs, members and completions are the messages of protos/paceline/v1, whose files document each field. Every call has a
deadline; failures are errors of paceline.errors with a message for the caller, never bare gRPC errors. gRPC itself is
imported by the first `Client`, so that importing this module costs nothing.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.calls.backoff import ExponentialBackoff
from paceline.calls.connection import FIRST_BACKOFF_S, LASTING, MAX_BACKOFF_S, Connection, status_name
from paceline.errors import AccessDenied, InvalidInput, NotFound, Unavailable
from paceline.models.registered import Models
from paceline.records import Columns, Records
from paceline.tls.channels import TO_WORKER

if TYPE_CHECKING:
    import grpc

    from paceline.bundle.collecting import Bundle
    from paceline.spec import RunSpec
    from paceline.v1.rollout_pb2 import GeneratedCompletion
    from paceline.v1.run_pb2 import Run, SubmitRequest, SubmitResponse
    from paceline.v1.status_pb2 import StatusResponse
    from paceline.v1.worker_pb2 import Member

DEFAULT_ADDRESS = "127.0.0.1:7070"
OPENING_S = 3600.0
"""Seconds in which the coordinator has to open a submitted run's data set."""
VERIFY_S = 3600.0
"""Longest time in seconds for a comparison of all records of a run."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class RunState(StrEnum):
    """State of a run. Each member equals its name as text, such as `"running"`."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @classmethod
    def of(cls, run: Run) -> RunState:
        """Return the state in the protobuf message of a run."""
        from paceline.v1 import run_pb2

        return cls(run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower())


ENDED_STATES = (RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED)


def state_name(run: Run) -> str:
    """Return a run's state in lower case: queued, running, paused, succeeded, failed or cancelled."""
    return RunState.of(run).value


@dataclass(frozen=True)
class Event:
    """An event of a run."""

    sequence: int
    """Sequence number, which grows by one with each event of the run."""
    kind: str
    """`state`, `step`, `evaluation`, `member`, `checkpoint`, `session` or `warning`."""
    content: dict[str, Any]
    """Details of the event; for a step, the step's metrics by name."""


class Client(Connection):
    """Connection to one coordinator and, through it, to the workers. Safe to use from several threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = 30.0,
        wait_s: float = 0.0,
        reconnect_s: float = 60.0,
        token_file: Path | None = None,
        tls_dir: Path | None = None,
    ):
        """Raises InvalidInput for a malformed address. `timeout_s` limits each attempt of a call. `wait_s` is the time
        to retry a call while the coordinator is away; `reconnect_s` is the time to retry in `watch` and `wait` after
        the coordinator went away. `token_file` holds the coordinator's token (default: `paceline.calls.token`).
        `tls_dir` has certificates (`paceline.tls.folder`); the environment names its default."""
        from paceline.v1 import run_pb2_grpc, status_pb2_grpc

        super().__init__(address, timeout_s, wait_s, token_file, tls_dir)
        self._reconnect_s = reconnect_s
        self._runs = run_pb2_grpc.RunServiceStub(self._channel)
        self._status = status_pb2_grpc.StatusServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Runs

    def submit(self, spec: RunSpec | str | Path, overrides: Sequence[str] = (), *, wait_s: float | None = None) -> Run:
        """Queue a run from a spec or a YAML file with "section.key=value" overrides.

        If the coordinator is away, the client retries for `wait_s` seconds (default: the client's); a repeated request
        does not queue a second run. The files that the spec names on this machine travel with the run (`bundle` in the
        spec), and data are prepared here (`data.preparation`). Raises InvalidInput (SpecError for faults that the
        client finds) for a misspelt or contradictory spec, or bad data.
        """
        from paceline.models.memory_plan import checked_plan
        from paceline.spec.reading import load_spec, spec_to_yaml
        from paceline.v1.run_pb2 import SubmitRequest

        if isinstance(spec, str | Path):
            spec = load_spec(spec, tuple(overrides))
        elif overrides:
            raise InvalidInput("overrides are only for the file of a spec; change a RunSpec with its method model_copy")
        spec = checked_plan(spec)
        bundle = self._bundle_of(spec, wait_s)
        request = SubmitRequest(spec_yaml=spec_to_yaml(spec), submission=uuid.uuid4().hex, bundle=bundle)
        return self._call(lambda: self._submit(request), wait_s=wait_s).run

    def _submit(self, request: SubmitRequest) -> SubmitResponse:
        """Retry the call until the coordinator has opened the data set. It opens the data set once for all calls; a
        download may take long."""
        import grpc

        started_s = time.monotonic()
        while True:
            try:
                response: SubmitResponse = self._runs.Submit(request, timeout=self._timeout_s)
                return response
            except grpc.RpcError as error:
                waited_s = time.monotonic() - started_s
                if status_name(error) != "DEADLINE_EXCEEDED" or waited_s > OPENING_S:
                    raise
                log.warning(
                    "the coordinator at %s has been opening the run's data set for %.0f s; waiting for it",
                    self.address,
                    waited_s,
                )

    def _bundle_of(self, spec: RunSpec, wait_s: float | None) -> str:
        """Prepare a run's data, send its files, and return the digest of the bundle; empty if there are no files."""
        from paceline.bundle.collecting import collect

        if not spec.data.preparation.is_used:
            return self._send_bundle(collect(spec), wait_s)
        from paceline.data.preparation.prepared import prepared_data

        with prepared_data(spec, self.records.attempts) as prepared:
            for line in prepared.lines:
                log.warning("%s", line)
            return self._send_bundle(collect(spec, prepared=prepared.files), wait_s)

    def _send_bundle(self, bundle: Bundle, wait_s: float | None = None) -> str:
        """Send a run's files; return the digest of the bundle, empty if the bundle has no files."""
        from paceline.calls.bundle_transfer import send

        for warning in bundle.warnings:
            log.warning("%s", warning)
        wait_s = self._wait_s if wait_s is None else wait_s
        if not bundle.manifest.files:
            return ""
        send(self._channel, bundle, wait_s, self._reconnect_s)
        return bundle.manifest.digest

    def get(self, run_id: str) -> Run:
        """Return a run. Raises NotFound."""
        return self._run("Get", run_id=run_id)

    def runs(self) -> list[Run]:
        """Return all runs of the coordinator, oldest first."""
        from paceline.v1.run_pb2 import ListRequest

        runs: list[Run] = []
        request = ListRequest()
        while True:
            page = self._call(lambda: self._runs.List(request, timeout=self._timeout_s))
            runs += page.runs
            if not page.next_page_token:
                return runs
            request.page_token = page.next_page_token

    def cancel(self, run_id: str) -> Run:
        """End a run. Raises NotFound, Conflict."""
        return self._run("Cancel", run_id=run_id)

    def pause(self, run_id: str) -> Run:
        """Pause a running run: its workers get no lease, and it begins no batch. Raises NotFound, Conflict."""
        return self._run("Pause", run_id=run_id)

    def resume(self, run_id: str) -> Run:
        """Continue a paused run. A run that has failed, or whose workers serve another run now, is queued again and
        keeps its open groups. If the files of its functions are on this machine, the run continues with their current
        content. Raises NotFound, Conflict, InvalidInput."""
        return self._run("Resume", run_id=run_id, bundle=self._corrected_bundle(self.get(run_id)))

    def _corrected_bundle(self, run: Run) -> str:
        """Send the current files of a run's bundle; return the new digest, empty if the run keeps its bundle."""
        from paceline.bundle.collecting import collect_again
        from paceline.calls.bundle_transfer import fetch_manifest
        from paceline.spec.reading import spec_of_run

        if not run.bundle:
            return ""
        try:
            before = fetch_manifest(self._channel, run.bundle)
        except NotFound:  # the coordinator has lost the manifest
            before = None
        bundle = collect_again(spec_of_run(run.run_id, run.spec_yaml)[0], before)
        return self._send_bundle(bundle) if bundle is not None else ""

    def checkpoint(self, run_id: str, timeout_s: float = 600.0) -> str:
        """Order a checkpoint of the training run; return the checkpoint's folder when the checkpoint is complete. If
        the newest step already has a checkpoint, return that checkpoint's folder immediately. Raises NotFound; Conflict
        if no learner has the run; Unavailable after `timeout_s`."""
        from paceline.v1.run_pb2 import RunServiceCheckpointRequest

        request = RunServiceCheckpointRequest(run_id=run_id)
        ordered = self._call(lambda: self._runs.Checkpoint(request, timeout=self._timeout_s))
        if ordered.path:
            return str(ordered.path)
        for event in self.watch(run_id, ordered.sequence, timeout_s):
            if event.kind == "checkpoint":
                return str(event.content["path"])
        raise Unavailable(
            f"run {run_id} has no new checkpoint after {timeout_s:g} s, or has ended; see `paceline watch {run_id}`"
        )

    def drop_groups(self, run_id: str, group_ids: Sequence[int]) -> Run:
        """Remove groups from a paused run's next batch, which is fixed anew. Raises NotFound, Conflict, InvalidInput."""
        return self._run("DropGroups", run_id=run_id, group_ids=group_ids)

    def _run(self, method: str, **fields: Any) -> Run:
        """Call a method of RunService whose response has a run, and return the run."""
        from paceline.v1 import run_pb2

        request = getattr(run_pb2, f"{method}Request")(**fields)
        run: Run = self._unary(self._runs, method, request).run
        return run

    def watch(self, run_id: str, after: int = 0, timeout_s: float | None = None) -> Iterator[Event]:
        """Yield the events of a run after a sequence number as they happen, until the run ends, or for `timeout_s`. A
        broken stream resumes without repeating events: a coordinator's restart shows only as a pause. Raises
        NotFound; Unavailable if there is no coordinator at first, or none for `reconnect_s` seconds later."""
        import grpc

        from paceline.v1.run_pb2 import WatchRequest

        backoff = ExponentialBackoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        last_event_s, first = time.monotonic(), True
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                for response in self._runs.Watch(WatchRequest(run_id=run_id, after=after), timeout=left_s):
                    after, last_event_s, first = response.sequence, time.monotonic(), False
                    backoff.reset()
                    yield Event(response.sequence, response.kind, json.loads(response.json))
                return
            except grpc.RpcError as error:
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    return
                lasting = status_name(error) in LASTING
                silent = time.monotonic() - last_event_s >= (self._wait_s if first else self._reconnect_s)
                if lasting or silent or self._closed.is_set():
                    raise self._translated(error) from None
            except ValueError:  # gRPC raises it for a call on a closed channel
                raise Unavailable(f"the client of {self.address} is closed") from None
            self._closed.wait(backoff.next_s())

    def wait(self, run_id: str, timeout_s: float | None = None) -> Run:
        """Return the run once it has ended, in whatever state. A coordinator's restart shows only as a pause. Raises
        NotFound; Unavailable after `timeout_s` seconds, or if no coordinator answers for `reconnect_s`."""
        started_s = last_answer_s = time.monotonic()
        pause_s = 0.05
        while True:
            try:
                run, last_answer_s = self.get(run_id), time.monotonic()
                if state_name(run) in ENDED_STATES:
                    return run
            except Unavailable:
                if time.monotonic() - last_answer_s > self._reconnect_s:
                    raise
            if timeout_s is not None and time.monotonic() - started_s > timeout_s:
                raise Unavailable(f"run {run_id} has not ended after {timeout_s:g} s")
            if self._closed.wait(pause_s):
                raise Unavailable(f"the client of {self.address} is closed")
            pause_s = min(2 * pause_s, 1.0)

    def events(self, run_id: str, *, kind: str | None = None, after: int = 0, quiet_s: float = 0.5) -> list[Event]:
        """Return the events of a run until now, oldest first, of one `kind` or of all kinds. `watch` also yields later
        events. For a live run, the list ends after `quiet_s` without an event. Raises NotFound."""
        events: list[Event] = []
        while True:
            has_ended = state_name(self.get(run_id)) in ENDED_STATES
            page = [Event(*event[:3]) for event in self.records.events(run_id, after=after)]
            events += [event for event in page if kind in (None, event.kind)]
            if has_ended or not page or self._closed.wait(quiet_s):
                return events
            after = page[-1].sequence

    @property
    def records(self) -> Records:
        """The coordinator's records: metrics, samples, groups, token accounting, specs, logs."""
        from paceline.v1.records_pb2_grpc import RecordsServiceStub

        return Records(partial(self._unary, RecordsServiceStub(self._channel)))

    def metrics(self, run_id: str, kind: str = "step") -> Columns:
        """Return every metric of every step (or of each `evaluation`) as columns for a DataFrame, with the step's
        number as `step`. Raises NotFound."""
        return self.records.metrics(run_id, kind)

    def samples(self, run_id: str, step: int | None = None, *, limit: int = 0, **filters: Any) -> Columns:
        """Return completions of a run, or of a step, as columns for a DataFrame; `paceline.records.Records.samples`
        lists columns and filters. Raises NotFound, InvalidInput."""
        return self.records.samples(run_id, step, limit=limit, **filters)

    def groups(self, run_id: str, step: int) -> list[dict[str, Any]]:
        """Return the groups trained in a step: prompt, columns, and for each completion text, tokens, versions and
        rewards. Raises NotFound."""
        return list(self.records.groups(run_id, step))

    @property
    def models(self) -> Models:
        """The registered models: register, list, show, promote and roll back versions."""
        from paceline.v1.registry_pb2_grpc import ModelServiceStub

        return Models(partial(self._unary, ModelServiceStub(self._channel)))

    def _unary(self, stub: Any, method: str, request: Any) -> Any:
        timeout_s = VERIFY_S if method == "VerifyRun" else self._timeout_s
        return self._call(lambda: getattr(stub, method)(request, timeout=timeout_s))

    def status(self) -> StatusResponse:
        """Return the bottleneck of the training run, in words and by pool."""
        from paceline.v1.status_pb2 import StatusRequest

        return self._call(lambda: self._status.Status(StatusRequest(), timeout=self._timeout_s))

    # Workers

    def members(self) -> list[Member]:
        """Return all current members."""
        from paceline.v1.worker_pb2 import ListMembersRequest

        return list(self._unary(self._stub(), "ListMembers", ListMembersRequest()).members)

    def drain(self, member_id: str, grace_s: float = 60.0) -> int:
        """Ask a worker to finish or return its work within `grace_s` seconds and to leave; return the number of groups
        and tasks that it holds. Raises NotFound, Unavailable."""
        from paceline.v1.worker_pb2 import WorkerServiceDrainRequest

        request = WorkerServiceDrainRequest(member_id=member_id, grace_s=grace_s)
        return int(self._unary(self._stub(), "Drain", request).held)

    def generate(
        self,
        prompt: str,
        *,
        n: int = 1,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        worker: str | None = None,
        timeout_s: float = 300.0,
    ) -> list[GeneratedCompletion]:
        """Return `n` completions of a prompt with the newest weights. By default, the sampling settings are those of
        the worker's run. `worker` is the address of a rollout worker in `members()`; by default the worker with the
        newest weights. Raises Unavailable if there is no worker, NotFound for an address of no member, AccessDenied if
        another program answers there, Conflict if the worker holds no weights yet, InvalidInput."""
        if n < 1 or (temperature is not None and temperature <= 0):
            raise InvalidInput(f"n is {n} and temperature {temperature}; both must be above 0")
        from paceline.v1 import rollout_pb2, rollout_pb2_grpc

        request = rollout_pb2.GenerateRequest(prompt=prompt, n=n, seed=seed)
        if temperature is not None:
            request.params.temperature = temperature
        if max_new_tokens is not None:
            request.params.max_new_tokens = max_new_tokens
        stub = rollout_pb2_grpc.RolloutServiceStub
        method = "paceline.v1.RolloutService/Generate"
        reply = self._ask_worker(method, worker, lambda channel: stub(channel).Generate(request, timeout=timeout_s))
        return list(reply.completions)

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        functions: Sequence[str] = (),
        columns: dict[str, list[Any]] | None = None,
        *,
        worker: str | None = None,
        timeout_s: float = 300.0,
    ) -> dict[str, list[float | None]]:
        """Return scores by function, one for each completion, None if the function does not apply. `functions` are
        built-ins or functions of the current run (default: all of its functions); `columns` are lists as long as
        `completions`; `worker` is the address of a reward worker in `members()`. Raises as `generate` does."""
        from paceline.v1 import reward_pb2, reward_pb2_grpc

        request = reward_pb2.ScoreRequest(
            functions=functions, prompts=prompts, completions=completions, columns_json=json.dumps(columns or {})
        )
        stub = reward_pb2_grpc.RewardServiceStub
        method = "paceline.v1.RewardService/Score"
        reply = self._ask_worker(method, worker, lambda channel: stub(channel).Score(request, timeout=timeout_s))
        return {
            scored.function: [score.value if score.HasField("value") else None for score in scored.scores]
            for scored in reply.scores
        }

    def _ask_worker(self, method: str, address: str | None, call: Callable[[grpc.Channel], T]) -> T:
        """Call a method of the worker at an address (default: the worker of that role with the newest weights). The
        call has a ticket of the coordinator and no token, because a worker may give any address as its own."""
        from paceline.calls.proof import Credential
        from paceline.v1.access_pb2 import IssueTicketRequest
        from paceline.v1.access_pb2_grpc import AccessServiceStub

        kind = method.removeprefix("paceline.v1.").partition("Service")[0].lower()
        workers = self._workers_at(kind, address)
        for member in workers:
            request = IssueTicketRequest(member_id=member.member_id, method=method)
            issued = self._unary(AccessServiceStub(self._channel), "IssueTicket", request)
            known = partial(Credential.of_ticket, issued.ticket)
            with self._channel_to(member.address, TO_WORKER, known) as channel:
                try:
                    return self._call(partial(call, channel), f"{kind} worker at {member.address}")
                except AccessDenied:  # perhaps another worker gives this address, and does not listen there
                    if member is workers[-1]:
                        raise
        raise AssertionError("the last worker's answer is returned, or its error raised")

    def _workers_at(self, kind: str, address: str | None) -> list[Member]:
        """Return the worker of a role that has the newest weights, or all workers that give `address` as theirs."""
        from paceline.v1.common_pb2 import Role

        role = Role.Value(f"ROLE_{kind.upper()}")
        workers = [m for m in self.members() if m.role == role and m.address and address in (None, m.address)]
        if not workers and address:
            raise NotFound(
                f"no {kind} worker at {address} belongs to {self.address}; `paceline status` shows the addresses"
            )
        if not workers:
            raise Unavailable(f"no {kind} worker with an address belongs to {self.address}; start one with "
                              f"`paceline serve {kind} --coordinator {self.address} --port 0`")  # fmt: skip
        newest = max(workers, key=lambda m: (m.HasField("version"), m.version.step, -m.silent_s))
        return workers if address else [newest]

    def _stub(self) -> Any:
        from paceline.v1.worker_pb2_grpc import WorkerServiceStub

        return WorkerServiceStub(self._channel)
