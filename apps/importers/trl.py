"""Converts TRL: a recipe in YAML, or a Python script with its `GRPOConfig(...)`, which is parsed and never run.

TRL's batch counts completions, and its step is an optimizer update; see `_batch` for the arithmetic.
"""

from __future__ import annotations

from typing import Any

from paceline.apps.importers.conversion import Conversion, listed, plain, whole
from paceline.errors import counted
from paceline.spec.foreign import EXAMPLES

BUILT_IN = {
    "accuracy_reward": {"function": "math_accuracy", "kwargs": {"answer_column": "solution"}},
    "reasoning_accuracy_reward": {"function": "math_accuracy", "kwargs": {"answer_column": "solution"}},
    "think_format_reward": {"function": "format_regex", "kwargs": {"pattern": "(?s)<think>.*?</think>.*"}},
    "accuracy": {"function": "math_accuracy", "kwargs": {"answer_column": "solution"}},
    "format": {
        "function": "format_regex",
        "kwargs": {"pattern": r"(?s)<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>"},
    },
}
"""Maps each reward function of TRL, and each short name of open-r1, to Paceline's function with its arguments."""
OPEN_R1 = (
    "reasoning_steps", "cosine", "repetition_penalty", "length", "code", "binary_code", "ioi_code", "cf_code",
    "code_format", "tag_count", "soft_overlong_punishment", "weighted_binary_code",
)  # fmt: skip
"""Names of open-r1's other reward functions, which have no counterpart."""
_EXAMPLES = {"beta": 0.1, "max_length": 1024}
_SAMPLES = {"max_completion_length": 512}
DEFAULTS: dict[str, dict[str, Any]] = {
    "": {"weight_decay": 0.0, "lr_scheduler_type": "linear", "save_steps": 500},
    "GRPOConfig": _SAMPLES,
    "RLOOConfig": {**_SAMPLES, "num_generations": 2, "beta": 0.05},
    "AsyncGRPOConfig": {"max_completion_length": 2048, "lr_scheduler_type": "constant", "max_staleness": 4},
    "SFTConfig": {"learning_rate": 2e-5, "max_length": 1024},
    "DPOConfig": _EXAMPLES,
    "KTOConfig": _EXAMPLES,
    "ORPOConfig": _EXAMPLES,
    "RewardConfig": {"learning_rate": 1e-4, "max_length": 1024, "center_rewards_coefficient": 0.0},
}
"""Maps each configuration class of TRL f2cd577 (July 2026) to its defaults that differ from Paceline's, and "" to those
of all classes. These defaults are written even if the configuration leaves them out."""
CLASSES = {
    "GRPOConfig": "grpo", "RLOOConfig": "grpo", "AsyncGRPOConfig": "grpo", "SFTConfig": "sft", "DPOConfig": "dpo",
    "KTOConfig": "kto", "ORPOConfig": "orpo", "RewardConfig": "rm",
}  # fmt: skip
"""Paceline's algorithm for each of TRL's configuration classes."""
CORRECTIONS = {
    "token_truncate": "tis",
    "token_mask": "icepop",
    "sequence_truncate": "sequence_tis",
    "sequence_mask": "sequence_mask",
}
"""Our `loss_fn.truncated_importance_sampling_type` for each vllm_importance_sampling_mode."""
ONLY_GRPO = ("reward_funcs", "num_generations", "max_completion_length", "num_iterations", "epsilon")
PROMPT_TOKENS = 1024


def convert(settings: dict[str, Any], *, processes: int = 1, config: str = "") -> Conversion:
    """Return the conversion of TRL's settings by name, for a training on `processes` GPUs. `config` names the
    configuration class, one of CLASSES; if it is empty, the settings decide."""
    settings = {name: plain(value) for name, value in settings.items()}
    config = config or _config(settings)
    done = Conversion("trl", {**DEFAULTS[""], **DEFAULTS[config], **settings}, CLASSES[config])
    if done.algorithm != "grpo":
        done.put("algorithm", done.algorithm)
    _batch(done, processes)
    _lengths(done)
    _fractions(done)
    _optimizer(done)
    if done.algorithm not in EXAMPLES:
        _rewards(done)
        _objective(done, config)
    if done.algorithm == "orpo":
        done.move("beta", "orpo.odds_ratio_weight")
    _evaluation(done)
    done.carry()
    return done


