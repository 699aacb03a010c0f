"""Imports of whole configurations: the written spec loads, and each setting that was left out has its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.apps.importers.import_spec import import_config, spec_text
from paceline.errors import SpecError
from paceline.spec import RunSpec
from paceline.spec.reading import load_spec

NEMO = """
defaults: base.yaml
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_rollout_turns: 1
  max_num_steps: 1000
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 10
  val_batch_size: 256
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_c: null, sequence_level_importance_ratios: false,
  token_level_loss: true, use_importance_sampling_correction: false}
checkpointing: {checkpoint_dir: results/grpo, metric_name: val_reward, keep_top_k: 3, save_period: 10}
policy:
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 256
  max_total_sequence_length: 512
  dtensor_cfg: {enabled: true, cpu_offload: false, activation_checkpointing: true, tensor_parallel_size: 2}
  sequence_packing: {enabled: true, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}"}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999], foreach: false}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - {milestones: [50]}
  generation: {backend: vllm, max_new_tokens: "${policy.max_total_sequence_length}", top_k: null,
    vllm_cfg: {tensor_parallel_size: 1, precision: "${policy.precision}", gpu_memory_utilization: 0.6}}
data: {dataset_name: OpenMathInstruct-2, shuffle: true, prompt_file: cot.txt}
env: {math: {num_workers: 8}}
logger: {wandb_enabled: false, tensorboard_enabled: true}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""
NEMO_BASE = """
policy: {model_name: Qwen/Qwen2.5-1.5B, train_micro_batch_size: 4, precision: bfloat16}
"""
VERL = """
MODEL=Qwen/Qwen2.5-7B
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \\
    data.train_files=$HOME/data/train.parquet data.val_files="['a.parquet','b.parquet']" \\
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 data.truncation='error' \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.top_k=-1 \\
    trainer.logger='["console","wandb"]' trainer.experiment_name='my run' trainer.save_freq=20 trainer.test_freq=5 \\
    trainer.total_epochs=15 $@
"""


def imported(library: str, path: Path, *overrides: str) -> tuple[RunSpec, str]:
    """Return the written spec, read again, and its text."""
    done = import_config(library, path, overrides)
    text = spec_text(done, path)
    written = path.with_suffix(".paceline.yaml")
    written.write_text(text)
    return load_spec(written), text


