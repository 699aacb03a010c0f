"""Paths of files in a bundle, and the spec of an unpacked one."""

from __future__ import annotations

from pathlib import Path

from paceline.bundle.manifest import (
    BundledFile,
    Kind,
    Manifest,
    for_submitter,
    localized,
    path_of_data,
    path_of_file,
    path_of_prepared,
    split_glob,
    with_original_paths,
)
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec


def entry(path: str, kind: Kind) -> BundledFile:
    return BundledFile(path, kind, 1, "ab" * 32)


def spec_of(folder: str = "/home/me/run", **data: object) -> RunSpec:
    tree = {
        "folder": folder,
        "policy": {"model_name": "/models/tiny"},
        "data": {"train": "/home/me/run/train.jsonl", **data},
        "rewards": [{"function": "/home/me/run/rewards/exact.py:exact"}, {"function": "exact_match"}],
    }
    return parse_spec(tree)


def test_places_below_the_folder_and_outside() -> None:
    assert path_of_file("/home/me/run", "/home/me/run/rewards/exact.py") == "folder/rewards/exact.py"
    assert path_of_data("/home/me/run", "/home/me/run/d/*.jsonl") == "data/folder/d/*.jsonl"
    outside = path_of_data("/home/me/run", "/data/train.jsonl")
    assert outside.startswith("data/outside/")
    assert outside.endswith("/train.jsonl")
    assert path_of_data("", "/data/other/train.jsonl") != outside
    assert split_glob("/a/b*/c.jsonl") == ("/a", "b*/c.jsonl")
    assert split_glob("/a/b/c") == ("/a/b", "c")


def test_only_files_of_the_bundle_are_localized() -> None:
    spec = spec_of(validation=("/data/v*.jsonl", "hub/name", "s3://bucket/v.jsonl"))
    place = path_of_data(spec.folder, "/data/v1.jsonl")
    manifest = Manifest.of(
        [
            entry("folder/rewards/exact.py", "code"),
            entry("data/folder/train.jsonl", "data"),
            entry(place, "data"),
        ]
    )
    local = localized(spec, manifest, Path("/cache/x"))
    assert local.data.train == "/cache/x/data/folder/train.jsonl"
    assert local.data.validation == (
        str(Path("/cache/x", place).with_name("v*.jsonl")), "hub/name", "s3://bucket/v.jsonl",
    )  # fmt: skip
    assert [reward.function for reward in local.rewards] == [
        "/cache/x/folder/rewards/exact.py:exact",
        "exact_match",
    ]
    assert local.folder == "/cache/x"
    assert local.policy == spec.policy

    code_only = localized(spec, manifest.subset("code"), Path("/cache/y"))
    assert code_only.data == spec.data
    assert localized(spec, Manifest(()), Path("/cache/z")) == spec


def test_prepared_data_replace_their_data_sets() -> None:
    spec = spec_of(
        train=("/home/me/run/a.jsonl", "org/b"),
        validation="/home/me/run/v.jsonl",
        preparation={"max_prompt_characters": 9},
    )
    places = [path_of_prepared("data.train", index, name) for index, name in enumerate(("a.jsonl", "b.jsonl"))]
    manifest = Manifest.of(
        [entry(place, "data") for place in (*places, path_of_data(spec.folder, "/home/me/run/v.jsonl"))]
    )
    local = localized(spec, manifest, Path("/c")).data
    assert local.train == ("/c/data/prepared/train/0000/a.jsonl", "/c/data/prepared/train/0001/b.jsonl")
    assert local.validation == "/c/data/folder/v.jsonl"
    assert not local.preparation.is_used
    assert localized(spec, manifest.subset("code"), Path("/c")) == spec
    fault = with_original_paths(f"{local.train[0]}, line 3: bad", spec, Path("/c"))
    assert fault == "prepared/train/0000/a.jsonl, line 3: bad"


def test_a_folder_with_data_is_localized_as_a_whole() -> None:
    spec = spec_of(train="/home/me/run/saved")
    manifest = Manifest.of([entry("data/folder/saved/part/0.arrow", "data")])
    assert localized(spec, manifest, Path("/c")).data.train == "/c/data/folder/saved"


def test_a_message_that_is_not_of_data_keeps_its_quotations(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("{}\n")
    tree = {
        "policy": {"model_name": "m"},
        "data": {"train": f"{tmp_path}/d.jsonl"},
        "rewards": [{"function": "length"}],
    }
    spec = RunSpec.model_validate(tree)
    said = "reward function 'length' needs 'tolerance_tokens'"
    assert for_submitter(said, spec, spec, None, is_of_data=False) == said
    assert for_submitter(said, spec, spec, None) == "reward function 'length' needs (not shown)"
    named = f"{tmp_path}/d.jsonl has 'a secret'"
    assert for_submitter(named, spec, spec, None, is_of_data=False) == f"{tmp_path}/d.jsonl has (not shown)"
    tree["data"]["train"] = f"{tmp_path}/./d.jsonl"  # is opened by its real path, which a message names
    other = RunSpec.model_validate(tree)
    assert "a secret" not in for_submitter(named, other, other, None, is_of_data=False)
