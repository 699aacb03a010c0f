"""Reading a spec: misspelt keys are refused with a suggestion, contradictions with both values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.errors import SpecError
from paceline.spec import RunSpec
from paceline.spec.reading import (
    load_spec,
    parse_spec,
    read_tree,
    spec_from_ledger,
    spec_from_yaml,
    spec_of_run,
    spec_to_yaml,
    submitted_spec,
)

TREE: dict[str, Any] = {
    "policy": {"model_name": "org/model"},
    "data": {"train": "org/data"},
    "rewards": [{"function": "length"}, {"function": "exact_match"}],
}


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "policy: {model_name: org/model}\ndata: {train: org/data}\n"
        "rewards: [{function: length}, {function: exact_match}]\n"
    )
    return path


def refusal(spec_path: Path, *overrides: str) -> str:
    """The message of the SpecError that these overrides cause."""
    with pytest.raises(SpecError) as caught:
        load_spec(spec_path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "grpo.num_prompt_per_step=4",
            "grpo.num_prompt_per_step: unknown key; did you mean 'num_prompts_per_step'?",
        ),
        ("algoritm=sft", "algoritm: unknown key; did you mean 'algorithm'?"),
        (
            "policy.optimizer.learning_rate=1",
            "policy.optimizer.learning_rate: unknown key; TRL's 'learning_rate' is policy.optimizer.lr in Paceline",
        ),
        ("rewards.1.wieght=2", "rewards.1.wieght: unknown key; did you mean 'weight'?"),
    ],
)
def test_an_unknown_key_suggests_the_intended_one(spec_path: Path, override: str, message: str) -> None:
    assert refusal(spec_path, override).startswith(message)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("grpo.num_prompts_per_step=0", ("grpo.num_prompts_per_step", "greater than 0", "got 0")),
        (
            "grpo.num_prompts_per_step=many",
            ("grpo.num_prompts_per_step", "must be an integer", "got 'many'"),
        ),
        ("weights.max_wait_s=.inf", ("weights.max_wait_s", "must be a finite number", "got inf")),
        ("weights.max_wait_s=604801", ("weights.max_wait_s", "less than or equal to 604800", "got 604801")),
        ("weights.max_wait_s=.nan", ("weights.max_wait_s", "got nan")),
        (
            "rewards=[{function: length, kwargs: {tolerance_tokens: .nan}}]",
            ("rewards.0.kwargs", "tolerance_tokens is nan, but every number must be finite"),
        ),
        (
            "rewards=[{function: reward_model, kwargs: {path: m, endpoint: {headers: [1, -.inf]}}}]",
            ("rewards.0.kwargs", "endpoint is {'headers': [1, -inf]}, but every number must be finite"),
        ),
        ("policy.optimizer.lr=.inf", ("policy.optimizer.lr", "must be a finite number", "got inf")),
        ("policy.optimizer.betas=[1.5,0.9]", ("policy.optimizer.betas.0", "less than 1", "got 1.5")),
        ("rewards.0.weight=.nan", ("rewards.0.weight", "must be a finite number", "got nan")),
        ("grpo.max_num_steps=99999999999999999999", ("max_num_steps is 99999999999999999999", "9223372036854775807")),
        ("policy.generation.stop_token_ids=[99999999999999999999]", ("stop_token_ids is 99999999999999999999",)),
        ("algorithm=ppo", ("algorithm", "'grpo', 'sft', 'dpo'", "loss_fn.preset: ppo", "got 'ppo'")),
        ("loss_fn.ratio_clip_min=1.5", ("loss_fn.ratio_clip_min", "less than or equal to 1", "got 1.5")),
    ],
)
def test_a_wrong_value_is_shown_with_its_field(spec_path: Path, override: str, parts: tuple[str, ...]) -> None:
    message = refusal(spec_path, override)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["checkpointing.metric_name=val:reward", "checkpointing.save_period=50", "grpo.val_period=20"],
            ("'val:reward' with checkpointing.save_period 50 and grpo.val_period 20",),
        ),
        (["checkpointing.metric_name=reward"], ("checkpointing.metric_name", "write val:reward")),
        (["weights.publish_interval=3"], ("weights.publish_interval 3", "max_trajectory_age_steps + 1 = 2")),
        (["async_grpo.hard_max_age=0"], ("hard_max_age 0", "max_trajectory_age_steps 1")),
        (
            ["policy.generation.max_new_tokens=64", "policy.max_total_sequence_length=64"],
            ("max_new_tokens 64", "max_total_sequence_length 64"),
        ),
        (
            ["policy.num_updates_per_step=8", "grpo.num_prompts_per_step=4"],
            ("num_updates_per_step 8", "num_prompts_per_step 4"),
        ),
        (["grpo.val_period=5"], ("grpo.val_period", "data.validation is not")),
        (["rewards=[]"], ("rewards is empty",)),
        (["rewards.1.function=length"], ("rewards has the name 'length' 2 times",)),
        (["rewards.0.weight=0", "rewards.1.weight=0"], ("every reward has weight 0",)),
        (["policy.generation.top_k=5"], ("top_k=5", "allow_biased_sampling=true")),
        (
            ["loss_fn.reference_policy_sync_steps=5"],
            ("reference_policy_sync_steps 5", "reference_policy_kl_penalty 0"),
        ),
        (
            [
                "loss_fn.reference_policy_sync_steps=5",
                "loss_fn.reference_policy_kl_penalty=0.1",
                "loss_fn.reference_policy_pool=reward",
            ],
            ("reference_policy_sync_steps 5", "do not get the policy's weights"),
        ),
        (
            [
                "loss_fn.reference_policy_sync_steps=5",
                "loss_fn.reference_policy_kl_penalty=0.1",
                "policy.lora_cfg.enabled=true",
            ],
            ("reference_policy_sync_steps 5", "the base without the adapter"),
        ),
        (["policy.generation.min_p=0.1"], ("min_p=0.1", "allow_biased_sampling=true")),
        (
            ["policy.generation.repetition_penalty=1.2"],
            ("repetition_penalty=1.2", "allow_biased_sampling=true"),
        ),
        (["policy.generation.stop_strings=['</a>', '']"], ("policy.generation.stop_strings.1",)),
        (["data.chat_template_kwargs={tokenize: false}"], ("'tokenize' is not an argument of the template",)),
        (["policy.generation.min_new_tokens=300"], ("min_new_tokens 300", "max_new_tokens 256")),
        (
            ["loss_fn.reference_policy_kl_penalty=0.1", "loss_fn.reference_policy_kl_type=k1"],
            ("'k1'", "reference_policy_kl_penalty 0.1"),
        ),
    ],
)
def test_a_contradiction_names_both_values(spec_path: Path, overrides: list[str], parts: tuple[str, ...]) -> None:
    message = refusal(spec_path, *overrides)
    for part in parts:
        assert part in message


def test_all_faults_are_reported_at_once(spec_path: Path) -> None:
    message = refusal(spec_path, "grpo.seed=-1", "polcy={}")
    assert [line.split(":")[0] for line in message.splitlines()] == ["grpo.seed", "polcy"]


def test_a_missing_required_key_is_named() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({"policy": {}, "data": {"train": "d"}})
    assert str(caught.value) == "policy.model_name: missing; every spec must set it"


@pytest.mark.parametrize(
    ("raw", "value"),
    [("1e-6", 1e-6), ("1.5E+2", 150.0), ("0.25", 0.25), ("2", 2.0)],
)
def test_an_override_reads_numbers_as_people_write_them(spec_path: Path, raw: str, value: float) -> None:
    assert load_spec(spec_path, [f"policy.optimizer.lr={raw}"]).policy.optimizer.lr == value


def test_overrides_reach_into_lists_and_make_sections(spec_path: Path) -> None:
    spec = load_spec(
        spec_path,
        ["rewards.1.weight=0.5", "rewards.0={function: length, name: short}", "cluster.rollout_gpus=[0, 1]",
         "policy.tokenizer_name=null", "data.system_prompt='a: b'"],
    )  # fmt: skip
    assert [(reward.label, reward.weight) for reward in spec.rewards] == [
        ("short", 1.0),
        ("exact_match", 0.5),
    ]
    assert spec.cluster.rollout_gpus == (0, 1)
    assert spec.data.system_prompt == "a: b"
    assert spec.policy.tokenizer_name is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.seed", "override 'grpo.seed' must look like section.key=value"),
        ("=3", "override '=3' must look like section.key=value"),
        ("++grpo.seed=3", "override '++grpo.seed=3' has Hydra's '+'; write it without this, as grpo.seed=3"),
        ("rewards.2.weight=1", "override 'rewards.2.weight=1': '2' must be an index below 2"),
        ("rewards.first.weight=1", "override 'rewards.first.weight=1': 'first' must be an index below 2"),
        (
            "policy.model_name.path=x",
            "override 'policy.model_name.path=x': 'path' is below a plain value, not in a section",
        ),
        ("policy.model_name.a.b=x", "override 'policy.model_name.a.b=x': 'a' is below a plain value, not in a section"),
        ("grpo.seed={1", "override 'grpo.seed={1': the value '{1' is not valid YAML; quote it"),
    ],
)
def test_an_override_that_cannot_be_applied_says_why(spec_path: Path, override: str, message: str) -> None:
    assert refusal(spec_path, override) == message


def test_paths_start_at_the_file_and_hub_names_stay(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").touch()
    (tmp_path / "spec.yaml").write_text(
        "policy: {model_name: ./made/later, tokenizer_name: org/tokenizer}\n"
        "data: {train: prompts.jsonl, validation: ../held_out.parquet}\n"
        "rewards: [{function: 'rewards/mine.py:brevity'}, {function: length}]\n"
    )
    spec = load_spec(tmp_path / "spec.yaml")
    assert spec.policy.model_name == str(tmp_path / "made" / "later")
    assert spec.policy.tokenizer_name == "org/tokenizer"
    assert spec.data.train == str(tmp_path / "prompts.jsonl")
    assert spec.data.validation == str(tmp_path.parent / "held_out.parquet")
    assert [r.function for r in spec.rewards] == [f"{tmp_path / 'rewards' / 'mine.py'}:brevity", "length"]
    assert [r.label for r in spec.rewards] == ["brevity", "length"]


def test_folders_that_a_run_makes_start_at_the_working_directory(
    spec_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    spec = load_spec(spec_path, ["checkpointing.checkpoint_dir=results/x", "weights.store=./w"])
    assert spec.checkpointing.checkpoint_dir == str(here / "results" / "x")
    assert spec.weights.store == str(here / "w")
    spec = load_spec(spec_path, ["checkpointing.checkpoint_dir=s3://b/c", "weights.store=/w"])
    assert (spec.checkpointing.checkpoint_dir, spec.weights.store) == ("s3://b/c", "/w")
    for section, key in (("checkpointing", "checkpoint_dir"), ("weights", "store")):
        tree = TREE | {section: {key: "results/x"}}
        with pytest.raises(SpecError, match=f"{key} 'results/x' is relative, and the services may run in different"):
            parse_spec(tree)


BILLION = "\n".join(["a: &l0 [1, 1]", *(f"a{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 20))])
"""A list of lists of lists …, each nine times the one before: 9^19 values in a few hundred bytes."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b", "is a list, but a spec is a mapping"),
        ("a: [1", "is not valid YAML"),
        ("", "is empty, but a spec is a mapping"),
        ("true", "is true or false, but a spec is a mapping"),
        ("3", "is a number, but a spec is a mapping"),
        ("0.5", "is a number, but a spec is a mapping"),
        ("name: \xff", "is not UTF-8 text: invalid start byte at byte 6"),
        ("a: " + "[" * 500, "is nested more than 32 levels deep"),
        ("a: &a [*a]", "is nested more than 32 levels deep"),
        (BILLION, "has more than 20000 keys and values, with its aliases written out"),
        ("x: " + "y" * (1 << 20), "has more than 1048576 bytes"),
        ("x: 2020-99-99", "is not valid YAML: month must be in 1..12"),
    ],
)
def test_a_file_that_is_no_spec_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(text.encode("latin-1"))
    assert message in refusal(path)