def test_a_configuration_of_nemo_rl_becomes_a_spec(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(NEMO_BASE)
    path = tmp_path / "grpo.yaml"
    path.write_text(NEMO)
    spec, text = imported("nemo", path)
    assert spec.policy.model_name == spec.policy.tokenizer_name == "Qwen/Qwen2.5-1.5B"
    assert (spec.grpo.num_prompts_per_step, spec.grpo.advantage, spec.policy.num_updates_per_step) == (
        32,
        "nemo",
        2,
    )
    assert (spec.policy.train_mb_tokens, spec.policy.scheduler.warmup_steps) == (2048, 50)
    assert (spec.policy.generation.max_new_tokens, spec.policy.generation.backend) == (511, "vllm")
    assert (spec.async_grpo.max_trajectory_age_steps, spec.loss_fn.reduction) == (0, "dapo")
    assert spec.loss_fn.truncated_importance_sampling_ratio is None
    assert spec.policy.optimizer.lr == 5e-6
    assert spec.policy.activation_checkpointing
    assert (spec.data.train, spec.data.prompt_key) == ("nvidia/OpenMathInstruct-2", "problem")
    assert [(each.function, each.kwargs) for each in spec.rewards] == [
        ("math_accuracy", {"answer_column": "expected_answer"})
    ]
    for left_out in (
        "val_period: there is no validation set",
        "policy.dtensor_cfg: enabled, tensor_parallel_size",
    ):
        assert f"# Left out: {left_out}" in text


def test_the_overrides_of_a_verl_script_become_a_spec_and_an_adapter(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL)
    done = import_config("verl", path)
    spec, text = imported("verl", path)
    assert (spec.name, spec.policy.model_name) == ("my-run", "Qwen/Qwen2.5-7B")
    assert (spec.grpo.num_prompts_per_step, spec.policy.num_updates_per_step) == (1024, 4)
    assert (spec.policy.max_total_sequence_length, spec.policy.generation.max_new_tokens) == (1536, 1024)
    assert (spec.loss_fn.reference_policy_kl_penalty, spec.loss_fn.reference_policy_kl_type) == (0.002, "k3")
    assert (spec.grpo.max_num_epochs, spec.grpo.val_period, spec.checkpointing.save_period) == (15, 5, 20)
    assert (spec.policy.generation.top_k, spec.policy.optimizer.lr, spec.grpo.advantage) == (0, 1e-6, "trl")
    assert spec.data.train == str(Path("~/data/train.parquet").expanduser())
    assert spec.data.validation == ("a.parquet", "b.parquet")
    assert [reward.function for reward in spec.rewards] == [f"{tmp_path}/verl_rewards.py:reward"]
    compile(done.files["verl_rewards.py"], "verl_rewards.py", "exec")
    assert "# Left out: data.truncation ('error'): prompts that are too long are dropped" in text


def test_a_supervised_recipe_of_trl_becomes_a_spec(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "model_name_or_path: org/model\ndataset_name: org/data\nlearning_rate: 2e-5\nper_device_train_batch_size: 4\n"
        "gradient_accumulation_steps: 2\nmax_steps: 30\npacking: true\nmax_length: 4096\nassistant_only_loss: true\n"
    )
    spec, text = imported("trl", path, "data.messages_key=messages")
    assert spec.algorithm == "sft"
    assert (spec.sft.num_examples_per_step, spec.sft.max_num_steps, spec.sft.loss_mask) == (
        8,
        30,
        "assistant",
    )
    assert (spec.policy.optimizer.lr, spec.policy.max_total_sequence_length) == (2e-5, 4096)
    assert "# Left out: packing (True): sequences are packed in any case" in text


@pytest.mark.parametrize(
    ("library", "name", "text", "message"),
    [
        (
            "trl",
            "a.yaml",
            "learning_rate: 1e-6\n",
            "gives no value for policy.model_name and data.train; add policy.model_name=…",
        ),
        ("trl", "a.yaml", "- 1\n", "a spec is a mapping of sections"),
        ("trl", "a.py", "print(1)\n", "has none of GRPOConfig"),
        ("trl", "a.py", "def f(:\n", "is not valid Python"),
        ("trl", "a.yaml", "num_generations: many\n", "has a value of another type than trl reads"),
        ("trl", "a.yaml", "num_generations: 0\n", "has a value of another type than trl reads"),
        ("nemo", "a.yaml", "defaults: a.yaml\n", "the chain of defaults has more than 8 files"),
        ("verl", "a.sh", "echo 'open\n", "the quote in line 1 is not closed"),
        ("verl", "a.sh", "echo\n", "has no override such as data.train_files"),
        (
            "trl",
            "a.yaml",
            "model_name_or_path: m\ndataset_name: d\nreward_funcs: [accuracy_reward]\ntop_p: 0.9\n",
            "correct it with overrides, such as section.key=value:",
        ),
    ],
)
def test_a_configuration_that_cannot_be_imported_is_one_error(
    tmp_path: Path, library: str, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        import_config(library, path)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no file .*nowhere\.yaml"):
        import_config("trl", tmp_path / "nowhere.yaml")


def test_a_file_of_prime_rl_becomes_a_spec(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        'max_steps = 500\n[model]\nname = "org/small"\n[orchestrator]\nbatch_size = 64\n'
    )
    (tmp_path / "rl.toml").write_text(
        'toml_files = ["base.toml"]\nmax_steps = 50\nseq_len = 2048\n[wandb]\nname = "math 1"\n'
        "[orchestrator]\nrollouts_per_example = 16\n[orchestrator.sampling]\nmax_tokens = 512\n"
        '[[orchestrator.env]]\nid = "gsm8k"\n[trainer.optim]\nlr = 1e-5\n[trainer.model.ac]\nfreq = 1\n'
        "[deployment]\nnum_train_gpus = 1\nnum_infer_gpus = 1\n[inference]\n"
    )
    done = import_config("prime-rl", tmp_path / "rl.toml")
    (tmp_path / "spec.yaml").write_text(spec_text(done, tmp_path / "rl.toml"))
    spec = load_spec(tmp_path / "spec.yaml")
    assert (spec.name, spec.policy.model_name, spec.policy.optimizer.lr) == ("math-1", "org/small", 1e-5)
    assert (spec.grpo.num_prompts_per_step, spec.grpo.max_num_steps) == (4, 50)
    assert (spec.cluster.learner_gpus, spec.cluster.rollout_gpus) == ((0,), (1,))
    assert done.left_out == []
    (tmp_path / "broken.toml").write_text("max_steps = = 1")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for name, fault in (("broken.toml", "is not TOML: "), ("bytes.toml", "is not text in UTF-8")):
        with pytest.raises(SpecError, match=f"{name} {fault}"):
            import_config("prime-rl", tmp_path / name)
