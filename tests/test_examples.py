"""The commands and files of the README and examples/, loaded, opened and scored as the services would."""

import ast
import json
import linecache
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from python_path import python_path

from paceline.data.prompts import open_prompts
from paceline.data.rows import open_rows
from paceline.errors import InvalidInput, SpecError
from paceline.reward.builtin import SETTINGS
from paceline.reward.runner import RewardRunner
from paceline.services.cli.running.train import load_for
from paceline.services.coordinator.lifecycle.run_data import open_data
from paceline.services.local.one_call import TrainedRun, assembled
from paceline.spec import RunSpec
from paceline.spec.reading import load_spec

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PACKAGED = ROOT / "services" / "demo"

GSM8K_ROWS = [
    {
        "question": "A box holds 6 rows of 4 eggs. 5 eggs are broken. How many are whole?",
        "answer": "The box holds 6*4 = <<6*4=24>>24 eggs.\nWhole are 24-5 = <<24-5=19>>19 eggs.\n#### 19",
    },
    {
        "question": "A bicycle costs $1,000 and a helmet a tenth of that. What do both cost?",
        "answer": "The helmet costs 1000/10 = $<<1000/10=100>>100.\nBoth cost $<<1000+100=1100>>1,100.\n#### 1,100",
    },
]


def read_yaml(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    return tree


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.M | re.S)


async def score(spec: RunSpec, prompt: Any, completions: list[Any], columns: dict[str, Any]) -> list[list[float]]:
    """Rewards [C][F] of the spec's functions, in their worker process."""
    count = len(completions)
    async with RewardRunner(spec.rewards) as runner:
        for _ in range(3):  # a program may get no core of a busy machine; then a reward worker tries again too
            result = await runner.score(
                [prompt] * count,
                completions,
                [[1]] * count,
                {name: [value] * count for name, value in columns.items()},
            )
            if result.failure is None or result.failure.kind != "unavailable":
                break
    assert result.failure is None, result.failure
    assert result.rewards_CF is not None
    rewards: list[list[float]] = result.rewards_CF.tolist()
    return rewards


def notebook_cells(path: Path) -> list[str]:
    """Source of the code cells, registered as an interactive session does, so that functions have their source."""
    cells = ["".join(cell["source"]) for cell in read_json(path)["cells"] if cell["cell_type"] == "code"]
    for number, source in enumerate(cells):
        lines = source.splitlines(keepends=True)
        linecache.cache[f"<cell {number}>"] = (len(source), None, lines, f"<cell {number}>")
    return cells


