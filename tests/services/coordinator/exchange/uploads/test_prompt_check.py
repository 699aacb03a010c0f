"""Groups with another prompt than their lease's are found by encoding it again, in a process that may fail."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from chat_templates import HERMES, character_tokenizer
from exchange_drivers import make_spec

from paceline.data.tokens import encode_prompt
from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE
from paceline.groups import Completion, Group, IntArray, VersionSpan
from paceline.rate_limited_log import unforeseen
from paceline.services.coordinator.exchange.requests.table import validate_upload
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.services.coordinator.exchange.uploads.prompt_check import PromptCheck
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.demo.task import make_tokenizer
from paceline.spec import RunSpec
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import encode_result

PROMPTS = {7: "12+34=", 8: "99+01=", 9: [{"role": "user", "content": "1+1="}]}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A ledger with the prompts of run a-1."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    opened = Ledger(path)
    for group_id, prompt in PROMPTS.items():
        opened.db.execute(
            "INSERT INTO prompts (run_id, group_id, prompt_json, columns_json) VALUES ('a-1', ?, ?, ?)",
            (group_id, json.dumps(prompt), json.dumps({"tools": TOOLS})),
        )
    yield path
    opened.close()


@pytest.fixture
def check(ledger: Path) -> Iterator[PromptCheck]:
    """A check that is closed at the end."""
    made = PromptCheck(ledger)
    yield made
    made.close()


SECRETS = {
    KEY_VARIABLE: "ab" * 32,
    FILE_VARIABLE: "/nowhere/storage.key",
    "AWS_SECRET_ACCESS_KEY": "planted",
    "PACELINE_TOKEN_FILE": "planted",
}


@pytest.fixture(scope="module")
def begun(ledger: Path, model: Path) -> Iterator[PromptCheck]:
    """A check whose process encodes for run a-1, begun with SECRETS in the environment. For tests that do not change it,
    because the process takes seconds to start."""
    made = PromptCheck(ledger)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (SECRETS | {"HF_HOME": str(model)}).items():
            patch.setenv(name, value)
        made.begin("a-1", spec_of(ledger.parent, str(model)))
    yield made
    made.close()


def spec_of(directory: Path, model_name: str) -> RunSpec:
    """A spec whose policy is in a folder."""
    return make_spec(directory, policy={"model_name": model_name, "generation": {"max_new_tokens": 4}})


def test_only_the_leases_own_prompt_passes(begun: PromptCheck) -> None:
    tokenizer = make_tokenizer()
    own = {group: encode_prompt(tokenizer, PROMPTS[group], "auto") for group in (7, 8)}
    assert begun.fault("a-1", 7, own[7]) == ""
    assert "that differ from its lease's prompt, which has 6" in begun.fault("a-1", 7, own[8])
    assert "came with 5 prompt tokens" in begun.fault("a-1", 7, own[7][:-1])
    assert begun.fault("a-1", 8, own[8]) == ""
    assert begun.unavailable == ""


def test_its_process_gets_no_secret(begun: PromptCheck, model: Path) -> None:
    assert begun.fault("a-1", 7, encode_prompt(make_tokenizer(), PROMPTS[7], "auto")) == ""
    assert begun.encoder is not None  # it has answered, so its program has begun
    environment = psutil.Process(begun.encoder.process.pid).environ()
    assert not SECRETS.keys() & environment.keys()
    assert (environment["HF_HOME"], environment["HF_HUB_OFFLINE"]) == (str(model), "1")


def test_a_chat_is_encoded_with_the_tools_of_its_row(ledger: Path, tmp_path: Path) -> None:
    tokenizer = character_tokenizer(HERMES)
    tokenizer.save_pretrained(tmp_path)
    check = PromptCheck(ledger)
    check.begin("a-1", spec_of(tmp_path, str(tmp_path)))
    try:
        assert check.fault("a-1", 9, encode_prompt(tokenizer, PROMPTS[9], "auto", {}, TOOLS)) == ""
        without = check.fault("a-1", 9, encode_prompt(tokenizer, PROMPTS[9], "auto"))
        assert "that differ from its lease's prompt" in without
        assert check.fault("a-1", 7, encode_prompt(tokenizer, PROMPTS[7], "auto")) == "", "a text has no tools"
        assert check.unavailable == ""
    finally:
        check.close()


def arrived(check: PromptCheck, group_id: int, prompt_ids: IntArray) -> Arrived:
    """Return a result of one completion after the check thread's work."""
    completion = Completion(prompt_ids[:1], np.zeros(1, np.float32), (VersionSpan(1, 0, 0, 1),), "stop")
    group = Group(group_id, prompt_ids, (completion,))
    result = pb.GroupResult(group_id=group_id, attempt=1, digest=group.digest())
    made = Arrived(pb.ExchangeRequest(run_id="a-1", group=result), encode_result(prompt_ids, group.completions))
    validate_upload(made)
    check.validate_upload(made)
    return made


