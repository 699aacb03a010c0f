"""Runs: which one trains, how it begins and ends.

One owner for each thing: the ledger holds runs and groups, `Pool` who is there and works on what, this class the run.
Everything runs on one event loop; `lock` serialises transactions with the exchange's. What it decides:

  a run starts    when none is active; its data sets are opened first
  a run pauses    when a person says so, or when it cannot go on for now: with the reason, and tried again by itself where
                  waiting may help (`services/coordinator/lifecycle/worker_faults.py`). A person's pause is ended by a person alone. One whose
                  spec this version cannot read leaves other runs their turn
  a run fails     by the fault of its spec, before its first step. It keeps what is open, and `resume` queues it again
  a run ends      when all steps are trained, the learner has exported, and no evaluation is pending
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sqlite3
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from paceline.backoff import ExponentialBackoff
from paceline.data.examples import check_example
from paceline.data.rows import PromptSource, open_prompts, open_rows
from paceline.errors import Busy, Conflict, DataError, InvalidInput, LedgerFault, PacelineError, SpecError
from paceline.files import function_files
from paceline.files.storage import Folder
from paceline.rate_limited_log import unforeseen
from paceline.spec import RunSpec
from paceline.spec.reading import spec_from_ledger, spec_of_run, spec_to_yaml, submitted_spec
from services.coordinator.exchange import evaluation
from services.coordinator.exchange.batches import dropping, session_faults
from services.coordinator.exchange.state import ActiveRun, Exchange, Notice
from services.coordinator.exchange.transport.server import ExchangeServer
from services.coordinator.exchange.uploads.group_checks import refuse_large_groups
from services.coordinator.exchange.uploads.prompt_check import PromptCheck
from services.coordinator.ledger import pruning
from services.coordinator.ledger.ledger import ACTIVE_STATES, Ledger
from services.coordinator.ledger.restored_backup import free_name
from services.coordinator.lifecycle.dataset_openings import Openings
from services.coordinator.lifecycle.worker_faults import AGAIN, Faults
from services.coordinator.members.registry import Members
from services.coordinator.pool.pool import Pool
from services.coordinator.reporting.run_log import RunLog
from services.coordinator.reporting.watchdog import Watchdog
from services.coordinator.sessions import starting_point
from services.coordinator.text_limits import one_line

TICK_S = 0.5
MAX_SUBMISSION = 128
MAX_TO_READ = 16
"""Specs that are being read or wait for it; reading one is bounded in time."""
HEAR_S = 5.0
"""How long a coordinator that was told to stop listens for workers that were told so too; they say it every second."""

log = logging.getLogger(__name__)


class Coordinator:
    """The run that trains; `pool` has the workers on it."""

    def __init__(
        self,
        ledger: Ledger,
        directory: Path,
        members: Members,
        host: str,
        exchange_port: int,
        min_free_bytes: int = 0,
        functions_from: Sequence[Path] = (),
    ):
        self.ledger = ledger
        self._functions_from = functions_from
        self.committed = Ledger(ledger.path, read_only=True)
        """What others are told is read here: a transaction under way does not show."""
        self.directory = directory
        self.members = members
        self.lock = asyncio.Lock()
        self.exchange = Exchange(ledger)
        self.run_log = RunLog(ledger, self.exchange, members)
        self.watchdog = Watchdog(ledger, self.exchange, members, ledger.path.parent, min_free_bytes)
        self._prompts = PromptCheck(ledger.path)
        self.server = ExchangeServer(
            self.exchange, self.lock, self.run_log.write_down, self.act_on, host, exchange_port, self._prompts
        )
        self.changed = asyncio.Condition()
        """Notified when events were added or `stopping` was set, for Watch."""
        self.stopping = False
        self.faults = Faults(self)
        self.pool = Pool(self, members)
        self._reading = asyncio.Lock()
        """Held while a thread reads a spec: one at a time leaves the loop its turn."""
        self._retried = ""
        """The run that is paused and tried again by itself."""
        self.waits_for = ""
        """Why workers are asked to come back later: the run that they may be working on is not open yet."""
        self._open_again_s = 0.0
        """When the data of the run that is due may be opened again, by the monotonic clock."""
        self._pause = ExponentialBackoff()
        self._openings = Openings()
        self._passed_over: set[str] = set()
        """Runs whose spec this version cannot read, while there are others."""
        self._to_read = 0
        """Specs that are being read or wait for it."""
        self._finished_session = 0
        self._fault: LedgerFault | None = None
        ledger.on_fault = self._on_fault

    async def recover(self) -> None:
        """Takes up the run that was active. Before anyone may connect: a worker that asks about a run which is not
        active is told that it is over.
        """
        for row in self.ledger.runs():
            if row["state"] not in ("queued", *ACTIVE_STATES):
                self._summarize(row["run_id"])
        active = self.ledger.active_run()
        if active is not None and active["state"] == "paused" and self.ledger.is_retried(active["run_id"]):
            self._retried = active["run_id"]
        await self._fill_in()
        await self._start_next()
        if self.ledger.set_aside is not None:
            message = (
                f"the ledger is a backup that was put back; what was beside it is in {self.ledger.set_aside} now. What the "
                "run has written since the backup stays, and nothing loads it"
            )
            log.warning("%s", message)
            await self.warn([message])

    def _summarize(self, run_id: str) -> None:
        """The summary of an ended run, if a kill prevented it."""
        try:
            self.run_log.summarize_if_missing(run_id)
        except sqlite3.Error:
            raise
        except Exception as error:  # whatever a damaged row of it raises: it keeps no other run from going on
            unforeseen.note(f"the summary of run {run_id}", error)

    async def _fill_in(self) -> None:
        """Steps and warnings of runs that an earlier version has recorded without them."""
        for row in self.ledger.runs_without_num_steps():
            steps, warnings = await asyncio.to_thread(_facts_of, row["spec_yaml"])
            with self.ledger.transaction(synced=False):
                columns = {"max_num_steps": steps, "warnings_json": json.dumps(warnings)}
                self.ledger.update_run(row["run_id"], **columns)

    async def run_forever(self) -> None:
        """Starts queued runs and expires silent members, until cancelled. Raises LedgerFault when the disk has refused a
        transaction, whosever it was: a worker that is told of it would only come back for ever.
        """
        watching = asyncio.create_task(self.pool.lag.watch())
        try:
            while True:
                await self._tick()
                await asyncio.sleep(TICK_S)
        finally:
            watching.cancel()

    async def _tick(self) -> None:
        if self._fault is not None:
            raise self._fault
        for duty in (self._start_next, self._look_after, self._look_on, self._tidy_up):
            try:
                await duty()
            except (LedgerFault, sqlite3.Error):
                raise
            except Exception as error:  # one member's or one run's; the next tick tries again
                unforeseen.note("the coordinator's duties", error)

    async def _look_after(self) -> None:
        if not self.waits_for:  # nobody may come then, so nobody is silent
            await self.pool.expire_silent()

    async def _look_on(self) -> None:
        await self.faults.look(time.monotonic())
        await self.warn([*self.watchdog.look(time.monotonic()), *self._prompts.take_warnings()])

    async def _tidy_up(self) -> None:
        await self._prune()
        self.ledger.remove_unused_segments()

    async def _prune(self) -> None:
        """Forgets some of what the active run does not need any more."""
        run = self.exchange.active
        if run is None or run.prompts is None or run.spec.logger.keep_samples:
            return
        async with self.lock:
            if pruning.is_due(self.ledger, run.run_id, run.batch):
                with self.ledger.transaction(synced=False):
                    pruning.prune(self.ledger, run.run_id, run.batch)

    def _on_fault(self, fault: LedgerFault) -> None:
        self._fault = fault

    async def submit(self, spec_yaml: str, submission: str = "") -> str:
        """Checks a spec and its data sets, and queues a run; returns its id, the same for the same `submission`.

        Raises SpecError, DataError, Unreadable, Busy.
        """
        if len(submission) > MAX_SUBMISSION:
            raise InvalidInput(
                f"the name of a submission has {len(submission)} characters, not {MAX_SUBMISSION} at most"
            )
        spec, text = await self._read(spec_yaml)
        refuse_large_groups(spec)
        if why := function_files.refusal(spec, self._functions_from):
            raise SpecError(why)
        if submission and (known := self.ledger.run_of_submission(submission)) is not None:
            return known
        await self._openings.open(submission or uuid.uuid4().hex, partial(_open_data, spec))
        if spec.checkpointing.checkpoint_dir:
            Folder(spec.checkpointing.checkpoint_dir)
        async with self.lock:
            known = self.ledger.run_of_submission(submission) if submission else None
            if known is not None:
                return known
            with self.ledger.transaction():
                run_id = f"{spec.name}-{self.ledger.num_runs() + 1}"
                directory = self.directory / run_id
                self.ledger.add_run(run_id, text, str(directory), spec.max_num_steps, spec.warnings)
                queued = {"state": "queued"} | ({"submission": submission} if submission else {})
                self.ledger.add_event(run_id, "state", queued)
                for warning in spec.warnings:
                    self.ledger.add_event(run_id, "warning", {"message": warning})
            self._make_run_directory(directory, text)
        log.info("run %s is queued", run_id)
        await self.tell_watchers()
        return run_id

    async def _read(self, spec_yaml: str) -> tuple[RunSpec, str]:
        """A submitted spec and its resolved text, read on a thread. Raises SpecError, Busy."""
        if self._to_read == MAX_TO_READ:
            raise Busy(f"{self._to_read} specs are being read; submit again later")
        self._to_read += 1
        try:
            async with self._reading:
                return await asyncio.to_thread(_read_submitted, spec_yaml)
        finally:
            self._to_read -= 1

    def _make_run_directory(self, directory: Path, spec_yaml: str) -> None:
        """The run's folder: its spec, and links to what it shares with its neighbours. One of that name that is there is of a run
        that this ledger does not know."""
        if directory.exists() and any(directory.iterdir()):
            place = free_name(directory.with_name(f"{directory.name}.set-aside"))
            directory.rename(place)
            log.warning("%s is of a run that this ledger does not know; it is %s now", directory, place)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "spec.yaml").write_text(spec_yaml)
        for shared in (self.ledger.path, self.directory / "logs"):
            link = directory / shared.name
            if shared.exists() and not link.is_symlink():
                link.symlink_to(Path("..") / shared.name)

    async def cancel(self, run_id: str) -> None:
        """Ends a run, also one that has failed and may be resumed. Raises NotFound; Conflict when it has ended."""
        row = self.ledger.run(run_id)
        if row["state"] not in ("queued", "failed", *ACTIVE_STATES):
            raise Conflict(f"run {run_id} has {row['state']} already")
        await self.end(run_id, "cancelled", "cancelled by request")

    async def pause(self, run_id: str) -> None:
        """A person pauses a run; nobody but a person ends that. Raises NotFound, Conflict."""
        async with self.lock:
            row = self.ledger.run(run_id)
            if row["state"] != "running" and self._retried != run_id:
                raise Conflict(f"run {run_id} is {row['state']}, not running")
            with self.ledger.transaction():
                self._set_state(run_id, "paused")
            self._retried = ""
        self.server.wake("lease", "batch")
        await self.tell_watchers()

    async def resume(self, run_id: str) -> None:
        """Goes on with a run that is paused, and queues one that has failed. Raises NotFound, Conflict."""
        async with self.lock:
            row = self.ledger.run(run_id)
            if row["state"] not in ("paused", "failed"):
                raise Conflict(f"run {run_id} is {row['state']}, neither paused nor failed")
            goes_on = row["state"] == "paused" and run_id not in self._passed_over
            with self.ledger.transaction():
                self._set_state(run_id, "running" if goes_on else "queued")
                self.ledger.update_run(run_id, dropped_in_a_row=0)
                session_faults.forget(self.exchange, run_id)
                starting_point.clear_marks(self.ledger, run_id)  # a person may have put them back
            self._passed_over.discard(run_id)
            self._open_again_s = 0.0
            if self._retried == run_id:
                self._retried = ""
        if self.exchange.active is None or self.exchange.active.run_id == run_id:
            self.faults.forget()  # those of another run are not what the person looked at
        self.server.wake("lease", "batch")
        if self.exchange.active is not None:
            await self.pool.assignments.assign_all()
        await self.tell_watchers()

    async def drop_groups(self, run_id: str, group_ids: list[int]) -> None:
        """Takes groups out of the batch that is fixed and not trained; the learner then begins a new session. Raises NotFound,
        Conflict, InvalidInput.
        """
        async with self.lock:
            row, run = self.ledger.run(run_id), self.exchange.active
            if row["state"] != "paused" or run is None or run.run_id != run_id:
                raise Conflict(
                    f"run {run_id} is {row['state']}; groups are dropped only while it is paused (`paceline pause`)"
                )
            with self.ledger.transaction():
                dropping.drop(self.exchange, run, group_ids, time.monotonic())
                notices = self.exchange.take_notices()
                self.run_log.write_down(notices)
        self.pool.assignments.end_session()
        self.server.wake("lease", "batch")
        await self.tell_watchers()

    async def pause_on_fault(self, run_id: str, message: str, *, retried: bool = False) -> None:
        """The run cannot go on, and nothing is lost: whoever looks into it decides, unless it is tried again by itself.

        A person's pause stays a person's. Does nothing where the same was said already.
        """
        async with self.lock:
            row = self.ledger.run(run_id)
            retrying = self._retried == run_id
            if row["state"] not in ("queued", "running") and not (row["state"] == "paused" and retrying):
                return
            if retrying and retried and row["message"] == message:
                return
            with self.ledger.transaction():
                self._set_state(run_id, "paused", message, retried=retried)
            self._retried = run_id if retried else ""
        log.warning("run %s is paused: %s", run_id, one_line(message))
        self.server.wake("lease", "batch")
        await self.tell_watchers()

    async def take_up(self, run_id: str) -> None:
        """What a run was paused for is over; it goes on unless a person has paused it."""
        async with self.lock:
            if self._retried != run_id or self.ledger.run(run_id)["state"] != "paused":
                return
            with self.ledger.transaction():
                self._set_state(run_id, "running")
            self._retried = ""
        log.info("run %s goes on", run_id)
        self.server.wake("lease", "batch")
        await self.tell_watchers()

    def _set_state(self, run_id: str, state: str, message: str = "", **facts: bool | str) -> None:
        """State and message of a run, with the event that says so; in a transaction."""
        self.ledger.update_run(run_id, state=state, message=message)
        content = {"state": state} | ({"message": message} if message else {})
        self.ledger.add_event(run_id, "state", content | {name: fact for name, fact in facts.items() if fact})

    async def _start_next(self) -> None:
        """Makes the active run, or the next queued one, the exchange's run; later, where it cannot be read just now."""
        if self.exchange.active is not None or time.monotonic() < self._open_again_s:
            return
        row = self.ledger.due_run(self._passed_over) or self.ledger.due_run()
        if row is None:
            return
        run_id = row["run_id"]
        try:
            spec, warnings = await asyncio.to_thread(spec_of_run, run_id, row["spec_yaml"])
        except SpecError as error:
            await self._pass_over(row, error)
            return
        try:
            prompts, validation = await asyncio.to_thread(_open_data, spec)
            directory = self.ledger.run_directory(run_id)
            self.run_log.open(run_id, directory, tensorboard=spec.logger.tensorboard)
        except (PacelineError, OSError) as error:
            await self._put_off(row, error)
            return
        self._pause.reset()
        told = spec_to_yaml(spec) if warnings else row["spec_yaml"]
        warnings += self._changed_data(run_id, spec, prompts)
        run = ActiveRun(run_id, spec, prompts, validation, told)
        async with self.lock:
            row = self.ledger.run(run_id)
            if row["state"] not in ("queued", *ACTIVE_STATES):
                self.run_log.close()
                return  # cancelled while its data were opened
            with self.ledger.transaction():
                if row["state"] == "queued" or (row["state"] == "paused" and self.ledger.is_retried(run_id)):
                    self._set_state(
                        run_id, "running", data=prompts.fingerprint if prompts is not None else ""
                    )
                self._retried = ""
                for warning in warnings:
                    self.ledger.add_event(run_id, "warning", {"message": warning})
                self.exchange.active = run
                self.exchange.places_changed()
                if validation is not None and spec.grpo.val_at_start:
                    evaluation.begin(self.exchange, run, 0)
        self._finished_session = 0
        self.faults.forget()
        if self.waits_for:
            self.waits_for = ""
            self.members.clear_crashes(math.inf, time.monotonic())
            self.pool.expect_holders()
        if prompts is not None:
            self._prompts.begin(run_id, spec)
        log.info("run %s starts at step %d of %d", run_id, row["next_step"], spec.max_num_steps)
        await self.pool.assignments.assign_all()
        await self.tell_watchers()

    async def _pass_over(self, row: sqlite3.Row, error: SpecError) -> None:
        """The run that is due has a spec that this version cannot read. Other runs are not kept waiting for another version:
        this one is paused and keeps what is open. Alone, it is put off, and its workers keep what they hold.
        """
        run_id = row["run_id"]
        if self.ledger.due_run({*self._passed_over, run_id}) is None:
            await self._put_off(row, error)
            return
        message = f"{error}. Other runs go first"
        async with self.lock:
            row = self.ledger.run(run_id)
            if row["state"] not in ("queued", *ACTIVE_STATES):
                return
            by_a_person = row["state"] == "paused" and not self.ledger.is_retried(run_id)
            with self.ledger.transaction():
                self.exchange.set_aside(run_id)
                self._set_state(run_id, "paused", message, retried=not by_a_person)
            self._passed_over.add(run_id)
            if self._retried == run_id:
                self._retried = ""
        log.warning("run %s is passed over: %s", run_id, message)
        await self.tell_watchers()

    def _changed_data(self, run_id: str, spec: RunSpec, prompts: PromptSource | None) -> list[str]:
        """A warning when the prompts are not those that the run began with."""
        before = self.ledger.data_fingerprint(run_id)
        if prompts is None or before in ("", prompts.fingerprint):
            return []
        return [
            f"the data set {spec.data.train!r} is not what it was when the run began ({before}; now {prompts.fingerprint}): "
            "further prompts are drawn from it as it is now"
        ]

    async def _put_off(self, row: sqlite3.Row, error: Exception) -> None:
        """The run that is due cannot be started: it fails where only another spec would help, else it is tried again."""
        run_id = row["run_id"]
        if isinstance(error, DataError) and row["next_step"] == 0 and row["session"] == 0:
            await self.fail(run_id, str(error))
            return
        self._open_again_s = time.monotonic() + self._pause.next_s()
        if row["session"]:
            # Told that their run is not the current one, workers would drop what they hold of it.
            self.waits_for = f"run {run_id} cannot be taken up yet: {error}"
        await self.pause_on_fault(run_id, f"{error}. {AGAIN}", retried=True)

    async def fail(self, run_id: str, message: str) -> None:
        """The run cannot go on as its spec is. What is open stays open, for `resume`; the next run may start."""
        await self._leave(run_id, "failed", message)

    async def end(self, run_id: str, state: str, message: str) -> None:
        """Ends a run in `state`, for good; the workers become idle and the next run may start."""
        await self._leave(run_id, state, message)

    async def _leave(self, run_id: str, state: str, message: str) -> None:
        async with self.lock:
            before = self.ledger.run(run_id)["state"]
            if before not in ("queued", *ACTIVE_STATES) and (before, state) != ("failed", "cancelled"):
                return
            run = self.exchange.active
            active = run is not None and run.run_id == run_id
            with self.ledger.transaction():
                if state == "failed":
                    self.exchange.set_aside(run_id)
                else:
                    self.exchange.end_run(run_id)
                self.ledger.update_run(run_id, state=state, message=message)
                self.ledger.add_event(run_id, "state", {"state": state, "message": message})
        log.log(
            logging.INFO if state == "succeeded" else logging.WARNING,
            "run %s %s %s",
            run_id,
            state,
            one_line(message),
        )
        if active:
            self.run_log.close(self.run_log.summary(run_id))
            self.pool.assignments.dismiss(f"run {run_id} {state}")
            self.server.wake("lease", "task", "batch")
        if self._retried == run_id:
            self._retried, self._open_again_s = "", 0.0
        if not active and before in ACTIVE_STATES:
            self.waits_for = ""
        await self.tell_watchers()

    async def wait_for_leavers(self, grace_s: float) -> None:
        """Serves on, for `grace_s` seconds at most, until workers that are about to leave have done so.

        What ends the coordinator often ends the workers too, in any order; what they then hand over (unfinished groups,
        scores, a last checkpoint) would have to be made again. Workers that stay see nothing of it.
        """
        started_s = time.monotonic()
        while self.members.all() and (waited_s := time.monotonic() - started_s) < grace_s:
            leaving = [member.member_id for member in self.members.all() if member.draining]
            if waited_s > HEAR_S and not leaving:
                return
            await asyncio.sleep(TICK_S / 5)

    async def end_streams(self) -> None:
        """Ends what would otherwise go on for ever: the workers' streams and the watchers'."""
        self.stopping = True
        for member in self.members.all():
            member.end_stream()
        await self.tell_watchers()

    def close(self) -> None:
        """Closes sockets and files; the ledger is its opener's to close."""
        self.server.close()
        self._prompts.close()
        self.run_log.close()
        self.committed.close()

    async def learner_finished(self, session: int) -> None:
        """The learner has exported what the run was for."""
        self._finished_session = session
        await self._finish_if_done()

    async def _finish_if_done(self) -> None:
        run = self.exchange.active
        if run is None:
            return
        row = self.ledger.run(run.run_id)
        done = row["next_step"] >= run.spec.max_num_steps and self._finished_session == row["session"]
        if done and evaluation.pending(self.exchange, run) is None:
            await self.end(run.run_id, "succeeded", "")

    async def act_on(self, notices: list[Notice]) -> None:
        """What follows from a commit: a run that cannot go on or finished, another epoch, news for watchers."""
        run = self.exchange.active
        if run is None:
            return
        for notice in notices:
            if notice.kind == "failed" and notice.run_id == run.run_id:
                await self.pause_on_fault(run.run_id, notice.content["message"])
                break
            if notice.kind == "paused":
                log.warning("run %s is paused: %s", run.run_id, one_line(notice.content["message"]))
        self.pool.assignments.name_epoch()
        await self.tell_watchers()
        await self._finish_if_done()

    async def warn(self, messages: list[str]) -> None:
        """Warnings in the events of the active run, if there is one."""
        run = self.exchange.active
        if run is None or not messages:
            return
        async with self.lock:
            with self.ledger.transaction():
                self.run_log.write_down([Notice("warning", {"message": message}) for message in messages])
        self.server.wake("lease")
        await self.tell_watchers()

    async def tell_watchers(self) -> None:
        """There may be news in the events."""
        async with self.changed:
            self.changed.notify_all()


def _read_submitted(spec_yaml: str) -> tuple[RunSpec, str]:
    """A spec and its resolved text. Raises SpecError."""
    spec = submitted_spec(spec_yaml)
    return spec, spec_to_yaml(spec)


def _facts_of(spec_yaml: str) -> tuple[int, list[str]]:
    """Steps and warnings of a stored spec; none of one that this version cannot parse."""
    try:
        spec, unknown = spec_from_ledger(spec_yaml)
    except SpecError:
        return 0, []
    return spec.max_num_steps, [*spec.warnings, *unknown]


def _open_data(spec: RunSpec) -> tuple[PromptSource | None, PromptSource | None]:
    """Training and validation prompts of a run; data of examples are only checked: the learner reads them. Raises
    DataError."""
    data = spec.data
    if spec.examples is not None:
        check = check_example(spec)
        open_rows(data.train, data.train_split, check=check)
        if spec.examples.validates and data.validation is not None:
            open_rows(data.validation, data.validation_split, "data.validation", check)
        return None, None
    prompts = open_prompts(spec.data, spec.seed)
    return prompts, open_prompts(spec.data, spec.seed, validation=True) if spec.data.validation else None
