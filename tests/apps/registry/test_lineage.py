"""Lineage of a model: the step in an export's name, the facts of the run's events, the batches until then."""

from __future__ import annotations

import hashlib

import pytest
from registry_place import Workplace
from trained_ledger import RUN_ID

from paceline.apps.registry.register import lineage_of
from paceline.errors import Conflict, InvalidInput
from paceline.models.export_origin import Origin
from paceline.services.cli.recorded.source import ledger_source
from paceline.spec.reading import spec_from_yaml, spec_to_yaml


def test_the_step_is_that_of_the_name_else_the_last_one(place: Workplace) -> None:
    with ledger_source(place.runs / "ledger.sqlite") as source:
        lineage, spec = lineage_of(source, RUN_ID, None, "runs/sums-1/exports/step-1/")
        assert lineage_of(source, RUN_ID, None, "runs/sums-1/export")[0] == lineage
        assert (lineage.step, len(lineage.batches)) == (1, 1)
        assert lineage.spec_sha256 == hashlib.sha256(spec.encode()).hexdigest()
        with pytest.raises(InvalidInput, match="name a step from 1 to 1"):
            lineage_of(source, RUN_ID, None, "runs/sums-1/exports/step-2")


def test_the_files_own_word_gives_step_and_session_and_the_records_have_to_agree(place: Workplace) -> None:
    with ledger_source(place.runs / "ledger.sqlite") as source:
        plain, spec = lineage_of(source, RUN_ID, None, "model")
        origin = Origin(
            run_id=RUN_ID,
            session=1,
            step=1,
            chain=plain.chain,
            spec_sha256=hashlib.sha256(spec_to_yaml(spec_from_yaml(spec)).encode()).hexdigest(),
        )
        found = lineage_of(source, RUN_ID, None, "exports/step-7", origin)[0]
        assert (found.step, found.session, found.named_by_files, plain.named_by_files) == (1, 1, True, False)
        for change, words in (
            ({"run_id": "other-1"}, "say run_id 'other-1'"),
            ({"chain": "0" * 64}, "say chain '0000"),
            ({"spec_sha256": "0" * 64}, "name a spec with the SHA-256 0000"),
        ):
            with pytest.raises(Conflict, match=words):
                lineage_of(source, RUN_ID, 1, "model", origin.model_copy(update=change))
