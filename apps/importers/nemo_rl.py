"""Converts NeMo RL: a YAML configuration, with `defaults` (another file) and `${…}` references resolved.

NeMo RL's train_global_batch_size counts completions of one optimizer update; ours counts prompts of a step.
"""

from __future__ import annotations

from typing import Any

from paceline.apps.importers.conversion import Conversion, plain, whole
from paceline.spec.foreign import EXAMPLES

DATA = {
    "OpenMathInstruct-2": ("nvidia/OpenMathInstruct-2", "problem", "expected_answer"),
    "DeepScaler": ("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer"),
    "gsm8k": ("openai/gsm8k", "question", "answer"),
}
"""Data sets by NeMo RL's names: the name on the hub, the columns of the prompt and of the answer."""
CONFIGS = {"openai/gsm8k": "main"}
"""Configuration to use, by data set, for data sets that have several."""
ADVANTAGES = {(True, True): "nemo", (True, False): "trl", (False, True): "rloo", (False, False): "dr_grpo"}
"""`grpo.advantage` by NeMo RL's (normalize_rewards, use_leave_one_out_baseline)."""


def convert(settings: dict[str, Any], *, algorithm: str = "") -> Conversion:
    settings = {name: plain(value) for name, value in settings.items()}
    done = Conversion("nemo_rl", settings, algorithm or _algorithm(settings))
    if done.algorithm != "grpo":
        done.put("algorithm", done.algorithm)
    _batch(done)
    _lengths(done)
    _data(done)
    _schedule(done)
    if done.algorithm in EXAMPLES:
        _evaluation(done)
    else:
        _objective(done)
    _best(done)
    done.carry()
    return done


def _algorithm(settings: dict[str, Any]) -> str:
    sections = {name.partition(".")[0] for name in settings}
    return next((name for name in ("grpo", "distillation", "dpo", "rm", "sft") if name in sections), "grpo")


def _batch(done: Conversion) -> None:
    update = done.take("policy.train_global_batch_size")
    micro = done.take("policy.train_micro_batch_size")
    length = done.settings.get("policy.max_total_sequence_length")
    packed = done.take("policy.sequence_packing.train_mb_tokens")
    if isinstance(packed, int):
        done.put("policy.train_mb_tokens", packed)
    elif isinstance(micro, int) and isinstance(length, int):
        done.put("policy.train_mb_tokens", micro * length)
    if not isinstance(update, int):
        return
    if done.algorithm in EXAMPLES:
        done.put("grpo.num_prompts_per_step", update)
        return
    prompts = done.settings.get(f"{done.algorithm}.num_prompts_per_step") or 32
    group = done.settings.get(f"{done.algorithm}.num_generations_per_prompt") or 8
    done.put("policy.num_updates_per_step", min(prompts, whole(prompts * group, update)))


def _lengths(done: Conversion) -> None:
    total = done.settings.get("policy.max_total_sequence_length")
    new = done.take("policy.generation.max_new_tokens")
    if not isinstance(new, int) or done.algorithm in EXAMPLES:
        return
    if isinstance(total, int) and new >= total:
        done.notes.append(
            f"policy.generation.max_new_tokens {new} would leave no room for a prompt in {total} tokens; it was set to half of them"
        )
        new = total // 2
    done.put("policy.generation.max_new_tokens", new)


def _data(done: Conversion) -> None:
    name = done.take("data.train.dataset_name", done.take("data.dataset_name"))
    path = done.take("data.train.data_path", done.take("data.train_data_path"))
    found = next((DATA[each] for each in DATA if each.lower() == str(name).lower()), None)
    if path is not None:
        done.put("data.train", path)
    elif found is not None:
        done.put("data.train", found[0])
        done.put("data.prompt_key", found[1])
        if found[0] in CONFIGS:
            done.put("data.train_config", CONFIGS[found[0]])
    elif name is not None:
        done.put("data.train", name)
        done.notes.append(
            f"data.train {name!r} is a name that only NeMo RL knows; write the file, the folder or the name on the hub"
        )
    validation = done.take("data.validation.data_path", done.take("data.val_data_path"))
    if validation is not None:
        done.put("data.validation", validation)
    environment = [each for each in done.settings if each.startswith("env.math.")]
    if environment and done.algorithm not in EXAMPLES:
        done.used.update(environment)
        answer = {"kwargs": {"answer_column": found[2]}} if found and found[2] != "answer" else {}
        done.put("rewards", [{"function": "math_accuracy", **answer}])
        done.notes.append("env.math became the built-in reward math_accuracy; check the column with the answer")


def _schedule(done: Conversion) -> None:
    """Carry over the list of torch's schedulers: a linear warm-up, then a constant or a cosine."""
    parts = done.settings.get("policy.scheduler")
    if not isinstance(parts, list):
        return
    done.take("policy.scheduler")
    shapes = {"LinearLR": "", "ConstantLR": "constant", "CosineAnnealingLR": "cosine"}
    for part in parts:
        name = str(part.get("name", "")).rpartition(".")[2] if isinstance(part, dict) else ""
        given = part.get("kwargs", {}) if name else {}
        if name == "LinearLR" and float(given.get("end_factor", 1.0)) == 1.0:
            done.put("policy.scheduler.warmup_steps", int(given.get("total_iters", 0)))
        elif shapes.get(name):
            done.put("policy.scheduler.name", shapes[name])
            rate = plain(done.settings.get("policy.optimizer.kwargs.lr"))
            if name == "CosineAnnealingLR" and isinstance(rate, float) and given.get("eta_min"):
                done.put("policy.scheduler.min_lr_ratio", round(float(given["eta_min"]) / rate, 6))
        elif name:
            done.left_out.append(f"policy.scheduler {name}: see policy.scheduler.name for the shapes")


def _evaluation(done: Conversion) -> None:
    batches, size = (
        done.take(f"{done.algorithm}.val_batches"),
        done.take(f"{done.algorithm}.val_global_batch_size"),
    )
    if isinstance(batches, int) and isinstance(size, int) and batches > 0:
        done.put("grpo.max_val_samples", batches * size)


def _objective(done: Conversion) -> None:
    section = done.algorithm
    normal, one_out = done.take("grpo.normalize_rewards"), done.take("grpo.use_leave_one_out_baseline")
    if section == "grpo" and normal is not None and one_out is not None:
        done.put("grpo.advantage", ADVANTAGES[bool(normal), bool(one_out)])
    if done.take("loss_fn.use_importance_sampling_correction") is False:
        done.put("loss_fn.truncated_importance_sampling_ratio", None)
    is_async = done.take("grpo.async_grpo.enabled")
    age = done.take("grpo.async_grpo.max_trajectory_age_steps", 1)
    if is_async is not None:
        done.put("async_grpo.max_trajectory_age_steps", age if is_async else 0)
    for name in ("in_flight_weight_updates", "recompute_kv_cache_after_weight_updates"):
        if (given := done.take(f"grpo.async_grpo.{name}")) is not None:
            done.put(f"async_grpo.{name}", given)


def _best(done: Conversion) -> None:
    """Carry over the metric of the best checkpoint if an evaluation measures it at every checkpoint."""
    metric = done.take("checkpointing.metric_name")
    if metric == "val_reward" or metric == "val:reward":
        save = done.settings.get("checkpointing.save_period")
        every = done.settings.get(f"{done.algorithm}.val_period")
        if done.tree.get("data", {}).get("validation") and save and every and save % every == 0:
            done.put("checkpointing.metric_name", "val:reward")
            return
    done.leave_out(
        "checkpointing.metric_name",
        "write val:reward or train:loss, with save_period a multiple of val_period",
    )
