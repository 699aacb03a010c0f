"""Names of other libraries, typed as overrides: each is answered with Paceline's key or with the reason why there is none,
and no answer names a wrong key.

The lists are what people type: the overrides of a guide to NeMo RL, the keys of NeMo RL's own configurations, the arguments
of TRL's GRPOConfig at the top level, and keys of verl and prime-rl at their places.
"""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import SpecError
from paceline.spec.keys import keys
from paceline.spec.reading import apply_override, parse_spec

TREES: dict[str, dict[str, Any]] = {
    "grpo": {"rewards": [{"function": "length"}]},
    "sft": {"algorithm": "sft"},
    "dpo": {"algorithm": "dpo"},
}
NONE = "there is none, because"
PASSES = ""

GUIDE = {  # overrides of a guide to NeMo RL, for `paceline sft`, `dpo` and `rm`
    "policy.model_name=org/other": PASSES,
    "checkpointing.checkpoint_dir=/results": PASSES,
    "dpo.sft_loss_weight=0.1": PASSES,
    "dpo.preference_average_log_probs=True": PASSES,
    "policy.train_global_batch_size=128": "grpo.num_prompts_per_step",
    "policy.train_micro_batch_size=2": "policy.train_mb_tokens",
    "dpo.beta=0.1": "dpo.reference_policy_kl_penalty",
    "cluster.gpus_per_node=8": "cluster.learner_gpus",
    "cluster.num_nodes=2": NONE,
    "logger.wandb_enabled=True": NONE,
    "logger.wandb.name=first": NONE,
    "logger.wandb.project=mine": NONE,
    "sft.max_epochs=3": "sft.max_num_epochs",
    "dpo.max_epochs=3": "dpo.max_num_epochs",
    "sft.val_check_interval=10": "sft.val_period",
    "sft.save_interval=10": "checkpointing.save_period",
    "data.dataset_name=squad": "data.train",
    "data.dataset_path=squad.jsonl": "data.train",
    "data.prompt_template=text": PASSES,
    "trainer.max_epochs=3": "grpo.max_num_epochs",
    "trainer.devices=8": "cluster.learner_gpus",
    "model.name=org/model": "policy.model_name",
    "model.tensor_parallel_size=2": "policy",
}

