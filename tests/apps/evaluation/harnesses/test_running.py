"""lm-eval and inspect-ai against served models: they agree with `paceline eval` and with transformers, sample by sample."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from evaluation_questions import QUESTIONS
from tiny_chat import save_tiny_chat
from transformers_scores import scores_by_transformers

from paceline.apps.evaluation.engine_model import EngineModel
from paceline.apps.evaluation.evaluate import evaluation_spec
from paceline.apps.evaluation.harnesses import program_of, result_of, run_harness
from paceline.apps.evaluation.runner import evaluate
from paceline.apps.model_server.serving import ServedModel, opened_model
from paceline.errors import InvalidInput
from paceline.services.cli.chat import spec_of_model
from paceline.spec import RunSpec

PROGRAMS = Path(__file__).resolve().parents[4] / ".venv-harnesses" / "bin"
installed = pytest.mark.skipif(not (PROGRAMS / "inspect").is_file(), reason="needs make harnesses")
GENERATE = """
policy: {generation: {max_new_tokens: 8, temperature: 1.0e-4}}
data: {validation: questions.jsonl, prompt_key: question, apply_chat_template: TEMPLATE}
rewards: [{function: exact_match, kwargs: {answer_column: target, strip: false}}]
"""
CHOOSE_TASK = """
task: made_choose
dataset_path: json
dataset_kwargs: {data_files: QUESTIONS}
output_type: multiple_choice
test_split: train
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: options
doc_to_target: right
target_delimiter: " "
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE_TASK = """
task: made_generate
dataset_path: json
dataset_kwargs: {data_files: QUESTIONS}
output_type: generate_until
test_split: train
doc_to_text: question
doc_to_target: target
generation_kwargs: {until: [], temperature: 0, max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import generate


@scorer(metrics=[accuracy()])
def same():
    async def score(state, target: Target):
        return Score(value=float(state.output.completion == target.text))
    return score


@task
def made():
    def read(row):
        return Sample(input=row["question"], target=row["target"])
    config = GenerateConfig(temperature=0.0, max_tokens=8)
    return Task(dataset=json_dataset(QUESTIONS, read), solver=generate(), scorer=same(), config=config)
"""


@pytest.fixture(params=["native", pytest.param("vllm", marks=pytest.mark.vllm)])
def model(request: pytest.FixtureRequest, folder: Path) -> RunSpec:
    save_tiny_chat(folder / "model", hidden_size=64, head_dim=32, num_attention_heads=4)
    spec = spec_of_model(str(folder / "model"), folder)
    generation: dict[str, Any] = {"max_new_tokens": 8, "max_batch_size": 8}
    if request.param == "vllm":
        generation |= {"backend": "vllm", "vllm_cfg": {"kv_cache_memory_bytes": 1 << 26}}
    policy = spec.policy.model_dump() | {"max_total_sequence_length": 512, "generation_precision": "float32"}
    policy["generation"] |= generation
    return RunSpec.model_validate(spec.model_dump() | {"policy": policy})


def spec_of(folder: Path, text: str, model: RunSpec) -> RunSpec:
    """Return the spec of an evaluation, with the model's engine."""
    (folder / "eval.yaml").write_text(text)
    spec = evaluation_spec(folder / "eval.yaml", (), model)
    params = {"max_new_tokens": 8, "temperature": 1e-4}
    generation = model.policy.generation.model_copy(update=params)
    return spec.model_copy(update={"policy": model.policy.model_copy(update={"generation": generation})})


async def with_own_answers(folder: Path, served: ServedModel, template: str) -> list[dict[str, Any]]:
    """Return the samples of `paceline eval`, where the target of every second question is what the model says."""
    path = folder / "questions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    samples: list[dict[str, Any]] = []
    for _ in range(2):
        targets = [s["completion"] if s["index"] % 2 else "another" for s in samples] or ["?"] * len(rows)
        path.write_text("".join(json.dumps({**r, "target": t}) + "\n" for r, t in zip(rows, targets, strict=True)))
        spec = spec_of(folder, GENERATE.replace("TEMPLATE", template), served.spec)
        asked = ServedModel(
            "eval",
            spec,
            served.engine,
            served.tokenizer,
            type(served.params).from_spec(spec.policy.generation),
        )
        samples = (await evaluate(EngineModel(asked), spec, 0)).samples
    assert [sample["reward"] for sample in samples] == [0.0, 1.0, 0.0, 1.0]
    return samples