def test_a_result_with_another_prompt_is_at_fault(begun: PromptCheck) -> None:
    own = encode_prompt(make_tokenizer(), PROMPTS[7], "auto")
    honest, other = arrived(begun, 7, own), arrived(begun, 7, own[::-1])
    assert (honest.fault, honest.uploaded is None, honest.record is None) == ("", False, False)
    assert "differ from its lease's prompt" in other.fault
    assert (other.uploaded, other.record) == (None, None), "nothing of it is stored"


@pytest.mark.parametrize("group_id", [2**63 - 1, 2**63, 2**64 - 1])
def test_a_number_that_no_group_has_is_left_to_the_handler(begun: PromptCheck, group_id: int) -> None:
    own = encode_prompt(make_tokenizer(), PROMPTS[7], "auto")
    assert arrived(begun, group_id, own).fault == ""
    assert "differ from its lease's prompt" in arrived(begun, 7, own[::-1]).fault, "it goes on"


def test_a_record_that_cannot_be_read_holds_nothing_up(
    check: PromptCheck, begun: PromptCheck, tmp_path: Path, ledger: Path
) -> None:
    own = encode_prompt(make_tokenizer(), PROMPTS[7], "auto")
    before = unforeseen.total
    check.encoder = begun.encoder
    try:
        ledger.rename(tmp_path / "away.sqlite")
        made = arrived(check, 7, own[::-1])
        (tmp_path / "away.sqlite").rename(ledger)
        assert (made.fault, made.uploaded is None) == ("", False), "it passes uncompared"
        assert unforeseen.total == before + 1
        assert "differ from its lease's prompt" in arrived(check, 7, own[::-1]).fault
    finally:
        check.encoder = None  # the process stays for other tests


def test_a_prompt_that_cannot_be_encoded_has_no_tokens(begun: PromptCheck) -> None:
    assert "no chat template" in begun.fault("a-1", 9, np.array([3, 4], np.int32))
    assert begun.fault("a-1", 7, encode_prompt(make_tokenizer(), PROMPTS[7], "auto")) == "", "the next is answered"


def test_what_nobody_can_tell_passes(check: PromptCheck, model: Path, tmp_path: Path) -> None:
    any_ids = np.array([3, 4], np.int32)
    assert check.fault("a-1", 7, any_ids) == "", "no run began"
    check.begin("a-1", spec_of(tmp_path, str(model)))
    assert check.fault("b-2", 7, any_ids) == "", "of another run"
    assert check.fault("a-1", 1000, any_ids) == "", "a group that is not on record"
    check.begin("a-1", spec_of(tmp_path, str(tmp_path / "nowhere")))
    assert check.fault("a-1", 7, any_ids) == ""
    assert "not on the coordinator" in check.unavailable


def test_a_template_that_writes_the_date_is_not_compared(check: PromptCheck, model: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y') }}{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "dated")
    check.begin("a-1", spec_of(tmp_path, str(tmp_path / "dated")))
    assert check.fault("a-1", 7, np.array([3], np.int32)) == ""
    assert "writes the date" in check.unavailable


@pytest.mark.merge
@pytest.mark.slow
def test_a_process_that_fails_holds_nothing_up(
    check: PromptCheck, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = encode_prompt(make_tokenizer(), PROMPTS[7], "auto")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        check.begin("a-1", spec_of(tmp_path, str(model)))
        assert check.fault("a-1", 7, own[:-1]) != "", "each run's process works, also after a failed one"
        assert check.encoder is not None
        child = check.encoder.process
        child.send_signal(number)
        with monkeypatch.context() as patch:
            patch.setattr("paceline.services.coordinator.exchange.uploads.prompt_check.ANSWER_S", 0.2)
            assert check.fault("a-1", 7, own[:-1]) == ""
        assert "does not answer" in check.unavailable
        assert child.returncode == -signal.SIGKILL, "nothing is left behind"
    check.begin("a-1", spec_of(tmp_path, str(model)))
    assert check.fault("a-1", 7, own[:-1]) != "", "the next run's process works"


def test_the_reader_needs_no_lock(ledger: Path) -> None:
    """It reads beside the coordinator that writes."""
    connection = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)
    assert connection.execute("SELECT COUNT(*) FROM prompts").fetchone() == (3,)
    connection.close()