def read_json(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(path.read_text())
    return tree


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_notebook(path: Path) -> dict[str, Any]:
    """Execute the code cells in their order; return the notebook's names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(notebook_cells(path)):
        exec(compile(source, f"<cell {number}>", "exec"), names)
    return names


async def test_the_notebook_makes_a_run_whose_functions_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RunSpec] = []

    def train(*, rewards: Any, data: Any, directory: Path, **sections: Any) -> TrainedRun:
        made.append(assembled(None, (), sections, rewards, data, None, directory.resolve()))
        return TrainedRun("run-1", tmp_path, tmp_path, [{"step": 0, "reward": 0.5}], [], {})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.services.local.one_call.train", train)
    monkeypatch.setattr(TrainedRun, "samples", lambda *_, step: [{"prompt": "1+1=", "completions": []}])
    monkeypatch.setattr("paceline.services.demo.task.make_model", lambda *_, **__: None)
    run_notebook(EXAMPLES / "notebook" / "train.ipynb")
    (spec,) = made
    assert len(open_prompts(spec.data, 0)) == 100
    assert await score(spec, "1+1=", ["2", "3"], {"answer": "2"}) == [[1.0, 1.0], [0.0, 1.0]]


@pytest.mark.slow
def test_the_notebook_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_notebook(EXAMPLES / "notebook" / "train.ipynb")
    assert [row["step"] for row in names["result"].metrics] == [0, 1, 2, 3]
    assert (names["result"].export_path / "config.json").is_file()
    assert len(names["group"]["completions"]) == 4


def test_the_arithmetic_specs_are_the_demos() -> None:
    here, packaged = EXAMPLES / "arithmetic", PACKAGED
    assert read_yaml(here / "sft.yaml") == read_yaml(packaged / "sft.yaml")
    example, demo = read_yaml(here / "grpo.yaml"), read_yaml(packaged / "grpo.yaml")
    assert example["policy"].pop("model_name") == "./runs/sft-1/export"
    assert example.pop("rewards") == [{"function": "reward.py:correct"}]
    demo["policy"].pop("model_name")
    demo.pop("rewards")
    assert example == demo


def test_the_lora_recipe_is_stage_two_with_an_adapter() -> None:
    here = EXAMPLES / "arithmetic"
    recipe, stage_two = read_yaml(here / "lora.yaml"), read_yaml(here / "grpo.yaml")
    assert load_spec(here / "lora.yaml").policy.lora_cfg.enabled
    for tree in (recipe, stage_two):
        tree.pop("name")
        tree.pop("cluster")
        tree["policy"].pop("optimizer")
    recipe["policy"].pop("lora_cfg")
    assert recipe == stage_two


def test_the_arithmetic_example_can_be_copied_and_prepared(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(EXAMPLES / "arithmetic", folder, ignore=shutil.ignore_patterns("data", "model", "runs"))
    subprocess.run(
        [sys.executable, "prepare.py"],
        cwd=folder,
        check=True,
        timeout=120,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    sft, grpo = load_spec(folder / "sft.yaml"), load_spec(folder / "grpo.yaml")
    assert Path(sft.policy.model_name) == folder / "model"
    assert json.loads((folder / "model" / "config.json").read_text())["model_type"] == "qwen3"
    train = open_rows(sft.data.train, sft.data.train_split)
    held_out = open_prompts(grpo.data, grpo.seed, validation=True)
    assert len(train) + len(held_out) == 100 * 100
    prompts = {train[i]["prompt"] for i in range(len(train))}
    assert not prompts & {held_out.draw(i)[0] for i in range(len(held_out))}


@pytest.mark.merge
@pytest.mark.slow
def test_the_code_example_can_be_copied_and_prepared(tmp_path: Path) -> None:
    folder = tmp_path / "copied"
    shutil.copytree(EXAMPLES / "code", folder, ignore=shutil.ignore_patterns("data", "model", "runs"))
    subprocess.run(
        [sys.executable, "prepare.py", "--seed", "1"],
        cwd=folder,
        check=True,
        timeout=120,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    sft, grpo = load_spec(folder / "sft.yaml"), load_spec(folder / "grpo.yaml")
    assert Path(sft.policy.model_name) == folder / "model"
    open_data(grpo)
    rows = read_json_lines(folder / "data" / "train.jsonl")
    held_out = read_json_lines(folder / "data" / "validation.jsonl")
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}
    assert len(rows) + 8 * len(held_out) == 8 * 27**2


async def test_the_code_examples_reward_runs_the_tests(tmp_path: Path) -> None:
    names = runpy.run_path(str(EXAMPLES / "code" / "prepare.py"))
    steps = ("plus", "3"), ("times", "4")
    columns = {"tests": names["tests_of"](*steps), "entry_point": "f"}
    spec = load_spec(EXAMPLES / "code" / "grpo.yaml")
    completions = [names["body_of"](*steps), "x*4+12", "(x-3)*4", "(x+3*4", ""]
    try:
        scores = await score(spec, names["prompt_of"](*steps), completions, columns)
    except InvalidInput as error:  # no sandbox holds on this machine
        pytest.skip(str(error))
    assert scores == [[1.0], [1.0], [0.0], [0.0], [0.0]]


async def test_the_arithmetic_reward_is_exact_and_the_other_gives_partial_credit() -> None:
    spec = load_spec(EXAMPLES / "arithmetic" / "grpo.yaml")
    answers = {"answer": "250"}
    assert await score(spec, "07+45=", ["250", "251", "25", ""], answers) == [[1.0], [0.0], [0.0], [0.0]]
    spec = load_spec(EXAMPLES / "arithmetic" / "grpo.yaml", ["rewards.0.function=reward.py:right_digits"])
    rewards = await score(spec, "07+45=", ["250", "251", "052", "25"], answers)
    assert [row[0] for row in rewards] == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    """The example's folder with two rows in the form of the published files."""
    folder = tmp_path / "gsm8k"
    shutil.copytree(EXAMPLES / "gsm8k", folder, ignore=shutil.ignore_patterns("*.jsonl", "runs"))
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in GSM8K_ROWS))
    return folder


