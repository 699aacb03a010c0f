"""Where an export of samples reads the trained groups of a run: from a ledger, or from whatever else has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.spec import RunSpec
from paceline.spec.reading import spec_of_run
from services.coordinator.audit.samples import samples_of_step

if TYPE_CHECKING:
    from services.coordinator.ledger.ledger import Ledger

Row = dict[str, Any]


class SampleSource(Protocol):
    """The trained groups of one run, wherever they are read from."""

    run_id: str

    def steps(self) -> Sequence[int]:
        """Return the trained steps."""

    def groups(self, step: int) -> Iterable[Row]:
        """Return the groups of a step, as `samples_of_step` does. Raises NotFound."""

    def spec(self) -> RunSpec:
        """Return the run's spec."""

    def column_kinds(self) -> dict[str, set[str]]:
        """Return the columns of the run's data set with the kinds of their values, as SQLite's json_type names them."""

    def prompt_kinds(self) -> tuple[set[str], set[str]]:
        """Return the kinds of the prompts, likewise, and the keys of messages of prompts that are chats."""


class LedgerSamples:
    """Those of a ledger that is open here."""

    def __init__(self, ledger: Ledger, run_id: str):
        self._ledger, self.run_id = ledger, run_id

    def steps(self) -> Sequence[int]:
        """Return the trained steps."""
        rows = self._ledger.db.execute(
            "SELECT step FROM batches WHERE run_id = ? AND trained = 1 ORDER BY step", (self.run_id,)
        )
        return [row["step"] for row in rows]

    def groups(self, step: int) -> Iterable[Row]:
        """Return the groups of a step. Raises NotFound."""
        return samples_of_step(self._ledger, self.run_id, step)

    def spec(self) -> RunSpec:
        """Return the run's spec."""
        return spec_of_run(self.run_id, self._ledger.run(self.run_id)["spec_yaml"])[0]

    def column_kinds(self) -> dict[str, set[str]]:
        """Return the columns of the data set with the kinds of their values."""
        found: dict[str, set[str]] = {}
        for name, kind in self._ledger.db.execute(
            "SELECT DISTINCT cell.key, cell.type FROM groups g JOIN prompts p USING (run_id, group_id),"
            " json_each(p.columns_json) AS cell WHERE g.run_id = ? AND g.step IS NOT NULL ORDER BY cell.key",
            (self.run_id,),
        ):
            found.setdefault(name, set()).add(kind)
        return found

    def prompt_kinds(self) -> tuple[set[str], set[str]]:
        """Return the kinds of the prompts, and the keys of messages."""
        kinds = self._ledger.db.execute(
            "SELECT DISTINCT json_type(p.prompt_json) FROM groups g JOIN prompts p USING (run_id, group_id)"
            " WHERE g.run_id = ? AND g.step IS NOT NULL",
            (self.run_id,),
        ).fetchall()
        if [kind for (kind,) in kinds] != ["array"]:
            return {kind for (kind,) in kinds}, set()
        keys = self._ledger.db.execute(
            "SELECT DISTINCT cell.key FROM groups g JOIN prompts p USING (run_id, group_id),"
            " json_each(p.prompt_json) AS message, json_each(message.value) AS cell"
            " WHERE g.run_id = ? AND g.step IS NOT NULL",
            (self.run_id,),
        ).fetchall()
        return {"array"}, {key for (key,) in keys}