@pytest.mark.parametrize(
    ("override", "path", "reason"),
    [
        ("data.train=" + "x" * 300, "x" * 80, "File name too long"),
        ("data.train=~nobody-has-it/x", "~nobody-has-it/x", "Could not determine home directory"),
        (
            "checkpointing.checkpoint_dir=~nobody-has-it/x",
            "~nobody-has-it/x",
            "Could not determine home directory",
        ),
        ("rewards.0.function=~nobody-has-it/x:f", "~nobody-has-it/x", "Could not determine home directory"),
    ],
)
def test_a_path_that_no_file_system_accepts_is_refused(spec_path: Path, override: str, path: str, reason: str) -> None:
    assert refusal(spec_path, override) == f"the path {path!r} cannot be used: {reason}; correct it"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.yaml") == (
        f"cannot read the spec '{tmp_path / 'no.yaml'}': No such file or directory; check the path"
    )


def test_a_resolved_spec_travels_unchanged() -> None:
    spec = parse_spec(
        TREE | {"cluster": {"rollout_gpus": [0, 1]}, "policy": {"model_name": "m", "optimizer": {"lr": 1e-6}}}
    )
    assert spec_from_yaml(spec_to_yaml(spec)) == spec
    assert "num_prompts_per_step: 32" in spec_to_yaml(spec)


