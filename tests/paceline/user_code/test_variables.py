"""User code gets the variables that describe the host, the named ones, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE, StorageKey
from paceline.reward.runner import runs_sandboxed_only, service_variables
from paceline.spec import RewardFunctionSection
from paceline.user_code.surroundings import VARIABLE, Surroundings, passed_variables

HARMLESS = {
    "PATH": "/bin",
    "LC_ALL": "C.UTF-8",
    "PYTHONPATH": "/src",
    "CUDA_VISIBLE_DEVICES": "0",
    "http_proxy": "http://proxy:3128",
    "HF_HOME": "/models",
}
SECRET = {
    "HF_TOKEN": "x",
    "JUDGE_API_KEY": "x",
    "PACELINE_TOKEN_FILE": "/runs/token",
    "PACELINE_WEBHOOK_SECRET": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "DATABASE_URL": "postgres://ann:secret@db/x",
    "HTTPS_PROXY": "http://ann:secret@proxy:3128",
    "SOMETHING": "unknown",
}


def test_what_may_be_a_secret_stays_behind() -> None:
    assert passed_variables(environment=HARMLESS | SECRET) == HARMLESS


def test_what_somebody_names_is_passed() -> None:
    named = {"PACELINE_PASS_ENV": "SOMETHING,HTTPS_PROXY,ABSENT"}
    passed = passed_variables(["JUDGE_API_KEY"], HARMLESS | SECRET | named)
    chosen = {name: SECRET[name] for name in ("JUDGE_API_KEY", "SOMETHING", "HTTPS_PROXY")}
    assert passed == HARMLESS | chosen


def test_built_in_functions_get_the_keys_of_the_services_that_they_name() -> None:
    judge = {"endpoint": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": "JUDGE_API_KEY"}}
    functions = [
        RewardFunctionSection(function="judge", kwargs={"rubric": "r", **judge}),
        RewardFunctionSection(function="code_tests", kwargs={"sandbox": "remote", "url": "http://127.0.0.1:9"}),
        RewardFunctionSection(function="file.py:f", kwargs={"endpoint": {"api_key_env": "OTHER_API_KEY"}}),
        RewardFunctionSection(function="judge", kwargs={"rubric": "r", "endpoint": {"api_key_env": "HOME"}}, name="b"),
    ]
    assert service_variables(functions) == ("JUDGE_API_KEY", "PACELINE_SANDBOX_TOKEN")


def test_the_storage_key_is_never_passed_and_judges_keep_no_answers(
    given_key: StorageKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (FILE_VARIABLE, KEY_VARIABLE)
    assert passed_variables(names, dict.fromkeys(names, "x") | {"PACELINE_PASS_ENV": ",".join(names)}) == {}
    found = Surroundings(variables=names).environment()
    assert not found.keys() & set(names)
    assert found["PACELINE_ANSWER_CACHE_MB"] == "0"
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "key"))
    monkeypatch.setenv(VARIABLE, "1")
    assert str(tmp_path / "key") in Surroundings().box().hidden


@pytest.mark.parametrize(
    ("functions", "only_sandboxed"),
    [
        ({"code_tests": {}}, True),
        ({"code_tests": {"sandbox": "bwrap"}, "math_accuracy": {}}, True),
        ({"code_tests": {"sandbox": "none"}}, False),
        ({"code_tests": {"readable": ["/etc"]}}, False),
        ({"code_tests": {}, "/x/f.py:f": {}}, False),
        ({"math_accuracy": {}}, False),
    ],
)
def test_only_sandboxed_programs_may_need_mounts(
    functions: dict[str, dict[str, Any]], only_sandboxed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = [RewardFunctionSection(function=name, kwargs=kwargs) for name, kwargs in functions.items()]
    assert runs_sandboxed_only(sections) == only_sandboxed
    monkeypatch.setenv("PACELINE_REQUIRE_ISOLATION", "secrets")
    assert bool(Surroundings(may_mount=only_sandboxed).box().hidden) != only_sandboxed
    monkeypatch.setenv("PACELINE_REQUIRE_ISOLATION", "1")
    assert Surroundings(may_mount=only_sandboxed).box().hidden
