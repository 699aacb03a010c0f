"""Faults that every group of a run would have are found when the run is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import tokenizer_of

from paceline.errors import DataError, InvalidInput
from paceline.services.coordinator.lifecycle.submission_checks import check_network, checked_data
from paceline.spec import RunSpec
from paceline.spec.sections.system import WeightsSection
from paceline.tls.folder import VARIABLE

CHAT = [{"role": "user", "content": "2+2?"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def spec_for(folder: Path, row: dict[str, Any], *rewards: dict[str, Any], **data: Any) -> RunSpec:
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    tree = {
        "policy": {"model_name": str(folder)},
        "data": {"train": str(folder / "train.jsonl"), **data},
        "rewards": list(rewards) or [{"function": "think_answer_format"}],
    }
    return RunSpec.model_validate(tree)


def test_a_built_in_that_lacks_its_column_is_refused(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "ground_truth": "4"}
    with pytest.raises(DataError, match=r"rewards\.0: 'math_accuracy' needs the column 'answer', but .*ground_truth"):
        checked_data(spec_for(tmp_path, row, {"function": "math_accuracy"}))
    named = {"function": "math_accuracy", "kwargs": {"answer_column": "ground_truth"}}
    assert checked_data(spec_for(tmp_path, row, named))[1] == []


def test_gold_answers_that_give_no_score_are_a_warning(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, {"prompt": "2+2=", "answer": "4"}, {"function": "math_accuracy"})
    rows = [{"prompt": "2+2=", "answer": answer} for answer in ("4", "5", None, "6")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (warning,) = checked_data(spec)[1]
    assert "no score to 1 of the first 4 rows of data.train (25.0%)" in warning
    assert "the gold answer is null; correct the column 'answer'" in warning


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("def f(prompts, completions, answer): ...", True),
        ("async def f(completions, *, answer, **kwargs): ...", True),
        ("def f(completions, answer=None): ...", False),
        ("def f(completions, log_metric, **columns): ...", False),
        ("def f(completions, task): ...", False),
        ("def f(completions, scale): ...", False),
        ("@wrap\ndef f(completions, answer): ...", False),
        ("def f(completions, answer): ...\nf = wrap(f)", False),
        ("def f(completions, answer): ...\nif True:\n    def f(completions): ...", False),
        ("def f(completions, answer:", False),
        ("f = lambda completions, answer: 1", False),
        ("\x00", False),
    ],
)
def test_a_function_in_a_file_that_lacks_its_column_is_refused(tmp_path: Path, source: str, refused: bool) -> None:
    (tmp_path / "r.py").write_text(source)
    reward = {"function": f"{tmp_path / 'r.py'}:f", "kwargs": {"scale": 2}}
    spec = spec_for(tmp_path, {"prompt": "a", "task": "b"}, reward)
    if refused:
        with pytest.raises(DataError, match=r"rewards\.0: 'f' needs the column 'answer'.*are: task; give the"):
            checked_data(spec)
    else:
        checked_data(spec)


def test_a_judge_that_lacks_its_column_or_holds_a_key_is_refused(tmp_path: Path) -> None:
    endpoint = {"base_url": "http://judge/v1", "model": "m"}
    kwargs = {"endpoint": endpoint, "rubric": "r", "template": "{prompt} {gold} {completion}"}
    row = {"prompt": "2+2=", "answer": "4"}
    with pytest.raises(DataError, match=r"rewards\.0: 'judge' needs the column 'gold', but .*answer"):
        checked_data(spec_for(tmp_path, row, {"function": "judge", "kwargs": kwargs}))
    kwargs = {"endpoint": {**endpoint, "api_key": "sk-secret"}, "rubric": "r"}
    with pytest.raises(DataError, match=r"rewards\.0\.kwargs: judge takes no 'endpoint\.api_key'") as caught:
        checked_data(spec_for(tmp_path, row, {"function": "judge", "kwargs": kwargs}))
    assert "sk-secret" not in str(caught.value)
    kwargs = {"endpoint": {**endpoint, "api_key_env": "ABSENT_API_KEY"}, "rubric": "r"}
    assert checked_data(spec_for(tmp_path, row, {"function": "judge", "kwargs": kwargs}))[1] == []


def test_code_tests_that_cannot_be_read_or_take_too_long_are_refused(tmp_path: Path) -> None:
    row = {"prompt": "add", "tests": ["assert add(1, 1) == 2"]}
    function: dict[str, Any] = {"function": "code_tests"}
    assert checked_data(spec_for(tmp_path, row, function))[1] == []
    with pytest.raises(DataError, match=r"rewards\.0: 'code_tests' needs the column 'tests', but .*answer"):
        checked_data(spec_for(tmp_path, {"prompt": "add", "answer": "x"}, function))
    with pytest.raises(DataError, match=r"rewards\.0: column 'tests': test 0 is not Python"):
        checked_data(spec_for(tmp_path, {"prompt": "add", "tests": ["assert ("]}, function))
    with pytest.raises(DataError, match=r"rewards\.0\.kwargs: code_tests takes no 'sandboxx', did you mean 'sandbox'"):
        checked_data(spec_for(tmp_path, row, {**function, "kwargs": {"sandboxx": "none"}}))
    slow = {**function, "kwargs": {"total_time_s": 20}}
    with pytest.raises(
        DataError, match=r"8 programs of up to total_time_s 20, 2 at a time .* 89 s, but timeout_s .* 30"
    ):
        checked_data(spec_for(tmp_path, row, slow))
    checked_data(spec_for(tmp_path, row, {**slow, "timeout_s": 90}))
    spec = spec_for(tmp_path, row, function)
    unknown = {"prompt": "b", "tests": [{"input": "1", "output": "1", "hidden": True}]}
    Path(str(spec.data.train)).write_text("".join(f"{json.dumps(each)}\n" for each in (row, unknown)))
    with pytest.raises(DataError, match=r"column 'tests': test 0 has the key 'hidden', which is unknown"):
        checked_data(spec)


def test_a_file_that_is_not_on_this_machine_is_left_to_the_workers(tmp_path: Path) -> None:
    checked_data(spec_for(tmp_path, {"prompt": "a"}, {"function": f"{tmp_path / 'away.py'}:f"}))


def test_prompts_with_tools_need_a_template_that_reads_them(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    spec = spec_for(tmp_path, {"prompt": CHAT, "tools": tools})
    (tmp_path / "chat_template.jinja").write_text("{% for tool in tools %}{{ tool }}{% endfor %}")
    assert checked_data(spec)[1] == []
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(DataError, match="have tools, which the chat template of the tokenizer does not read"):
        checked_data(spec)
    checked_data(spec_for(tmp_path, {"prompt": "2+2?", "tools": "any column"}))
    with pytest.raises(DataError, match=r"column 'tools' must be a list of JSON schemas of functions"):
        checked_data(spec_for(tmp_path, {"prompt": CHAT, "tools": "any column"}))
    (tmp_path / "own.py").write_text("class Own:\n    def reset(self, tools, **columns): ...\n")
    own = spec_for(tmp_path, {"prompt": CHAT, "tools": "any column"}).model_dump()
    own["environment"] = {"class": f"{tmp_path / 'own.py'}:Own"}
    checked_data(RunSpec.model_validate(own))


def test_chat_prompts_need_a_chat_template(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    spec = spec_for(tmp_path, {"prompt": CHAT})
    checked_data(spec)  # the tokenizer is not on this machine
    config.write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(DataError, match=r"prompts are chat messages, but .* has no chat template"):
        checked_data(spec)
    with pytest.raises(DataError, match="no chat template"):
        checked_data(spec_for(tmp_path, {"prompt": "a"}, system_prompt="Be brief."))
    checked_data(spec_for(tmp_path, {"prompt": "a"}))
    config.write_text('{"chat_template": "{{ messages }}"}')
    checked_data(spec)
    config.write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    checked_data(spec)
    with pytest.raises(DataError, match=r"data\.apply_chat_template is 'never'"):
        checked_data(spec_for(tmp_path, {"prompt": CHAT}, apply_chat_template="never"))


def test_columns_that_no_function_sees_are_named(tmp_path: Path) -> None:
    row = {"prompt": "a", "completions": "b", "answer": "c"}
    assert [text for text in checked_data(spec_for(tmp_path, row))[1] if "'completions'" in text]
    spec = spec_for(tmp_path, {"prompts": "a", "answer": "c"}, prompt_key="prompts")
    assert checked_data(spec)[1] == [], "the prompt's column is not given to functions"


def test_an_argument_that_the_template_does_not_read_is_refused(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, {"prompt": CHAT}, chat_template_kwargs={"enable_thinking": False})
    checked_data(spec)  # the tokenizer is not on this machine
    config = tmp_path / "tokenizer_config.json"
    for text in ('{"chat_template": [{"name": "a", "template": "b"}]}', '["chat_template"]', "{"):
        config.write_text(text)
        checked_data(spec)
    config.write_text('{"chat_template": "{{ messages }}{{ enable_thinkings }}"}')
    with pytest.raises(DataError, match=r"data\.chat_template_kwargs has 'enable_thinking', which the chat"):
        checked_data(spec)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}{% if enable_thinking %}!{% endif %}")
    checked_data(spec)


def test_an_architecture_that_cannot_be_trained_is_refused_by_name(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, {"prompt": "a"})
    config = tmp_path / "config.json"
    for passes in ('{"model_type": "qwen3"}', "[]", "{"):
        config.write_text(passes)
        checked_data(spec)
    config.write_text('{"model_type": "deepseek_v32", "index_topk": 2048}')
    with pytest.raises(InvalidInput, match=r"policy\.model_name .* 'deepseek_v32' are not supported: .*DSA"):
        checked_data(spec)


def test_an_object_store_in_the_clear_is_refused_with_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_for(tmp_path, {"prompt": "a"})
    to_store = spec.model_copy(update={"weights": WeightsSection(store="http://10.0.0.9/weights")})
    monkeypatch.delenv(VARIABLE, raising=False)
    check_network(to_store, "")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    check_network(spec, "s3://bucket/runs")
    with pytest.raises(InvalidInput, match=r"the object store .*https://"):
        check_network(to_store, "")
    allowed = WeightsSection(allow_plaintext_network=True)
    check_network(spec.model_copy(update={"weights": allowed}), "http://10.0.0.9/runs")


@pytest.mark.parametrize(
    ("algorithm", "row", "kind", "kept"),
    [
        ("grpo", {"prompt": "The answer:  is\n42 "}, "strips", "The answer: is 42"),
        ("grpo", {"prompt": "é"}, "unigram", "<unk>"),
        ("grpo", {"prompt": " é  \n42"}, "byte_level", ""),
        ("grpo", {"prompt": "The answer"}, "legacy_llama", ""),
        ("sft", {"prompt": "say", "completion": "yes\n42"}, "strips", "yes 42"),
        ("sft", {"messages": [*CHAT, {"role": "assistant", "content": "a  b"}]}, "strips", "a b"),
        ("dpo", {"prompt": "say", "chosen": "a\tb", "rejected": "no"}, "strips", "a b"),
        ("sft", {"text": "say yes"}, "metaspace_always", ""),
    ],
)
def test_texts_that_the_tokenizer_does_not_keep_are_a_warning(
    tmp_path: Path, algorithm: str, row: dict[str, Any], kind: str, kept: str
) -> None:
    tokenizer_of(kind, template=TEMPLATE).save_pretrained(tmp_path)
    spec = spec_for(tmp_path, row)
    if algorithm != "grpo":
        tree = {
            "algorithm": algorithm,
            "policy": {"model_name": str(tmp_path)},
            "data": {"train": spec.data.train},
        }
        spec = RunSpec.model_validate(tree)
    warnings = checked_data(spec)[1]
    if kept:
        assert len(warnings) == 1
        assert "does not preserve every text of the data" in warnings[0]
        assert f"{kept!r}; the model reads" in warnings[0]
    else:
        assert warnings == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is an empty folder; name a folder with config.json"),
        ({"model-q4.gguf": "GGUF"}, "has its weights as GGUF, which no worker loads"),
        (
            {"config.json": '{"quantization_config": {"quant_method": "awq"}}'},
            r"is quantised \(awq\) and cannot be trained",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    spec = spec_for(tmp_path, {"prompt": "a"})
    model = tmp_path / "model"
    model.mkdir()
    for name, text in files.items():
        (model / name).write_text(text)
    policy = spec.policy.model_copy(update={"model_name": str(model)})
    with pytest.raises(InvalidInput, match=message):
        checked_data(spec.model_copy(update={"policy": policy}))
    value = spec.value.model_copy(update={"model_name": str(model)})
    with pytest.raises(InvalidInput, match=rf"value\.model_name .*{message}"):
        checked_data(spec.model_copy(update={"value": value}))
    teacher = spec.distillation.model_copy(update={"teacher_model_name": str(model)})
    distilled = spec.model_copy(update={"distillation": teacher})
    if "config.json" in files:  # a quantised model can be a teacher
        checked_data(distilled)
    else:
        with pytest.raises(InvalidInput, match=rf"distillation\.teacher_model_name .*{message}"):
            checked_data(distilled)
    if "model-q4.gguf" in files:
        policy = policy.model_copy(update={"model_name": str(model / "model-q4.gguf")})
        with pytest.raises(InvalidInput, match="is a file; name the model's folder"):
            checked_data(spec.model_copy(update={"policy": policy}))


TENSOR = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
WEIGHTS = len(TENSOR).to_bytes(8, "little") + TENSOR + bytes(16)


@pytest.mark.parametrize(
    ("weights", "names", "message"),
    [
        (WEIGHTS[:-1], ("tokenizer.json",), "is damaged: it has 78 bytes, but 79 by its header; copy it again"),
        (WEIGHTS[:30], ("tokenizer.json",), "is damaged: its header cannot be read; copy it again"),
        (b"version https://git-lfs.github.com", ("tokenizer.json",), "is damaged: its header cannot be read"),
        (WEIGHTS, (), "has weights but no tokenizer; copy the model's tokenizer.json"),
        (WEIGHTS, ("vocab.json", "merges.txt"), ""),
        (WEIGHTS, ("spiece.model",), ""),
    ],
    ids=["cut", "cut_header", "pointer", "no_tokenizer", "vocabulary", "sentencepiece"],
)
def test_a_model_without_all_of_its_files_is_refused(
    tmp_path: Path, weights: bytes, names: tuple[str, ...], message: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(weights)
    for name in ("config.json", *names):
        (model / name).write_text("{}")
    scored = spec_for(tmp_path, {"prompt": "a"}, {"function": "reward_model", "kwargs": {"path": str(model)}})
    spec = scored.model_copy(update={"policy": scored.policy.model_copy(update={"model_name": str(model)})})
    if not message:
        checked_data(spec)
        return
    with pytest.raises(InvalidInput, match=f"policy.model_name .*{message}"):
        checked_data(spec)
    policy = spec.policy.model_copy(update={"tokenizer_name": str(tmp_path)})
    named = spec.model_copy(update={"policy": policy, "rewards": ()})
    if "tokenizer" in message:
        checked_data(named)
    else:
        with pytest.raises(InvalidInput, match=rf"rewards\.0\.kwargs\.path .*{message}"):
            checked_data(scored)


def test_a_file_that_no_worker_loads_refuses_no_model(tmp_path: Path) -> None:
    """Such as a pointer of Git LFS beside the model's files, or a copy's metadata."""
    model = tmp_path / "model"
    model.mkdir()
    shard, index = model / "model-00001-of-00001.safetensors", model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": shard.name}}))
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    shard.write_bytes(b"\x02" + bytes(7) + b"{}")
    for name in ("consolidated.safetensors", "._model.safetensors"):
        (model / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    spec = spec_for(tmp_path, {"prompt": "a"})
    spec = spec.model_copy(update={"policy": spec.policy.model_copy(update={"model_name": str(model)})})
    checked_data(spec)
    shard.write_bytes(b"\xff" * 20)
    with pytest.raises(InvalidInput, match=r"model-00001-of-00001\.safetensors is damaged"):
        checked_data(spec)


def test_a_reward_model_that_no_worker_loads_is_refused(tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / "exports" / "step-1").mkdir(parents=True)
    (models / "no exports yet").mkdir()
    (models / "quantised.gguf").write_text("GGUF")
    (models / "gguf").mkdir()
    (models / "gguf" / "quantised.gguf").write_text("GGUF")
    for path, message in (
        ("quantised.gguf", "is a file; name the model's folder"),
        ("gguf", "has its weights as GGUF, which no worker loads"),
        ("exports", ""),
        ("no exports yet", ""),
        ("elsewhere", ""),  # it may be on the workers' machines
    ):
        kwargs = {"path": str(models / path)}
        spec = spec_for(tmp_path, {"prompt": "a"}, {"function": "process_reward_model", "kwargs": kwargs})
        if message:
            with pytest.raises(InvalidInput, match=rf"rewards\.0\.kwargs\.path .*{message}"):
                checked_data(spec)
        else:
            checked_data(spec)


def test_a_function_that_its_file_lacks_is_refused_with_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def digits(completions, **columns):\n    return [0.0 for _ in completions]\n")
    row, code = {"prompt": "a"}, f"{tmp_path / 'own.py'}:"
    checked_data(spec_for(tmp_path, row, {"function": f"{code}digits"}))
    with pytest.raises(InvalidInput, match=r"rewards\.0: .*own\.py has no function 'digit'; did you mean 'digits'"):
        checked_data(spec_for(tmp_path, row, {"function": f"{code}digit"}))


def test_a_misspelt_built_in_is_refused_with_its_neighbour(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInput, match=r"rewards\.0: .*'math_acuracy' is not built in, did you mean 'math_accuracy'"
    ):
        checked_data(spec_for(tmp_path, {"prompt": "a", "answer": "4"}, {"function": "math_acuracy"}))
    reward = {"function": "math_accuracy", "kwargs": {"answer_colum": "a"}}
    with pytest.raises(InvalidInput, match=r"rewards\.0: .*takes no 'answer_colum', did you mean 'answer_column'"):
        checked_data(spec_for(tmp_path, {"prompt": "a", "answer": "4"}, reward))