def test_a_run_recorded_before_there_were_shared_prompts_shares_none() -> None:
    text = spec_to_yaml(parse_spec(TREE))
    before = text.replace("  shared_prompts: auto\n", "")
    assert before != text
    assert submitted_spec(before).policy.shared_prompts == "auto"
    assert spec_from_yaml(before).policy.shared_prompts is False
    for value in ("true", "false", "auto"):
        stored = text.replace("shared_prompts: auto", f"shared_prompts: {value}")
        assert spec_from_yaml(stored).policy.shares_prompts == (value == "true")


def test_a_spec_does_not_change_once_it_is_checked() -> None:
    spec = RunSpec.model_validate(TREE)
    with pytest.raises(ValidationError, match="frozen"):
        spec.grpo.seed = 7  # type: ignore[misc]


def test_settings_of_an_engine_that_does_not_run_are_refused(spec_path: Path) -> None:
    settings = ("policy.generation.backend=native", "policy.generation.vllm_cfg={tensor_parallel_size: 2}")
    message = refusal(spec_path, *settings)
    assert "vllm_cfg is set, but backend is 'native'" in message


@pytest.mark.parametrize("key", ["context", "tensor", "expert", "pipeline"])
def test_ways_of_dividing_a_model_that_do_not_exist_are_refused_by_name(spec_path: Path, key: str) -> None:
    with pytest.raises(SpecError, match=rf"{key} 2: there is no {key} parallelism; .*Leave it out"):
        load_spec(spec_path, [f"policy.parallel.{key}=2"])