def _config(settings: dict[str, Any]) -> str:
    if any(name in settings for name in ONLY_GRPO):
        return "GRPOConfig"
    return "DPOConfig" if "beta" in settings else "SFTConfig"


def _batch(done: Conversion, processes: int) -> None:
    each = done.take("per_device_train_batch_size", 8)
    accumulated = done.take("gradient_accumulation_steps", 1)
    done.take("num_processes")
    if "per_device_train_batch_size" in done.settings:
        done.notes.append(
            f"the batch is for {counted(processes, 'GPU')} (--processes): {each} completions on each × "
            f"{accumulated} gradient_accumulation_steps"
        )
    if done.algorithm in EXAMPLES:
        done.put("grpo.num_prompts_per_step", each * processes * accumulated)
        _steps(done, updates=1)
        return
    per_generation = done.take("steps_per_generation", accumulated)
    completions = done.take("generation_batch_size", each * processes * per_generation)
    group = done.take("num_generations", 8)
    if completions % group:
        done.notes.append(
            f"{completions} completions are no multiple of {group} per prompt; the number of prompts was rounded up"
        )
    prompts = whole(completions, group)
    updates = min(prompts, whole(completions, each * processes * accumulated))
    done.put("grpo.num_generations_per_prompt", group)
    done.put("grpo.num_prompts_per_step", prompts)
    done.put("policy.num_updates_per_step", updates)
    repeats = done.take("num_iterations", 1)
    if repeats > 1:
        done.leave_out("num_iterations", "every sample trains once; set policy.num_updates_per_step for more updates")
    _steps(done, updates * repeats)


def _steps(done: Conversion, updates: int) -> None:
    """Set the number of steps. TRL counts optimizer updates; a batch takes `updates` of them."""
    steps = done.take("max_steps", -1)
    epochs = done.take("num_train_epochs", 3)
    if steps > 0:
        done.put("grpo.max_num_steps", whole(steps, updates))
    else:
        done.put("grpo.max_num_epochs", float(epochs))


def _lengths(done: Conversion) -> None:
    if done.algorithm in EXAMPLES:
        return
    completion = done.take("max_completion_length")
    prompt = done.take("max_prompt_length", PROMPT_TOKENS)
    total = done.take("vllm_max_model_length", done.take("vllm_max_model_len", prompt + completion))
    done.put("policy.generation.max_new_tokens", completion)
    done.put("policy.max_total_sequence_length", max(total, completion + 1))
    if "max_prompt_length" not in done.settings:
        done.notes.append(f"prompts may have {total - completion} tokens (policy.max_total_sequence_length {total})")


def _fractions(done: Conversion) -> None:
    """Carry over counts of steps that are fractions of the run, as a Trainer reads numbers below 1."""
    warmup = done.settings.get("warmup_steps")
    if isinstance(warmup, float) and 0 < warmup < 1:
        done.take("warmup_steps")
        done.put("policy.scheduler.warmup_ratio", warmup)
    for name in ("save_steps", "eval_steps"):
        value = done.settings.get(name)
        if isinstance(value, float) and 0 < value < 1:
            done.leave_out(name, "a fraction of the run; here it is a number of steps")
            done.settings[name] = None


def _optimizer(done: Conversion) -> None:
    betas = [done.take("adam_beta1", 0.9), done.take("adam_beta2", 0.999)]
    if "adam_beta1" in done.settings or "adam_beta2" in done.settings:
        done.put("policy.optimizer.betas", betas)
    if str(done.settings.get("optim", "adamw")).startswith(("adamw", "OptimizerNames.ADAMW")):
        done.take("optim")
    given = done.settings.get("lr_scheduler_kwargs")
    for name, key in (("min_lr_rate", "min_lr_ratio"), ("power", "power"), ("num_cycles", "num_cycles")):
        if isinstance(given, dict) and name in given:
            done.take("lr_scheduler_kwargs")
            done.put(f"policy.scheduler.{key}", given[name])
    modules = done.take("lora_target_modules")
    if isinstance(modules, list):
        done.put("policy.lora_cfg.target_modules", modules)
    if "use_peft" not in done.settings and "lora_r" in done.settings:
        done.put("policy.lora_cfg.enabled", True)