NEMO_RL = {  # keys of grpo_math_1B.yaml, sft.yaml and dpo.yaml
    "grpo.num_prompts_per_step=8": PASSES,
    "grpo.num_generations_per_prompt=16": PASSES,
    "grpo.max_num_steps=1000": PASSES,
    "grpo.val_at_start=false": PASSES,
    "grpo.max_val_samples=256": PASSES,
    "grpo.overlong_filtering=true": PASSES,
    "grpo.use_dynamic_sampling=true": PASSES,
    "loss_fn.ratio_clip_min=0.2": PASSES,
    "loss_fn.ratio_clip_c=3": PASSES,
    "checkpointing.keep_top_k=3": PASSES,
    "policy.max_total_sequence_length=512": PASSES,
    "policy.generation.vllm_kwargs={}": PASSES,
    "grpo.max_rollout_turns=1": NONE,
    "grpo.max_num_epochs=1": PASSES,
    "grpo.normalize_rewards=true": "grpo.advantage",
    "grpo.use_leave_one_out_baseline=true": "grpo.advantage",
    "grpo.val_batch_size=256": NONE,
    "grpo.async_grpo.enabled=true": "async_grpo.max_trajectory_age_steps",
    "grpo.async_grpo.max_trajectory_age_steps=1": "async_grpo.max_trajectory_age_steps",
    "grpo.async_grpo.in_flight_weight_updates=true": "async_grpo.in_flight_weight_updates",
    "grpo.batch_multiplier=2": NONE,
    "grpo.reward_scaling.enabled=true": "rewards.N.weight",
    "loss_fn.use_on_policy_kl_approximation=true": NONE,
    "loss_fn.use_importance_sampling_correction=true": "loss_fn.truncated_importance_sampling_ratio",
    "loss_fn.sequence_level_importance_ratios=true": "loss_fn.ratio_level",
    "loss_fn.token_level_loss=true": "loss_fn.reduction",
    "checkpointing.checkpoint_must_save_by=null": NONE,
    "checkpointing.model_save_format=safetensors": NONE,
    "checkpointing.metric_name=val_reward": "val:reward",
    "policy.tokenizer.name=org/model": "policy.tokenizer_name",
    "policy.tokenizer.chat_template_kwargs.enable_thinking=true": "data.chat_template_kwargs",
    "policy.train_global_batch_size=512": "grpo.num_prompts_per_step",
    "policy.generation_batch_size=32": "policy.generation.max_batch_size",
    "policy.logprob_batch_size=4": "policy.logprob_chunk_tokens",
    "policy.logprob_chunk_size=1024": "policy.logprob_chunk_tokens",
    "policy.dtensor_cfg.enabled=true": NONE,
    "policy.dtensor_cfg.tensor_parallel_size=2": NONE,
    "policy.dtensor_cfg.cpu_offload=true": "policy.cpu_offload",
    "policy.dtensor_cfg.activation_checkpointing=true": "policy.activation_checkpointing",
    "policy.dtensor_cfg.lora_cfg.dim=8": "policy.lora_cfg.dim",
    "policy.megatron_cfg.enabled=false": NONE,
    "policy.megatron_cfg.optimizer.lr=5.0e-6": "policy.optimizer.lr",
    "policy.dynamic_batching.enabled=false": NONE,
    "policy.sequence_packing.train_mb_tokens=4096": "policy.train_mb_tokens",
    "policy.make_sequence_length_divisible_by=1": NONE,
    "policy.optimizer.name=torch.optim.AdamW": NONE,
    "policy.optimizer.kwargs.lr=5.0e-6": "policy.optimizer.lr",
    "policy.generation.colocated.enabled=true": "cluster.rollout_gpus",
    "policy.generation.vllm_cfg.max_model_len=512": "policy.max_total_sequence_length",
    "policy.generation.vllm_cfg.async_engine=true": NONE,
    "policy.generation.top_k=null": "write 0",
    "data.max_input_seq_length=512": "policy.max_total_sequence_length",
    "data.prompt_file=cot.txt": "data.system_prompt",
    "env.math.num_workers=8": "rewards",
    "logger.log_dir=logs": NONE,
    "logger.tensorboard_enabled=true": "logger.tensorboard",
    "sft.val_global_batch_size=32": "sft.max_val_samples",
}

TRL = {  # arguments of GRPOConfig, at the top level
    "beta=0.04": "loss_fn.reference_policy_kl_penalty",
    "kl_coef=0.04": "loss_fn.reference_policy_kl_penalty",
    "epsilon=0.2": "loss_fn.ratio_clip_min",
    "epsilon_high=0.28": "loss_fn.ratio_clip_max",
    "delta=1.5": "loss_fn.ratio_clip_c",
    "loss_type=dapo": "loss_fn.reduction",
    "scale_rewards=false": "grpo.advantage",
    "reward_weights=[1.0]": "rewards.N.weight",
    "reward_funcs=[accuracy]": "rewards",
    "learning_rate=1e-6": "policy.optimizer.lr",
    "weight_decay=0.1": "policy.optimizer.weight_decay",
    "adam_beta2=0.99": "policy.optimizer.betas",
    "max_grad_norm=0.1": "policy.max_grad_norm",
    "warmup_ratio=0.1": "policy.scheduler.warmup_ratio",
    "warmup_steps=10": "policy.scheduler.warmup_steps",
    "lr_scheduler_type=cosine": "policy.scheduler.name",
    "max_steps=100": "grpo.max_num_steps",
    "num_train_epochs=1": "grpo.max_num_epochs",
    "per_device_train_batch_size=8": "grpo.num_prompts_per_step",
    "gradient_accumulation_steps=4": "grpo.num_prompts_per_step",
    "steps_per_generation=4": "policy.num_updates_per_step",
    "num_iterations=2": "policy.num_updates_per_step",
    "num_generations=8": "grpo.num_generations_per_prompt",
    "max_prompt_length=256": "policy.max_total_sequence_length",
    "max_completion_length=256": "policy.generation.max_new_tokens",
    "temperature=0.9": "policy.generation.temperature",
    "min_p=0.1": "policy.generation.min_p",
    "use_vllm=true": "policy.generation.backend",
    "vllm_mode=colocate": NONE,
    "vllm_gpu_memory_utilization=0.3": "policy.generation.vllm_cfg.gpu_memory_utilization",
    "bf16=true": "policy.precision",
    "fp16=true": "policy.precision",
    "gradient_checkpointing=true": "policy.activation_checkpointing",
    "logging_steps=1": NONE,
    "save_steps=50": "checkpointing.save_period",
    "report_to=wandb": NONE,
    "output_dir=out": "checkpointing.checkpoint_dir",
    "mask_truncated_completions=true": "grpo.overlong_filtering",
    "sync_ref_model=true": "loss_fn.reference_policy_sync_steps",
    "importance_sampling_level=sequence": "loss_fn.ratio_level",
}

