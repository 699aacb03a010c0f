"""`paceline models fetch --verify` and `push`: a tampered file is refused by its name, and nothing is left of it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hub_server import OID, hub_server
from registry_place import Workplace
from trained_ledger import RUN_ID

from paceline.models.evaluation_results import digest_of
from paceline.services.cli.main import main


def fetched(place: Workplace, *more: object) -> tuple[int, str]:
    result = place.run(
        *("models", "fetch", "sums@champion", place.folder / "got"),
        *("--stage", "passed", "--verify", "--public-key", place.public, *more),
    )
    return result.exit_code, result.output


@pytest.fixture
def champion(place: Workplace) -> Workplace:
    """A workplace with a promoted version."""
    place.passed()
    place.done("models", "promote", "sums:1")
    return place


def test_a_promoted_version_is_fetched_whole(champion: Workplace) -> None:
    code, output = fetched(champion)
    assert code == 0, output
    assert "every file is as registered, its signature is valid" in output
    got = champion.folder / "got"
    assert (got / "model.safetensors").read_bytes() == (champion.folder / "model" / "model.safetensors").read_bytes()
    assert {"README.md", "paceline.json", "model.sig", "paceline_spec.yaml"} <= {path.name for path in got.iterdir()}
    card = (got / "README.md").read_text()
    assert card.startswith("---\n")
    assert f"in the run `{RUN_ID}`" in card
    code, output = fetched(champion)
    assert code == 1
    assert "got exists" in output


def change_weights(folder: Path) -> str:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return "model.safetensors was changed"


def change_verdict(folder: Path) -> str:
    path = folder / "verdicts" / "0.json"
    verdict = json.loads(path.read_text()) | {"outcome": "failed"}
    path.write_text(json.dumps(verdict | {"digest": digest_of({k: v for k, v in verdict.items() if k != "digest"})}))
    return "verdicts/0.json was changed"


def change_samples(folder: Path) -> str:
    path = folder / "evaluations" / "0" / "samples.jsonl"
    path.write_text(path.read_text().replace("1.0", "0.9", 1))
    return "evaluations/0/samples.jsonl was changed"


def change_evaluation(folder: Path) -> str:
    path = folder / "evaluations" / "0" / "result.json"
    path.write_text(path.read_text().replace('"value": 1.0', '"value": 0.5'))
    return "evaluations/0/result.json was changed"


def remove_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json is missing"


def add_code(folder: Path) -> str:
    (folder / "modeling.py").write_text("print('hello')")
    return "modeling.py was added"


def remove_signature(folder: Path) -> str:
    (folder / "model.sig").unlink()
    return "has no signature (model.sig)"


def state_other_weights(folder: Path) -> str:
    """Change the weights, and the statement with them."""
    change_weights(folder)
    statement = json.loads((folder / "paceline.json").read_text())
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    for subject in statement["subject"]:
        if subject["name"] == "model.safetensors":
            subject["digest"]["sha256"] = digest
    statement["predicate"]["export"]["files"]["model.safetensors"] = digest
    (folder / "paceline.json").write_text(json.dumps(statement))
    return "paceline.json contradicts itself about the exported files"


def state_another_step(folder: Path) -> str:
    path = folder / "paceline.json"
    path.write_text(path.read_text().replace('"step": 1', '"step": 9', 1))
    return "changed since signing: paceline.json"


@pytest.mark.parametrize(
    "tamper",
    [
        *(change_weights, change_verdict, change_samples, change_evaluation, remove_config),
        *(add_code, remove_signature, state_other_weights, state_another_step),
    ],
)
def test_a_tampered_folder_is_refused_by_the_name_of_the_file(
    champion: Workplace, tamper: Callable[[Path], str]
) -> None:
    message = tamper(Path(champion.done("models", "show", "sums@champion")["path"]))
    code, output = fetched(champion)
    assert code == 1
    assert message in output
    assert not (champion.folder / "got").exists()


def test_another_signature_is_refused(champion: Workplace) -> None:
    other = champion.folder / "other.pem"
    assert CliRunner().invoke(main, ["models", "key", str(other)]).exit_code == 0
    code, output = fetched(champion, "--public-key", f"{other}.pub")
    assert code == 1
    assert "the signature model.sig does not fit" in output
    code, output = fetched(champion, "--public-key", champion.key)
    assert "is not a public elliptic key" in output


def test_a_folder_that_was_signed_anew_without_a_record_is_refused(champion: Workplace) -> None:
    shown = champion.done("models", "show", "sums@champion")
    champion.passed()
    second = champion.done("models", "show", "sums:2")
    Path(shown["path"]).rename(champion.folder / "away")
    Path(second["path"]).rename(shown["path"])
    code, output = fetched(champion)
    assert code == 1
    assert "paceline.json has the SHA-256" in output


def test_a_stage_is_asked_for(place: Workplace) -> None:
    place.registered()
    fetch = ("models", "fetch", "sums:1", place.folder / "got")
    refused = place.run(*fetch, "--stage", "passed")
    assert refused.exit_code == 1
    assert "sums:1 is not passed, because its gate says: no verdict" in refused.output
    place.done("models", "promote", "sums:1", "--override", "a base to begin from")
    assert "it was promoted past its gate (a base to begin from)" in place.run(*fetch, "--stage", "passed").output
    assert place.run(*fetch, "--verify").exit_code == 2
    assert place.done(*fetch, "--stage", "promoted")["verified"] is False


def test_a_store_may_be_a_url(place: Workplace) -> None:
    store = f"memory://registry-{place.folder.name}"
    found = place.passed("--store", store)
    assert found["path"].startswith(f"{store}/sums/1-")
    place.done("models", "promote", "sums:1")
    code, output = fetched(place)
    assert code == 0, output


def pushed(place: Workplace, url: str) -> subprocess.CompletedProcess[str]:
    """Run `paceline models push` in a separate process, because huggingface_hub reads the address when it is imported."""
    code = "from paceline.services.cli.main import main; main()"
    words = ["models", "push", "sums@champion", "someone/sums", "--directory", str(place.runs)]
    environment = os.environ | {
        **{"HF_ENDPOINT": url, "HF_TOKEN": "hf_test", "HF_HOME": str(place.folder / "hf")},
        **{"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    }
    return subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_registered_folder_is_pushed_whole_in_one_commit(champion: Workplace) -> None:
    folder = Path(champion.done("models", "show", "sums@champion")["path"])
    with hub_server() as hub:
        result = pushed(champion, hub.url)
        assert result.returncode == 0, result.stderr
        assert f"sums:1 in commit {OID}" in result.stdout
    assert hub.files == {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    assert hub.message == "sums version 1"
    assert [each["visibility"] for each in hub.repositories] == ["private"]
    assert hub.tokens == {"Bearer hf_test"}


def test_a_hub_that_is_away_is_named(champion: Workplace) -> None:
    with hub_server() as hub:
        url = hub.url
    result = pushed(champion, url)
    assert result.returncode == 1
    assert f"someone/sums cannot be written at {url}" in result.stderr