@installed
@pytest.mark.harnesses
async def test_lm_eval_agrees_with_transformers_and_with_paceline(
    folder: Path, model: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(PROGRAMS), prepend=":")
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, text in (("choose", CHOOSE_TASK), ("generate", GENERATE_TASK)):
        (tasks / f"{name}.yaml").write_text(text.replace("QUESTIONS", str(folder / "questions.jsonl")))
    async with opened_model(model, "tiny") as served:
        generated = await with_own_answers(folder, served, "never")
        choosing = spec_of(folder, (folder / "choose.yaml").read_text().replace("Answer: ", "Answer:"), model)
        asked = ServedModel("eval", choosing, served.engine, served.tokenizer, served.params)
        chosen = (await evaluate(EngineModel(asked), choosing, 0)).samples
        run = await run_harness(
            served, "lm-eval", ["--include_path", str(tasks), "--tasks", "made_choose,made_generate"]
        )
    by_task: dict[str, list[Any]] = {"made_choose": [], "made_generate": []}
    for sample in run.samples:
        by_task[sample.task].append(sample)
    for theirs, ours in zip(by_task["made_generate"], generated, strict=True):
        assert theirs.completion == ours["completion"]
        assert theirs.scores == {"exact_match": ours["reward"]}
    for theirs, ours, (question, texts, _) in zip(by_task["made_choose"], chosen, QUESTIONS, strict=True):
        exact = scores_by_transformers(
            folder / "model", f"Question: {question}\nAnswer:", [f" {text}" for text in texts]
        )
        for scores in (theirs.choices, ours["choices"]):
            assert [score["logprob"] for score in scores] == pytest.approx([score.logprob for score in exact], abs=1e-4)
            assert [score["is_greedy"] for score in scores] == [score.is_greedy for score in exact]
        assert theirs.scores == {name: ours["rewards"][name] for name in ("acc", "acc_norm")}
    assert run.results["made_choose"]["acc,none"] == sum(each["rewards"]["acc"] for each in chosen) / 4


@installed
@pytest.mark.harnesses
async def test_inspect_agrees_with_paceline(folder: Path, model: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(PROGRAMS), prepend=":")
    monkeypatch.chdir(folder)  # Inspect takes task files below the working directory alone
    (folder / "made_task.py").write_text(INSPECT_TASK.replace("QUESTIONS", repr(str(folder / "questions.jsonl"))))
    async with opened_model(model, "tiny") as served:
        ours = await with_own_answers(folder, served, "always")
        run = await run_harness(served, "inspect", ["made_task.py"])
    for theirs, own in zip(run.samples, ours, strict=True):
        assert (theirs.completion, theirs.scores) == (own["completion"], {"same": own["reward"]})
    result, samples = result_of(run, "inspect", ["made_task.py"], "tiny", 0)
    assert result["metrics"]["reward/made/same"]["value"] == 0.5
    assert [sample["reward"] for sample in samples] == [sample["reward"] for sample in ours]


async def test_a_harness_gets_the_url_and_its_failure_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "bin" / "inspect"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport os, sys, urllib.request\n"
        "url = os.environ['PACELINE_BASE_URL'] + '/models'\n"
        "sys.exit(7 if b'tiny' in urllib.request.urlopen(url).read() else 8)\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    async with opened_model(spec_of_model(str(folder / "model"), folder), "tiny") as served:
        with pytest.raises(InvalidInput, match="inspect ended with status 7"):
            await run_harness(served, "inspect", ["task.py"])


def test_a_harness_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="lm_eval is neither on the path"):
        program_of("lm_eval")