ELSEWHERE = {  # of verl and prime-rl, and names of one library at the place of another
    "actor_rollout_ref.model.path=org/model": "policy.model_name",
    "actor_rollout_ref.rollout.n=8": "grpo.num_generations_per_prompt",
    "rollout.n=8": "grpo.num_generations_per_prompt",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64": "policy.num_updates_per_step",
    "kl_loss_coef=0.001": "loss_fn.reference_policy_kl_penalty",
    "algorithm.adv_estimator=grpo": "grpo.advantage",
    "data.train_batch_size=256": "grpo.num_prompts_per_step",
    "data.max_response_length=512": "policy.generation.max_new_tokens",
    "trainer.n_gpus_per_node=8": "cluster.learner_gpus",
    "trainer.total_epochs=15": "grpo.max_num_epochs",
    "critic.optim.lr=1e-5": "value.optimizer.lr",
    "orchestrator.batch_size=512": "grpo.num_prompts_per_step",
    "orchestrator.train.group_size=16": "grpo.num_generations_per_prompt",
    "trainer.optim.lr=1e-5": "policy.optimizer.lr",
    "seq_len=4096": "policy.max_total_sequence_length",
    "inference.parallel.tp=8": "policy.generation.vllm_cfg.tensor_parallel_size",
    "grpo.num_iterations=2": "policy.num_updates_per_step",
    "policy.gradient_checkpointing=true": "policy.activation_checkpointing",
    "policy.optimizer.learning_rate=1e-6": "policy.optimizer.lr",
    "data.train.dataset_name=squad": "data.train",
    "generation.stop=</answer>": "policy.generation.stop_strings",
    "generation.top_p=0.9": "policy.generation.top_p",
    "eval=true": NONE,
    "optimizer.lr=1e-6": "policy.optimizer.lr",
    "lr=1e-6": "policy.optimizer.lr",
    "epochs=3": "grpo.max_num_epochs",
    "num_gpus=8": "cluster.learner_gpus",
    "stop=</answer>": "policy.generation.stop_strings",
}

