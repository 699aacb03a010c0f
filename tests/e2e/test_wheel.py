"""What a user installs is one name: their own `services/`, `reward.py` or `protos/` meets nothing of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paceline.services.demo.task import make_model

ROOT = Path(__file__).resolve().parents[2]
OWN = ("services", "learner", "protos", "environment.py", "rollout.py")
DEADLINE_S = 300
COMMAND = "from paceline.services.cli.main import main; main()"
"""What the console script `paceline` runs."""
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
REWARD = """\
from services import WANTED


def length(completions, **columns):
    return [float(len(text) == WANTED) for text in completions]
"""
TRAIN = """\
import json
from pathlib import Path

import environment, learner, protos, rollout, services
import paceline
from paceline.services.demo.task import make_model
from reward import length

assert all(each.WANTED == 4 for each in (environment, learner, protos, rollout, services))
make_model(Path("model"), seed=0, hidden=32, layers=1, heads=2)
result = paceline.train(
    policy={"model_name": "model", "max_total_sequence_length": 32, "generation": {"max_new_tokens": 8}},
    data=[{"prompt": f"{number}+1="} for number in range(4)],
    rewards=[length],
    grpo={"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 2},
    cluster={"rollout_workers": 1, "device": "cpu"},
)
print(json.dumps({"package": paceline.__file__, "steps": [row["step"] for row in result.metrics]}))
"""
SPEC = {
    "policy": {"model_name": "model", "max_total_sequence_length": 32, "generation": {"max_new_tokens": 8}},
    "data": {"train": "rows.jsonl"},
    "rewards": [{"function": "reward.py:length"}],
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 2},
    "cluster": {"rollout_workers": 1, "device": "cpu"},
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs, made from the files under version control."""
    tree, wheels, installed = (tmp_path_factory.mktemp(name) for name in ("tree", "wheels", "installed"))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if name.startswith(("tests/", "docs/", "benchmarks/", "recipes/")) or not os.path.lexists(ROOT / name):
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    subprocess.run([sys.executable, "-c", BUILD, str(wheels)], cwd=tree, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    return installed


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's folder whose packages have the names of our folders."""
    for name in OWN:
        path = tmp_path / name if name.endswith(".py") else tmp_path / name / "__init__.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("WANTED = 4\n")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(installed: Path, folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_wheel_installs_one_name(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"paceline"}
    tracked = subprocess.run(
        [
            "git",
            "ls-files",
            "paceline",
            "apps",
            "services",
            "learner",
            "rollout",
            "reward",
            "environment",
            "weights",
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    links = {path for path in tracked if (ROOT / path).is_symlink()}
    files = {path if path.startswith("paceline/") else f"paceline/{path}" for path in set(tracked) - links}
    assert {path for path in files if not (installed / path).is_file()} == set()


@pytest.mark.merge
@pytest.mark.slow
def test_training_beside_packages_of_the_users_own(installed: Path, own: Path) -> None:
    told = json.loads(run(installed, own, "train.py").splitlines()[-1])
    assert Path(told["package"]).is_relative_to(installed)
    assert told["steps"] == [0, 1]


@pytest.mark.slow
def test_a_run_by_command_beside_packages_of_the_users_own(installed: Path, own: Path) -> None:
    make_model(own / "model", seed=0, hidden=32, layers=1, heads=2)
    rows = "".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(4))
    (own / "rows.jsonl").write_text(rows)
    (own / "spec.yaml").write_text(json.dumps(SPEC))
    shown = run(installed, own, "-c", COMMAND, "up", "spec.yaml", "--no-page", "--port", "0")
    assert "succeeded" in shown


@pytest.mark.slow
def test_the_demo_beside_packages_of_the_users_own(installed: Path, own: Path) -> None:
    assert "reward" in run(installed, own, "-c", COMMAND, "demo")