def test_a_choice_of_links_is_refused_with_the_reason(spec_path: Path) -> None:
    for backend in ("auto", "gloo", "nccl", "shared"):
        message = refusal(spec_path, f"weights.backend={backend}")
        assert message.startswith("weights.backend: unknown key; ")
        assert "remove backend: relays bring weights, and with delta the object store does" in message


def test_a_stored_spec_of_another_version_names_its_run_and_the_remedy() -> None:
    text = spec_to_yaml(parse_spec(TREE))
    spec, warnings = spec_of_run("sums-1", text + "telepathy: {range: 3}\n")
    assert spec == parse_spec(TREE)
    assert warnings == ["this version does not know telepathy of the run's spec and ignores them"]
    for damaged in (text.replace("seed: 42", "seed: [1]"), "a: 2026-13-45", "[", "- a"):
        assert damaged != text
        with pytest.raises(SpecError) as caught:
            spec_of_run("sums-1", damaged)
        message = str(caught.value)
        assert message.startswith("this version of Paceline cannot read the spec of run sums-1: ")
        assert message.endswith("Use the version that accepted the run, or end the run with `paceline cancel sums-1`")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["grpo.max_num_epochs=3"], 12),
        (["grpo.max_num_epochs=0.5"], 2),
        (["grpo.max_num_epochs=3", "grpo.max_num_steps=5"], 5),
        (["grpo.max_num_epochs=3", "grpo.max_num_steps=500"], 12),
        (["algorithm=sft", "rewards=[]", "sft.max_num_epochs=2", "sft.num_examples_per_step=16"], 2),
        ([], 100),
    ],
)
def test_epochs_and_steps_end_a_run_whichever_is_first(spec_path: Path, overrides: list[str], steps: int) -> None:
    spec = load_spec(spec_path, [*overrides, "grpo.num_prompts_per_step=4"])
    resolved = spec.with_steps_of_epochs(16)
    assert resolved.max_num_steps == steps
    assert spec_from_yaml(spec_to_yaml(resolved)).with_steps_of_epochs(16) == resolved