OLD = {  # trainers of PyTorch Lightning's form, whose sections are trainer, model and exp_manager
    "trainer.max_epochs=3": "grpo.max_num_epochs",
    "trainer.max_steps=-1": "grpo.max_num_steps",
    "trainer.max_num_steps=100": "grpo.max_num_steps",
    "trainer.devices=8": "cluster.learner_gpus",
    "trainer.num_nodes=1": NONE,
    "trainer.accelerator=gpu": "cluster.device",
    "trainer.precision=bf16": "policy.precision",
    "trainer.gradient_clip_val=1.0": "policy.max_grad_norm",
    "trainer.accumulate_grad_batches=4": "policy.train_mb_tokens",
    "trainer.limit_val_batches=5": "grpo.max_val_samples",
    "trainer.log_every_n_steps=1": NONE,
    "trainer.enable_checkpointing=false": "checkpointing.enabled",
    "trainer.strategy=ddp": NONE,
    "trainer.seed=1": "grpo.seed",
    "trainer.learning_rate=1e-6": "policy.optimizer.lr",
    "trainer.dpo.max_epochs=1": "dpo.max_num_epochs",
    "trainer.dpo.val_check_interval=0.1": "dpo.val_period",
    "trainer.sft.save_interval=100": "checkpointing.save_period",
    "exp_manager.explicit_log_dir=/results": NONE,
    "model.optim.lr=9e-7": "policy.optimizer.lr",
    "model.optim.sched.warmup_steps=10": "policy.scheduler.warmup_steps",
    "model.optim.bucket_cap_mb=200": "policy.optimizer",
    "model.global_batch_size=64": "grpo.num_prompts_per_step",
    "model.encoder_seq_length=4096": "policy.max_total_sequence_length",
    "model.data.data_prefix.train=[a.jsonl]": "data.train",
    "model.dpo.beta=0.1": "dpo.reference_policy_kl_penalty",
    "model.dpo.preference_loss=dpo": "dpo.preference_loss",
    "pretrained_checkpoint.restore_from_path=a.nemo": "policy.model_name",
    "dpo.ref_policy_kl_penalty=0.1": "dpo.reference_policy_kl_penalty",
    "dpo.epochs=3": "dpo.max_num_epochs",
    "dpo.max_steps=3": "dpo.max_num_steps",
    "dpo.batch_size=3": "dpo.num_examples_per_step",
    "dpo.ref_model=org/model": NONE,
    "lora.r=8": "policy.lora_cfg.dim",
    "peft.lora_alpha=32": "policy.lora_cfg.alpha",
    "data.train_path=a.jsonl": "data.train",
}

VALUES = {
    "algorithm=ppo": "loss_fn.preset: ppo",
    "algorithm=dapo": "loss_fn.preset: dapo",
    "loss_fn.preset=drgrpo": "'dr_grpo'",
    "policy.precision=bf16": "write bfloat16",
    "policy.precision=fp16": "write float16",
    "grpo.advantage=grpo": "write trl",
    "loss_fn.reduction=token-mean": "write dapo",
    "loss_fn.reference_policy_kl_type=low_var_kl": "write k3",
    "policy.generation.backend=hf": "write native",
    "policy.generation.backend=sglang": "there is none",
    "rewards=math_accuracy": "is a list of {function: …}; write rewards=[{function: math_accuracy}]",
    "rewards=[math_accuracy]": "write {function: math_accuracy}",
    "name=my run/1": "write name=my-run-1",
}


def answer(override: str) -> str:
    """Return what a spec says to the override; empty where it is accepted."""
    section = override.partition(".")[0]
    tree = {
        "policy": {"model_name": "org/model"},
        "data": {"train": "org/data"},
        **TREES.get(section, TREES["grpo"]),
    }
    try:
        apply_override(tree, override)
        parse_spec(tree)
    except SpecError as error:
        return str(error)
    return PASSES


ALL = {"guide": GUIDE, "nemo rl": NEMO_RL, "trl": TRL, "elsewhere": ELSEWHERE, "old": OLD, "values": VALUES}


@pytest.mark.parametrize("name", ALL)
def test_a_foreign_name_is_answered_with_ours_or_with_the_reason(name: str) -> None:
    assert {
        override: said for override, expected in ALL[name].items() if not right(said := answer(override), expected)
    } == {}


def right(said: str, expected: str) -> bool:
    """Return whether the answer has the expected key or the reason, and no guess by spelling."""
    if expected == PASSES:
        return said == PASSES
    if "did you mean" in said and expected not in said:
        return False
    return expected in said


def test_the_whole_dotted_name_is_repeated() -> None:
    said = {override: answer(override) for override in GUIDE | NEMO_RL | TRL | ELSEWHERE | OLD}
    unknown = {override: text for override, text in said.items() if "unknown key" in text}
    assert len(unknown) > 100
    assert [
        override
        for override, text in unknown.items()
        if not text.startswith(f"{override.partition('=')[0]}: unknown key; ")
    ] == []


def test_the_lists_are_as_long_as_they_claim() -> None:
    assert (len(GUIDE), len(NEMO_RL), len(TRL)) == (23, 57, 40)


def test_an_unknown_word_is_not_taken_for_a_near_one() -> None:
    words = ("eval", "delta", "critic", "actor", "env", "model", "trainer", "tau")
    assert [word for word in words if "did you mean" in answer(f"{word}=1")] == []
    assert not {*words} & keys().keys()
