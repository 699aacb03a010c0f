"""Faults of an environment that every episode would have are found when the run is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError, InvalidInput
from paceline.services.coordinator.lifecycle.submission_checks import checked_data
from paceline.spec import RunSpec

ROW = {"prompt": "2+2=", "answer": "4", "environment": "sums"}

CHAT = [{"role": "user", "content": "2+2="}]


def check(folder: Path, environment: dict[str, Any], row: dict[str, Any] | None = None) -> None:
    (folder / "train.jsonl").write_text(json.dumps(row or ROW) + "\n")
    tree = {
        "policy": {"model_name": str(folder)},
        "data": {"train": str(folder / "train.jsonl")},
        "environment": environment,
    }
    checked_data(RunSpec.model_validate(tree))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("class Sums:\n    def reset(self, answer): ...", ""),
        ("class Sums:\n    def reset(self, prompt, answer, **_): ...", ""),
        ("class Sums:\n    async def reset(self, *, answer, level=1): ...", ""),
        ("class Sums:\n    def reset(self, answer, level): ...", "`reset` of Sums needs the column 'level'"),
        ("class Sums(Base):\n    pass", ""),
        ("from elsewhere import Sums", ""),
        ("import elsewhere as Sums", ""),
        ("from elsewhere import *", ""),
        ("try:\n    from a import Sums\nexcept ImportError:\n    Sums = None", ""),
        ("Sums = make()", ""),
        ("@wrap\nclass Sums:\n    def reset(self, level): ...", ""),
        ("class Sum: ...", "has no class 'Sums'; did you mean 'Sum'?"),
        ("class Sums:", ""),  # the worker says what is wrong with it
    ],
)
def test_a_class_is_in_its_file_and_gets_the_columns_that_it_needs(tmp_path: Path, source: str, problem: str) -> None:
    (tmp_path / "sums.py").write_text(source)
    environment = {"class": f"{tmp_path / 'sums.py'}:Sums"}
    if not problem:
        check(tmp_path, environment)
        return
    with pytest.raises((DataError, InvalidInput), match="environment.class: .*" + problem.replace("?", r"\?")):
        check(tmp_path, environment)


TOOLS = (
    "class Sums:\n    def reset(self, **_): ...\n    def add(self, a: int) -> int: ...\n    def get_reward(self): ..."
)
STEP = "class Sums:\n    def reset(self, **_): ...\n    def step(self, text): ...\n    def look(self): ..."
INHERITED = f"{STEP.replace('Sums', 'Game')}\nclass Sums(Game):\n    def look(self): ..."


@pytest.mark.parametrize(
    ("source", "template", "environment", "prompt", "is_refused"),
    [
        (TOOLS, "{{ messages }}", {}, CHAT, True),
        (TOOLS, "{{ messages }}{{ tools }}", {}, CHAT, False),
        (TOOLS, "{{ messages }}", {"tool_parser": "json"}, CHAT, False),
        (TOOLS, "{{ messages }}", {}, "2+2=", False),  # no template renders a text
        (TOOLS, "", {}, CHAT, False),  # it may be on the workers' machines
        (STEP, "{{ messages }}", {}, CHAT, False),
        (INHERITED, "{{ messages }}", {}, CHAT, False),
    ],
)
def test_tools_need_a_template_that_reads_them(
    tmp_path: Path, source: str, template: str, environment: dict[str, Any], prompt: Any, is_refused: bool
) -> None:
    (tmp_path / "sums.py").write_text(source)
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
    row, given = ROW | {"prompt": prompt}, {"class": f"{tmp_path / 'sums.py'}:Sums", **environment}
    if not is_refused:
        check(tmp_path, given, row)
        return
    with pytest.raises(DataError, match=r"the environment has tools \(add\), .* or take a class with `step`"):
        check(tmp_path, given, row)
    function = {"tools": [f"{tmp_path / 'sums.py'}:Sums"]}
    with pytest.raises(DataError, match=r"the environment has tools \(Sums\)"):
        check(tmp_path, function, row)


def test_a_file_that_is_not_here_is_the_worker_s_concern(tmp_path: Path) -> None:
    check(tmp_path, {"class": "/nowhere/sums.py:Sums"})


@pytest.mark.parametrize("code", ["sums", "sums.py", ":Sums", "sums.py:", "sums.py:Sums()"])
def test_code_is_named_by_file_and_name(tmp_path: Path, code: str) -> None:
    with pytest.raises(InvalidInput, match=r"write it as path/to/file.py:name"):
        check(tmp_path, {"class": code})


def test_rows_name_a_class_of_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text("class Sums:\n    def reset(self, answer): ...")
    environment = {"class": {"sums": f"{tmp_path / 'sums.py'}:Sums", "games": "/nowhere/games.py:Game"}}
    check(tmp_path, environment)
    with pytest.raises(DataError, match=r"data.train has no column 'environment' that names one"):
        check(tmp_path, environment, {"prompt": "2+2=", "answer": "4"})
    with pytest.raises(
        DataError,
        match=r"has 'chess', which environment.class does not name; the names in environment.class are 'sums', 'games'",
    ):
        check(tmp_path, environment, ROW | {"environment": "chess"})
    (tmp_path / "sums.py").write_text("class Sums:\n    def reset(self, environment): ...")
    with pytest.raises(DataError, match=r"needs the column 'environment', but it gets prompt, answer"):
        check(tmp_path, environment)


def test_an_agent_is_a_function_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("async def solve(row, base_url, api_key): ...\ntrains = None")
    path = tmp_path / "agent.py"
    check(tmp_path, {"agent": f"{path}:solve", "train_call": f"{path}:trains"})
    with pytest.raises(InvalidInput, match=r"environment.agent: .* has no function 'slove'; did you mean 'solve'"):
        check(tmp_path, {"agent": f"{path}:slove"})
    with pytest.raises(InvalidInput, match=r"environment.train_call: "):
        check(tmp_path, {"agent": f"{path}:solve", "train_call": f"{path}:nothing"})


def test_a_command_names_columns(tmp_path: Path) -> None:
    check(tmp_path, {"command": ["solve", "{prompt}", "--answer={answer}", "{}", "{a b}"]})
    with pytest.raises(
        DataError, match=r"names \{question\}, which is not a column of data.train; the columns are prompt, answer"
    ):
        check(tmp_path, {"command": ["solve", "{question}"]})
