"""Keeps the study of a sweep: Optuna's ask and tell, with everything recorded in one journal file.

Promise: no reported outcome is lost, even if the process is killed at any point. A trial is recorded before its run is
submitted, and its run's name follows from the study and the trial's number; a process that resumes therefore finds the
run of an open trial, or knows that this run does not exist. Only this module and `pictures` import Optuna.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.apps.sweeps.sweep_file import Range, Sweep, Value
from paceline.errors import Conflict, NotFound, PacelineError

if TYPE_CHECKING:
    import optuna

JOURNAL = "journal.log"
TOKEN, SPACE, RUN, MESSAGE = "token", "space", "run_id", "message"
ENDED = ("COMPLETE", "PRUNED", "FAIL")


class SweepStudy:
    """The trials of one sweep, in `journal.log` of a folder. The caller makes sure that one process at a time writes."""

    def __init__(self, folder: Path, sweep: Sweep, *, read_only: bool = False):
        """Open the study of `folder`, or begin it. With `read_only` the study is only opened; another process may write
        to it. Raises Conflict if the study has another search, NotFound without a study to read, PacelineError without
        Optuna."""
        _check_optuna()
        import optuna

        self.sweep = sweep
        if read_only and not (folder / JOURNAL).is_file():
            raise NotFound(f"there is no study in {folder}; `paceline sweep` without --report begins one")
        folder.mkdir(parents=True, exist_ok=True)
        if not read_only:
            _remove_torn_line(folder / JOURNAL)
        journal = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL), lock_obj=_no_lock(folder / JOURNAL))
        self.study: optuna.Study = optuna.create_study(
            study_name=sweep.name,
            storage=optuna.storages.JournalStorage(journal),
            direction=sweep.direction,
            load_if_exists=True,
            pruner=self._pruner(),
        )
        attributes = self.study.user_attrs
        if attributes.get(SPACE, sweep.space) != sweep.space:
            raise Conflict(
                f"the study in {folder} has another search; give this sweep another `name`, or remove that folder"
            )
        if TOKEN not in attributes and not read_only:
            self._begin()
        self.study.sampler = self._sampler()
        self._distributions = {key: self._distribution(part) for key, part in sweep.search.items()}

    def run_name(self, number: int) -> str:
        return f"{self.sweep.name}-{self.study.user_attrs[TOKEN]}-t{number}"

    def open_trials(self) -> list[Trial]:
        """Return the trials without a recorded outcome, oldest first."""
        import optuna

        running = optuna.trial.TrialState.RUNNING
        return [self._trial(each._trial_id) for each in self.study.get_trials(deepcopy=False, states=(running,))]

    def num_ended(self) -> int:
        return len([each for each in self.study.get_trials(deepcopy=False) if each.state.name in ENDED])

    def ask(self) -> Trial:
        # Each process seeds the sampler again. A seed that depends on the number of trials keeps it from drawing the
        # same values again.
        self.study.sampler = self._sampler()
        return self._trial(self.study.ask()._trial_id)

    def best(self) -> optuna.trial.FrozenTrial | None:
        import optuna

        complete = optuna.trial.TrialState.COMPLETE
        return self.study.best_trial if self.study.get_trials(deepcopy=False, states=(complete,)) else None

    def _trial(self, trial_id: int) -> Trial:
        """Return a trial with a value for each key; draw the values that a killed process has not drawn."""
        import optuna

        trial = optuna.trial.Trial(self.study, trial_id)
        values = {key: trial._suggest(key, distribution) for key, distribution in self._distributions.items()}
        return Trial(self, trial, values)

    def _begin(self) -> None:
        self.study.set_user_attr(SPACE, self.sweep.space)
        for values in self.sweep.start:
            self.study.enqueue_trial(dict(values))
        self.study.set_user_attr(TOKEN, secrets.token_hex(2))  # last, because a study without it begins again

    def _sampler(self) -> optuna.samplers.BaseSampler:
        import optuna

        seed = self.sweep.seed + len(self.study.get_trials(deepcopy=False))
        if self.sweep.sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(1, self.sweep.trials // 3)))

    def _pruner(self) -> optuna.pruners.BasePruner:
        import optuna

        pruning = self.sweep.pruning
        if pruning is None:
            return optuna.pruners.NopPruner()
        return optuna.pruners.MedianPruner(pruning.startup_trials, pruning.warmup_steps)

    def _distribution(self, part: Any) -> optuna.distributions.BaseDistribution:
        import optuna

        if not isinstance(part, Range):
            return optuna.distributions.CategoricalDistribution(part.choices)
        if part.is_whole:
            return optuna.distributions.IntDistribution(
                int(part.low), int(part.high), log=part.log, step=int(part.step or 1)
            )
        return optuna.distributions.FloatDistribution(float(part.low), float(part.high), log=part.log, step=part.step)


class Trial:
    def __init__(self, study: SweepStudy, trial: optuna.Trial, values: Mapping[str, Value]):
        self._study, self._trial = study, trial
        self.values = dict(values)

    @property
    def number(self) -> int:
        return self._trial.number

    @property
    def run_id(self) -> str:
        """Id of the trial's run; empty while none is recorded."""
        return str(self._trial.user_attrs.get(RUN, ""))

    def set_run(self, run_id: str) -> None:
        self._trial.set_user_attr(RUN, run_id)

    def report(self, step: int, value: float) -> bool:
        """Record an intermediate value, once for each step; return whether to end the trial early."""
        if not math.isfinite(value):
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an earlier process has reported this step
            self._trial.report(value, step)
        return self._trial.should_prune()

    def complete(self, value: float) -> None:
        self._study.study.tell(self.number, value)

    def prune(self) -> None:
        import optuna

        self._study.study.tell(self.number, state=optuna.trial.TrialState.PRUNED)

    def fail(self, message: str) -> None:
        import optuna

        self._trial.set_user_attr(MESSAGE, message[:500])
        self._study.study.tell(self.number, state=optuna.trial.TrialState.FAIL)


def _no_lock(path: Path) -> Any:
    """Return a lock that does nothing. Optuna's lock file outlives a killed process and blocks the next; the caller's
    lock on the folder suffices."""
    from optuna.storages.journal import JournalFileOpenLock

    class NoLock(JournalFileOpenLock):
        def acquire(self) -> bool:
            return True

        def release(self) -> None:
            pass

    return NoLock(str(path))


def _remove_torn_line(path: Path) -> None:
    """Cut off the half line that a killed process or machine left at the end: the next line would be appended to it."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        text = file.read()
        if text and not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)


def _check_optuna() -> None:
    try:
        import optuna
        import optuna.storages.journal
    except ImportError:
        raise PacelineError("`paceline sweep` needs Optuna: pip install 'paceline[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
