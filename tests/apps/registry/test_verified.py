"""What `paceline serve model` serves: a registered model is checked first, and nothing of it is served that does not verify."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from registry_place import Workplace

from paceline.apps.registry.fetch import verified_model
from paceline.errors import DataError


@pytest.fixture
def champion(place: Workplace) -> Workplace:
    """A workplace with a promoted version."""
    place.passed()
    place.done("models", "promote", "sums:1")
    return place


def checked(place: Workplace, model: str, key: Path | None, *, required: bool = False) -> str:
    """Return the model that would be served."""
    with (
        click.Context(click.Command("any")),
        verified_model(model, place.runs, key, required=required) as found,
    ):
        return found


@pytest.mark.parametrize("name", ["sums:1", "sums@champion"])
def test_a_registered_model_is_served_from_the_folder_that_was_checked(champion: Workplace, name: str) -> None:
    path = champion.done("models", "show", "sums:1")["path"]
    assert checked(champion, name, champion.public) == path
    with pytest.raises(click.UsageError, match="needs the signer's key; name it with --public-key"):
        checked(champion, name, None)
    weights = Path(path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"model\.safetensors was changed"):
        checked(champion, name, champion.public)


def test_a_version_in_a_store_is_copied_and_the_copy_goes_at_the_end(
    champion: Workplace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_SPOOL", str(tmp_path / "spool"))
    champion.passed("--store", f"memory://served-{tmp_path.name}")
    with (
        click.Context(click.Command("any")),
        verified_model("sums:2", champion.runs, champion.public, required=False) as found,
    ):
        original = champion.folder / "model" / "model.safetensors"
        assert (Path(found) / "model.safetensors").read_bytes() == original.read_bytes()
    assert list((tmp_path / "spool" / "served").iterdir()) == []


def test_a_fetched_folder_is_checked_where_there_is_a_key(champion: Workplace) -> None:
    folder = champion.folder / "got"
    champion.done("models", "fetch", "sums@champion", folder)
    assert checked(champion, str(folder), None) == checked(champion, str(folder), champion.public) == str(folder)
    (folder / "added.py").write_text("")
    with pytest.raises(DataError, match=r"added\.py was added"):
        checked(champion, str(folder), champion.public)


def test_a_key_of_the_environment_leaves_other_models_alone_and_one_of_the_command_line_does_not(
    place: Workplace,
) -> None:
    export = str(place.folder / "model")
    assert checked(place, export, place.public) == export
    with pytest.raises(
        click.UsageError, match=r"--public-key verifies a registered model, and .* has no paceline\.json"
    ):
        checked(place, export, place.public, required=True)
