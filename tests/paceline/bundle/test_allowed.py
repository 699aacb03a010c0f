"""Bundles if the operator allows only some folders: the code must equal the files there."""

from __future__ import annotations

from pathlib import Path

from paceline.bundle.allowed import refusal_of_bundle
from paceline.bundle.collecting import collect
from paceline.bundle.manifest import BundledFile, Manifest
from paceline.spec.reading import parse_spec


def test_only_code_that_lies_in_an_allowed_folder_may_be_used(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "reward.py").write_text("import helper\ndef f(completions): ...\n")
    (folder / "helper.py").write_text("X = 1\n")
    tree = {
        "policy": {"model_name": "m"},
        "data": {"train": "hub/name"},
        "rewards": [{"function": "reward.py:f"}],
    }
    for spec in (
        parse_spec(tree, base=folder),
        parse_spec(tree, base=folder).model_copy(update={"folder": ""}),
    ):
        (folder / "helper.py").write_text("X = 1\n")
        manifest = collect(spec).manifest
        assert refusal_of_bundle(spec, manifest, []) == ""
        assert refusal_of_bundle(spec, manifest, [tmp_path]) == ""
        assert f"is not below {tmp_path / 'other'}" in refusal_of_bundle(spec, manifest, [tmp_path / "other"])
        (folder / "helper.py").write_text("X = 2\n")
        assert "helper.py is missing on this machine or differs from the run's copy" in refusal_of_bundle(
            spec, manifest, [folder]
        )
        other = Manifest.of([BundledFile("elsewhere/x.py", "code", 1, "ab" * 32)])
        assert "'elsewhere/x.py', which the spec does not name" in refusal_of_bundle(spec, other, [folder])