def test_a_schedule_that_does_not_fit_the_epochs_is_refused_with_their_steps(spec_path: Path) -> None:
    wsd = ["policy.scheduler.name=wsd", "policy.scheduler.decay_steps=10"]
    spec = load_spec(spec_path, ["grpo.max_num_epochs=1", "grpo.num_prompts_per_step=4", *wsd])
    with pytest.raises(SpecError, match=r"max_num_epochs 1 over 16 rows are 4 steps: .*would have no peak"):
        spec.with_steps_of_epochs(16)


def test_a_recorded_spec_opens_without_trackers_of_a_kind_that_is_gone() -> None:
    text = spec_to_yaml(parse_spec(TREE | {"logger": {"trackers": [{"kind": "wandb", "project": "p"}]}}))
    text = text.replace("  trackers:\n", "  trackers:\n  - kind: trackio\n")
    spec, (warning,) = spec_from_ledger(text)
    assert [tracker.kind for tracker in spec.logger.trackers] == ["wandb"]
    assert "logger.trackers.0" in warning


def test_a_key_that_is_written_twice_is_refused_with_both_lines(spec_path: Path) -> None:
    spec_path.write_text(spec_path.read_text() + "\ngrpo: {max_num_steps: 3}\n" * 2)
    with pytest.raises(SpecError, match=r"'grpo' is in line \d+ and again in line \d+; write each key once"):
        load_spec(spec_path)


def test_the_rest_of_the_sequence_is_the_longest_completion(spec_path: Path) -> None:
    spec = load_spec(spec_path, ["policy.generation.max_new_tokens=rest", "policy.max_total_sequence_length=64"])
    assert spec.policy.generation.max_new_tokens == 63


def test_a_key_that_is_written_twice_in_an_override_is_refused(spec_path: Path) -> None:
    with pytest.raises(SpecError, match="'seed' is in line 1 and again in line 1"):
        load_spec(spec_path, ["grpo={seed: 1, seed: 2}"])
    for value in ("9" * 5000, "[" * 5000, "\x00"):
        with pytest.raises(SpecError):
            load_spec(spec_path, [f"grpo.seed={value}"])


def test_a_key_that_is_written_twice_in_one_line_is_refused(spec_path: Path) -> None:
    spec_path.write_text("policy: {model_name: a, model_name: b}\n")
    with pytest.raises(SpecError, match="'model_name' is in line 1 and again in line 1"):
        load_spec(spec_path)


def test_a_key_that_replaces_one_of_a_merged_mapping_is_no_second_one(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("a: &a {x: 1}\nb: &b\n  <<: *a\n  x: 2\nc:\n  <<: *b\n  y: 3\n")
    assert read_tree(path) == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 2, "y": 3}}


def test_a_temperature_of_0_names_the_key_for_the_likeliest_tokens() -> None:
    tree = {"policy": {"model_name": "m", "generation": {"temperature": 0}}, "data": {"train": "x"}}
    with pytest.raises(SpecError, match=r"policy\.generation\.temperature: 0 divides .* set top_k to 1"):
        parse_spec(tree)
