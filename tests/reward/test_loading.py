"""Loading: names, files of one name, and an error for each possible fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidInput
from paceline.reward.builtin import BUILTIN_FUNCTIONS
from paceline.reward.calling import load_function
from paceline.user_code.loading import NeighbourFinder, describe_error
from paceline.user_code.process import BOOT
from paceline.user_code.surroundings import ROOT


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(NeighbourFinder, "folders", [])


def refusal(function: str, **kwargs: object) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_function(function, kwargs)
    return str(caught.value)


def test_every_built_in_is_found_under_its_own_name() -> None:
    judged = {"rubric": "r", "endpoint": {"base_url": "http://judge/v1", "model": "m"}}
    required: dict[str, dict[str, Any]] = {
        "judge": judged,
        "judge_pairwise": judged,
        "length": {"tolerance_tokens": 1},
        "soft_overlong": {"max_completion_tokens": 2, "soft_tokens": 1},
        "format_regex": {"pattern": "a"},
        "process_reward_model": {"path": "a-folder"},
        "reward_model": {"path": "a-folder"},
    }
    for name, function in BUILTIN_FUNCTIONS.items():
        assert load_function(name, required.get(name)) is function
        assert function.__name__ == name


def test_unknown_built_in_says_what_was_meant_and_lists_all() -> None:
    message = refusal("math_acuracy")
    assert "did you mean 'math_accuracy'?" in message
    assert all(name in message for name in BUILTIN_FUNCTIONS)
    assert "path/to/file.py:function" in message


def test_settings_of_built_ins_are_checked() -> None:
    assert "takes no 'answer_colum', did you mean 'answer_column'?" in refusal("math_accuracy", answer_colum="x")
    assert "needs 'pattern'; write it into the function's kwargs" in refusal("format_regex")
    assert "takes no 'completions'" in refusal("exact_match", completions=[])


def test_own_function_and_its_neighbours(functions_file: Path) -> None:
    assert load_function(f"{functions_file}:scaled", {"factor": 2})(completions=["a"], factor=2) == [3.0]


def test_two_files_of_one_name_and_none_of_ours_is_shadowed(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        write(tmp_path / name / "learner.py", f"def f(completions, **columns): return [{value}.0]\n")
    first, second = (load_function(f"{tmp_path / name / 'learner.py'}:f") for name in ("a", "b"))
    assert (first(completions=[""]), second(completions=[""])) == ([1.0], [2.0])
    import paceline.learner

    assert paceline.learner.__file__ is not None
    assert not paceline.learner.__file__.startswith(str(tmp_path))


def test_dataclasses_work_in_a_loaded_file(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass D:\n    x: int\n"
    path = write(tmp_path / "r.py", text + "def f(completions, **columns): return [D(4).x]\n")
    assert load_function(f"{path}:f")(completions=[""]) == [4]


def test_a_missing_file(tmp_path: Path) -> None:
    assert f"there is no file '{tmp_path}/none.py'" in refusal(f"{tmp_path}/none.py:f")


def test_a_file_that_fails_to_import_says_where(tmp_path: Path) -> None:
    path = write(tmp_path / "broken.py", "x = 1\nimport no_such_module_at_all\n")
    for _ in range(2):  # the failed module must not be taken for a loaded one
        message = refusal(f"{path}:f")
        assert "No module named 'no_such_module_at_all' (broken.py:2 in <module>)" in message
    assert "SystemExit: 2 (leaves.py:1" in refusal(f"{write(tmp_path / 'leaves.py', 'raise SystemExit(2)')}:f")
    assert "(typo.py:2)" in refusal(f"{write(tmp_path / 'typo.py', 'x = 1' + chr(10) + 'def f(:')}:f")


def test_a_missing_function_says_what_was_meant(functions_file: Path) -> None:
    message = refusal(f"{functions_file}:by_lenght")
    assert "no function 'by_lenght', did you mean 'by_length'?" in message


def test_what_cannot_be_called_or_is_no_python(functions_file: Path, tmp_path: Path) -> None:
    assert "'NOT_CALLABLE'" in refusal(f"{functions_file}:NOT_CALLABLE")
    assert "is int, but a reward function must be callable" in refusal(f"{functions_file}:NOT_CALLABLE")
    assert "not a Python file" in refusal(f"{write(tmp_path / 'data.txt', 'x')}:f")


def test_settings_of_own_functions_are_checked_unless_they_take_all(functions_file: Path) -> None:
    assert "takes no 'anser', did you mean 'answer'?" in refusal(f"{functions_file}:takes_one_column", anser=1)
    load_function(f"{functions_file}:scaled", {"anything": 1})


def test_an_exception_of_several_lines_keeps_its_type_and_first_line() -> None:
    try:
        raise ValueError("error \n second line")
    except ValueError as error:
        described = describe_error(error, Path(__file__))
    assert described.startswith("ValueError: error … (test_loading.py:")
    assert "second line" not in described


def test_a_users_package_of_the_name_of_a_folder_of_ours_is_theirs(tmp_path: Path) -> None:
    """In a child of user code too, which imports `paceline` from the folder of all our packages."""
    write(tmp_path / "services" / "__init__.py", "WANTED = 4\n")
    file = write(tmp_path / "mine.py", "from services import WANTED\ndef f(completions): return [float(WANTED)]\n")
    found, _, _ = BOOT.partition("importlib.import_module")
    script = f"from paceline.reward.calling import load_function; print(load_function('{file}:f')(completions=['']))"
    command = [sys.executable, "-P", "-c", found + script, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[4.0]\n", done.stderr