async def test_the_judge_example_scores_by_its_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ANSWER_CACHE", str(tmp_path))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", runpy.run_path(str(EXAMPLES / "judge" / "stand_in.py"))["complete"])
    server = web.AppRunner(app)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{server.addresses[0][1]}/v1"
    try:
        spec = load_spec(EXAMPLES / "judge" / "grpo.yaml", [f"rewards.0.kwargs.endpoint.base_url={url}"])
        rewards = await score(spec, "07+45=", ["250", "350", "999", "25"], {"answer": "250"})
    finally:
        await server.cleanup()
    assert rewards == [[1.0, 1.0], [pytest.approx(2 / 3), 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_the_judges_spec_for_a_chat_model_loads() -> None:
    spec = load_spec(EXAMPLES / "judge" / "chat.yaml")
    assert [reward.gate_min for reward in spec.rewards] == [1.0, None, None]
    settings = SETTINGS["judge_pairwise"](spec.rewards[1].kwargs)
    assert settings.endpoint.api_key_env == "JUDGE_API_KEY"


def test_gsm8k_rows_become_chats_and_keep_their_answers(gsm8k: Path) -> None:
    spec = load_spec(gsm8k / "grpo.yaml")
    prompts = open_prompts(spec.data, spec.seed, validation=True)  # in the file's order
    drawn = [prompts.draw(i) for i in range(2)]
    for (messages, columns), row in zip(drawn, GSM8K_ROWS, strict=True):
        assert [message["role"] for message in messages] == ["system", "user"]
        assert messages[1]["content"] == row["question"]
        assert "<answer>" in messages[0]["content"]
        assert columns == {"answer": row["answer"]}
    assert len(open_prompts(spec.data, spec.seed)) == 2


async def test_gsm8k_rewards_weigh_accuracy_above_format(gsm8k: Path) -> None:
    spec = load_spec(gsm8k / "grpo.yaml")
    assert {reward.label: reward.weight for reward in spec.rewards} == {"accuracy": 1.0, "format": 0.2}
    prompts = open_prompts(spec.data, spec.seed, validation=True)
    prompt, columns = prompts.draw(1)
    texts = [
        "<think>A tenth is 100.</think><answer>1100</answer>",
        "<think>A tenth is 10.</think><answer>1,010</answer>",
        "A tenth is 100, so the answer is $1,100.",
        "<think>A tenth is 100.</think>",
    ]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert await score(spec, prompt, completions, columns) == [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    "page", ["examples/gsm8k/README.md", "examples/arithmetic/README.md", "examples/code/README.md"]
)
def test_every_override_of_an_examples_readme_loads(page: str, gsm8k: Path) -> None:
    folder = gsm8k if "gsm8k" in page else (ROOT / page).parent
    text = "\n".join(code_blocks(ROOT / page, "bash")).replace("\\\n", " ")
    commands = [shlex.split(line, comments=True) for line in text.splitlines()]
    overridden = [words for words in commands if words[:2] == ["paceline", "up"] and len(words) > 3]
    assert len(overridden) >= 3
    for words in overridden:
        load_spec(folder / Path(words[2]).name, words[3:])


def test_every_preference_recipe_loads_under_its_own_command() -> None:
    folder = EXAMPLES / "preferences"
    text = "\n".join(code_blocks(folder / "README.md", "bash"))
    commands = [shlex.split(line, comments=True) for line in text.splitlines()]
    loaded = {load_for(w[1], str(folder / w[2]), tuple(w[3:])).algorithm for w in commands if w}
    assert loaded == {"sft", "dpo", "orpo", "kto", "rm", "distillation"}
    with pytest.raises(SpecError, match="use `paceline rm`"):
        load_for("dpo", str(folder / "rm.yaml"), ())


def test_every_preference_recipe_has_data() -> None:
    folder = EXAMPLES / "preferences"
    made = runpy.run_path(str(folder / "make_data.py"))["files"]()
    for name, rows in made.items():
        assert [json.loads(line) for line in (folder / name).read_text().splitlines()] == rows
    for recipe in sorted(folder.glob("*.yaml")):
        data = open_data(load_spec(recipe))
        assert data.num_rows >= 160, recipe.name


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Return a copy of the pipeline example, with its data."""
    folder = tmp_path / "pipeline"
    ignored = shutil.ignore_patterns("data", "model", "runs", "__pycache__")
    shutil.copytree(EXAMPLES / "pipeline", folder, ignore=ignored)
    runpy.run_path(str(folder / "prepare.py"))["make_data"](folder / "data", 0)
    return folder


def test_every_spec_of_the_pipeline_reads_its_data(pipeline: Path) -> None:
    for run_id in ("sft-1", "rm-2", "grpo-3"):
        (pipeline / "runs" / run_id / "export").mkdir(parents=True)
    for algorithm in ("sft", "rm", "grpo", "dpo"):
        spec = load_for(algorithm, str(pipeline / f"{algorithm}.yaml"), ())
        assert open_data(spec).num_rows > 5000, algorithm


def test_no_problem_of_the_pipeline_is_trained_on(pipeline: Path) -> None:
    prompts = {
        name: {row["prompt"] for row in read_json_lines(pipeline / "data" / f"{name}.jsonl")}
        for name in ("demonstrations", "pairs", "prompts", "problems", "requests")
    }
    trained = prompts["demonstrations"] | prompts["pairs"] | prompts["prompts"]
    assert not trained & prompts["problems"]
    assert not trained & prompts["requests"]
    assert not prompts["problems"] & prompts["requests"]
    assert sum(map(len, (trained, prompts["problems"], prompts["requests"]))) == 10_000


@pytest.mark.slow
def test_the_pipeline_promotes_what_is_better_and_stops_what_is_worse(pipeline: Path) -> None:
    environment = os.environ | {"PYTHONPATH": python_path(ROOT)}
    done = subprocess.run(
        [sys.executable, "pipeline.py"],
        cwd=pipeline,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["reward_model_accuracy"] > 0.8
    assert result["grpo_after"] > result["grpo_before"] + 0.1
    assert result["gate"] == "passed"
    assert result["worse_candidate"]["gate"] == "failed"
    assert result["lucky_candidate"] == {"gate": "passed", "traces": "roll back"}


async def test_the_readmes_first_reward_function_scores(tmp_path: Path) -> None:
    (source,) = [block for block in code_blocks(ROOT / "README.md", "python") if "my_rewards.py" in block]
    (spec_text,) = [block for block in code_blocks(ROOT / "README.md", "yaml") if "my_run.yaml" in block]
    (tmp_path / "my_rewards.py").write_text(source)
    (tmp_path / "my_run.yaml").write_text(spec_text)
    spec = load_spec(tmp_path / "my_run.yaml")
    rewards = await score(spec, "07+45=", ["250", "251", "25"], {"answer": "250"})
    assert [row[0] for row in rewards] == pytest.approx([1.0, 2 / 3, 0.0])


async def test_the_tutorials_files_make_both_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "use" / "tutorial.md"
    for block in [*code_blocks(page, "python"), *code_blocks(page, "yaml")]:
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("make_data.py")
    commands = [shlex.split(line) for block in code_blocks(page, "bash") for line in block.splitlines()]
    runs = [words[2:] for words in commands if words[:2] == ["paceline", "up"]]
    (tmp_path / "runs" / "sft-1" / "export").mkdir(parents=True)
    for (file, *overrides), expected in zip(runs, ([2 / 3, 0.0], [2 / 3, 0.0]), strict=True):
        spec = load_spec(tmp_path / file, overrides)
        assert open_data(spec).num_rows == 1500
        rewards = await score(spec, "57+68=", ["521", "520"], {"answer": "521"})
        assert rewards == [pytest.approx([1.0, 1.0]), pytest.approx(expected)]
    assert [(spec.name, [each.weight for each in spec.rewards])] == [("exact", [0.0, 1.0])]


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").glob("*.md")),
    *sorted(EXAMPLES.rglob("*.md")),
]


ONLY_IN_THE_SITE = re.findall(r"docs/reference/\w+\.md", (ROOT / "docs" / "site" / "mkdocs.yml").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    paths = [(page.parent / link).resolve() for link in links if "://" not in link]
    broken = [str(path) for path in paths if not path.exists() and str(path.relative_to(ROOT)) not in ONLY_IN_THE_SITE]
    names = re.findall(r"`((?:[\w-]+/)+\w+\.py)(?::([\w.]+))?`", text)
    for path, name in names:
        if path.startswith("path/to/"):
            continue  # a place-holder for the reader's own
        if not (ROOT / path).is_file():
            broken.append(path)
        elif name and not defines(ROOT / path, name):
            broken.append(f"{path}:{name}")
    assert not broken


def defines(path: Path, name: str) -> bool:
    """Return whether a file defines `function`, `Class`, `Class.method` or `CONSTANT`."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in name.split("."):
        found = [node for node in body if part in names_of(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def names_of(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    named = [each for target in targets for each in getattr(target, "elts", [target])]
    return [each.id for each in named if isinstance(each, ast.Name)]