def _rewards(done: Conversion) -> None:
    functions = listed(done.take("reward_funcs"))
    weights = listed(done.take("reward_weights"))
    rewards = []
    for index, name in enumerate(functions):
        if name is None:
            continue
        if name in OPEN_R1:
            done.left_out.append(
                f"reward_funcs {name!r}: no built-in is the same; add it to rewards as file.py:function"
            )
            continue
        reward = name if isinstance(name, dict) else dict(BUILT_IN.get(str(name), {"function": str(name)}))
        if index < len(weights):
            reward = {**reward, "weight": weights[index]}
        if str(name) in BUILT_IN:
            done.notes.append(f"TRL's {name} became {reward['function']}; check its column and its rule")
        rewards.append(reward)
    if rewards:
        done.put("rewards", rewards)


def _objective(done: Conversion, config: str) -> None:
    if config == "AsyncGRPOConfig":
        done.put("async_grpo.max_trajectory_age_steps", done.take("max_staleness"))
        done.put("loss_fn.ratio_anchor", "behaviour")
        done.put("loss_fn.truncated_importance_sampling_ratio", None)
    else:
        done.notes.append(
            "sampling runs up to async_grpo.max_trajectory_age_steps (1) steps ahead of training; 0 is TRL's order"
        )
        _engine_correction(done)
    _clip(done)
    if done.take("multi_objective_aggregation") == "normalize_then_sum":
        done.take("scale_rewards")
        done.put("grpo.advantage", "gdpo")
    every = done.take("ref_model_sync_steps", 512)
    if done.take("sync_ref_model") and done.settings.get("beta"):
        updates = done.tree.get("policy", {}).get("num_updates_per_step", 1)
        done.put("loss_fn.reference_policy_sync_steps", whole(every, updates))
        done.put("loss_fn.reference_policy_sync_mix", done.take("ref_model_mixup_alpha", 0.6))
    else:
        done.take("ref_model_mixup_alpha")
    kind = done.take("loss_type", "rloo" if config == "RLOOConfig" else "dapo")
    if kind in ("grpo", "dapo", "dr_grpo", "bnpo"):
        done.put("loss_fn.reduction", kind)
    elif kind in ("cispo", "sapo", "vespo", "luspo", "rloo"):
        done.put("loss_fn.preset", kind)
    else:
        done.leave_out("loss_type", "the key loss_fn.preset lists the possible objectives")


def _engine_correction(done: Conversion) -> None:
    """Set the weight that corrects for the engine. TRL has this weight only with vLLM. Without vLLM the spec's default
    stays, because sampling ahead of training needs a weight."""
    section = "loss_fn.truncated_importance_sampling"
    kind, low = done.take("vllm_importance_sampling_mode"), done.take("vllm_importance_sampling_clip_min")
    names = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    bounds = [done.take(name) for name in names if name in done.settings]
    if done.take("vllm_importance_sampling_correction") is False:
        done.put(f"{section}_ratio", None)
    elif kind or bounds or low or done.settings.get("use_vllm"):
        done.put(f"{section}_type", CORRECTIONS[kind or "sequence_mask"])
        done.put(f"{section}_ratio", bounds[0] if bounds else 3.0)
        if low is not None:
            done.put(f"{section}_ratio_min", low)


def _clip(done: Conversion) -> None:
    """Set the bounds of the ratio. TRL's cispo bounds the ratio by epsilon_high only and has no lower bound."""
    low, high = done.take("epsilon"), done.take("epsilon_high")
    if done.settings.get("loss_type") == "cispo":
        if high is not None and high > 1:
            done.put("loss_fn.ratio_clip_max", high - 1)
        return
    if low is not None:
        done.put("loss_fn.ratio_clip_min", low)
    if high is not None or low is not None:
        done.put("loss_fn.ratio_clip_max", low if high is None else high)


def _evaluation(done: Conversion) -> None:
    strategy = str(done.take("eval_strategy", done.take("evaluation_strategy", "no")))
    every = done.take("eval_steps")
    if strategy == "no" or not (done.settings.get("eval_dataset") or done.settings.get("dataset_test_split")):
        done.take("dataset_test_split")
        return
    if "eval_dataset" not in done.settings:
        done.put("data.validation", done.settings.get("dataset_name"))
    done.put("grpo.val_period", max(1, int(every or 100)))
