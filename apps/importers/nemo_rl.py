"""Converts NeMo RL: a YAML configuration, with `defaults` (other files) and `${…}` references resolved.

NeMo RL's train_global_batch_size counts completions of one optimizer update; ours counts prompts of a step. Sections
with `enabled: false` set nothing. The optimizer and its schedule come from policy.megatron_cfg if that is enabled, else
from policy.optimizer and policy.scheduler.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, NamedTuple

from paceline.apps.importers.conversion import Conversion, plain, rest_or, whole
from paceline.errors import SpecError
from paceline.spec.foreign import EXAMPLES
from paceline.spec.sections.vllm import ALLOWED, REFUSED, SpeculativeSection


class DataSet(NamedTuple):
    hub: str
    prompt: str
    answer: str
    config: str = ""
    split: str = ""


DATA = {
    "openmathinstruct-2": DataSet("nvidia/OpenMathInstruct-2", "problem", "expected_answer", split="train_1M"),
    "deepscaler": DataSet("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer"),
    "aime2024": DataSet("HuggingFaceH4/aime_2024", "problem", "answer", split="train"),
    "gsm8k": DataSet("openai/gsm8k", "question", "answer", "main"),
}
"""Maps a name of nemo_rl/data/datasets/response_datasets of NeMo RL, in lower case, to the data set."""
ADVANTAGES = {(True, True): "nemo", (True, False): "trl", (False, True): "rloo", (False, False): "dr_grpo"}
"""Maps NeMo RL's (normalize_rewards, use_leave_one_out_baseline) to `grpo.advantage`."""
IMAGES = ("vlm", "image", "audio", "video", "clevr", "geometry3k", "refcoco", "avqa", "daily-omni", "mmpr")
"""Parts of the names of processors and data sets whose samples have images, audio or video."""
MEGATRON = "policy.megatron_cfg."


def convert(settings: dict[str, Any], *, algorithm: str = "", folder: Path = Path()) -> Conversion:
    """Return the conversion of NeMo RL's settings by dotted name; prompt files are below `folder` or below a folder
    above it. Raises SpecError for a training that Paceline does not have."""
    settings = {name: plain(value) for name, value in _as_grpo(settings).items()}
    done = Conversion("nemo_rl", settings, algorithm or _algorithm(settings))
    _refuse(settings)
    if done.algorithm != "grpo":
        done.put("algorithm", done.algorithm)
    if done.take("checkpointing.enabled") is False:
        done.put("checkpointing.enabled", False)
    done.skip_disabled()
    _optimizer(done)
    _batch(done)
    _lengths(done)
    _data(done, folder)
    if done.algorithm in EXAMPLES:
        _evaluation(done)
    else:
        _objective(done)
        _rewards(done)
        _engine(done)
    _distillation(done)
    _best(done)
    done.carry()
    return done


def _as_grpo(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the sections of PPO under the names of GRPO's."""
    if not any(name.startswith("ppo.") for name in settings):
        return settings
    places = {"ppo.async_ppo.": "grpo.async_grpo.", "ppo.": "grpo.", "value_loss_fn.": "value."}
    renamed = {}
    for name, value in settings.items():
        prefix = next((each for each in places if name.startswith(each)), "")
        renamed[places.get(prefix, "") + name.removeprefix(prefix)] = value
    return {"grpo.adv_estimator.name": "gae", **renamed}


def _algorithm(settings: dict[str, Any]) -> str:
    sections = {name.partition(".")[0] for name in settings}
    return next((name for name in ("grpo", "distillation", "dpo", "rm", "sft") if name in sections), "grpo")


def _refuse(settings: dict[str, Any]) -> None:
    places = [name for name in settings if name.startswith("data.") and name.endswith((".processor", ".dataset_name"))]
    for name in places:
        value = str(settings[name]).lower()
        if any(part in value for part in IMAGES):
            raise SpecError(f"{name} {settings[name]!r}: samples with images, audio or video cannot be trained")
    if settings.get("teachers"):
        raise SpecError(
            "teachers: distillation has one teacher (distillation.teacher_model_name) with the student's tokenizer, "
            "and several teachers, or another tokenizer, are not supported"
        )


def _optimizer(done: Conversion) -> None:
    if not done.settings.get(f"{MEGATRON}enabled"):
        _schedule(done)
        return
    for name in [each for each in done.settings if each.startswith(("policy.optimizer", "policy.scheduler"))]:
        done.leave_out(name, "policy.megatron_cfg is enabled, so NeMo RL uses the optimizer of policy.megatron_cfg")
    section, schedule = f"{MEGATRON}optimizer.", f"{MEGATRON}scheduler."
    betas = done.take(f"{section}adam_beta1"), done.take(f"{section}adam_beta2")
    if None not in betas:
        done.put("policy.optimizer.betas", list(betas))
    for theirs, ours in (("lr", "lr"), ("weight_decay", "weight_decay"), ("adam_eps", "eps")):
        done.move(section + theirs, f"policy.optimizer.{ours}")
    rate, lowest = done.settings.get(f"{section}lr"), done.take(f"{section}min_lr")
    shape = str(done.take(f"{schedule}lr_decay_style", "constant")).lower()
    if shape in ("constant", "linear", "cosine"):
        done.put("policy.scheduler.name", shape)
        if shape != "constant" and rate and lowest:
            done.put("policy.scheduler.min_lr_ratio", round(float(lowest) / float(rate), 6))
    else:
        done.settings[f"{schedule}lr_decay_style"] = shape
        done.leave_out(f"{schedule}lr_decay_style", "the key policy.scheduler.name lists the possible shapes")
    if warmup := done.take(f"{schedule}lr_warmup_iters"):
        done.put("policy.scheduler.warmup_steps", warmup)
    done.leave_out(f"{schedule}lr_decay_iters", "a schedule always ends with the run")


def _schedule(done: Conversion) -> None:
    """Carry over torch's schedulers: one, or a list of a linear warm-up and a constant, linear or cosine shape."""
    parts = done.settings.get("policy.scheduler")
    if isinstance(name := done.settings.get("policy.scheduler.name"), str):
        done.take("policy.scheduler.name")
        parts = [{"name": name, "kwargs": done.take_below("policy.scheduler.kwargs.")}]
    if not isinstance(parts, list):
        return
    done.take("policy.scheduler")
    shapes = {"ConstantLR": "constant", "CosineAnnealingLR": "cosine", "LinearLR": "linear"}
    for part in parts:
        name = str(part.get("name", "")).rpartition(".")[2] if isinstance(part, dict) else ""
        given = part.get("kwargs") or {} if name else {}
        if name == "LinearLR" and float(given.get("end_factor", 1.0)) == 1.0:
            done.put("policy.scheduler.warmup_steps", int(given.get("total_iters", 0)))
        elif name in shapes:
            done.put("policy.scheduler.name", shapes[name])
            rate = plain(done.settings.get("policy.optimizer.kwargs.lr"))
            if name == "CosineAnnealingLR" and isinstance(rate, float) and given.get("eta_min"):
                done.put("policy.scheduler.min_lr_ratio", round(float(given["eta_min"]) / rate, 6))
            elif name == "LinearLR":
                done.put("policy.scheduler.min_lr_ratio", float(given["end_factor"]))
        elif name:
            done.left_out.append(f"policy.scheduler {name}: the key policy.scheduler.name lists the possible shapes")


def _batch(done: Conversion) -> None:
    update = done.take("policy.train_global_batch_size")
    micro = done.take("policy.train_micro_batch_size")
    length = done.settings.get("policy.max_total_sequence_length")
    sections = ("policy.sequence_packing.train_mb_tokens", "policy.dynamic_batching.train_mb_tokens")
    packed = next((done.take(name) for name in sections if name in done.settings and name not in done.used), None)
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
    if int(done.take("grpo.ppo_epochs", 1)) > 1:
        done.leave_out("grpo.ppo_epochs", "every sample trains once; more updates are policy.num_updates_per_step")


def _lengths(done: Conversion) -> None:
    for section in ("grpo", "distillation", *EXAMPLES):
        if done.settings.get(f"{section}.max_num_steps") == -1:
            done.take(f"{section}.max_num_steps")
        if done.settings.get(f"{section}.val_batches") == -1:
            done.take(f"{section}.val_batches")
            done.take(f"{section}.val_global_batch_size")
    new, total = done.take("policy.generation.max_new_tokens"), done.settings.get("policy.max_total_sequence_length")
    if isinstance(new, int) and done.algorithm not in EXAMPLES:
        done.put("policy.generation.max_new_tokens", rest_or(new, total))
    if done.settings.get("policy.generation.vllm_cfg.max_model_len") == total:
        done.take("policy.generation.vllm_cfg.max_model_len")


READ = (
    "dataset_name", "data_path", "split", "subset", "input_key", "prompt_key", "output_key", "prompt_file",
    "system_prompt_file", "env_name", "processor", "seed",
)  # fmt: skip
"""Settings of a data set that the import reads; a seed only divides training from validation."""


def _data(done: Conversion, folder: Path) -> None:
    train, validation = _data_sets(done, "train"), _data_sets(done, "validation")
    found, held_out = _put_data(done, "train", train), _put_data(done, "validation", validation)
    first = (train or validation or [{}])[0]
    column = (found.prompt if found else None) or first.get("input_key") or first.get("prompt_key")
    if column:
        done.put("data.prompt_key", column)
    if done.algorithm == "sft" and (answer := first.get("output_key") or (found and found.answer)):
        done.put("data.completion_key", answer)
    if held_out and found and (held_out.prompt, held_out.answer) != (found.prompt, found.answer):
        done.notes.append("data.validation has other columns than data.train; give the columns of both the same names")
    _prompts(done, folder, first, str(column or "input"))


def _data_sets(done: Conversion, which: str) -> list[dict[str, Any]]:
    """Return the settings of each data set for `train` or `validation`, with the section's defaults below them."""
    given = done.take(f"data.{which}")
    defaults, one = done.take_below("data.default."), done.take_below(f"data.{which}.")
    older = {"dataset_name": "data.dataset_name", "data_path": "data.train_data_path"}
    if which == "validation":
        older = {"data_path": "data.val_data_path"}
    older |= {"prompt_file": "data.prompt_file", "system_prompt_file": "data.system_prompt_file"}
    one |= {key: value for key, name in older.items() if key not in one and (value := done.take(name)) is not None}
    own = given if isinstance(given, list) else [one] if one.get("dataset_name") or one.get("data_path") else []
    return [{**defaults, **each} for each in own if isinstance(each, dict)]


def _put_data(done: Conversion, which: str, sets: list[dict[str, Any]]) -> DataSet | None:
    """Set `data.train` or `data.validation` if the data sets can be read as one, and return it if it is known; else add
    a note."""
    known = [DATA.get(str(each.get("dataset_name")).lower()) for each in sets]
    pairs = list(zip(sets, known, strict=True))
    paths = [each.get("data_path") or (found.hub if found else None) for each, found in pairs]
    columns = {
        (found.prompt, found.answer) if found else (each.get("input_key"), each.get("output_key"))
        for each, found in pairs
    }
    names = ", ".join(str(each.get("dataset_name") or each.get("data_path")) for each in sets)
    for each in sets:
        done.left_out += [
            f"data.{which}.{name} ({value!r:.80}): {'name held-out prompts as data.validation' if 'split' in name else 'the name is unknown'}"
            for name, value in each.items()
            if name not in READ and value not in (None, 0, False) and not (name == "repeat" and value == 1)
        ]
    if not sets:
        return None
    if None in paths:
        done.notes.append(f"data.{which}: only NeMo RL knows {names}; name a file, a folder or the data set on the hub")
        return None
    if len(columns) > 1:
        done.notes.append(
            f"data.{which}: {names} have different columns; write them into one file with the same columns"
        )
        return None
    done.put(f"data.{which}", paths[0] if len(paths) == 1 else paths)
    first, found = pairs[0]
    for key, value in (
        ("split", first.get("split") or (found and found.split)),
        ("config", first.get("subset") or (found and found.config)),
    ):
        if value:
            done.put(f"data.{which}_{key}", value)
    return found


def _prompts(done: Conversion, folder: Path, first: dict[str, Any], column: str) -> None:
    """Carry over the texts of the files for prompt and system message; `{}` in the prompt becomes `{column}`."""
    for name, key in (("prompt_file", "data.prompt_template"), ("system_prompt_file", "data.system_prompt")):
        given = first.get(name) or done.take(f"data.default.{name}")
        if given is None:
            continue
        path = next((each / str(given) for each in (folder, *folder.parents) if (each / str(given)).is_file()), None)
        if path is None:
            done.notes.append(f"{key}: {given} is neither in this file's folder nor above it; add its text by hand")
            continue
        text = path.read_text(encoding="utf-8")
        done.put(key, _with_column(text, column) if name == "prompt_file" else text)


def _with_column(text: str, column: str) -> str:
    """Return a text for `str.format` with the column's name in its field, and with a plain brace for each doubled
    brace."""
    parts = string.Formatter().parse(text)
    return "".join(literal + (f"{{{column}}}" if field is not None else "") for literal, field, *_ in parts)


def _rewards(done: Conversion) -> None:
    name = done.settings.get("data.train.env_name") or done.settings.get("data.default.env_name")
    places = {each.split(".")[1] for each in done.settings if each.startswith("env.")}
    chosen = str(name) if name in places else next(iter(places), "") if len(places) == 1 else ""
    data = done.settings.get("data.train.dataset_name") or done.settings.get("data.dataset_name")
    if chosen.startswith("math"):
        answers = DATA.get(str(data).lower())
        answer = {"kwargs": {"answer_column": answers.answer}} if answers and answers.answer != "answer" else {}
        done.put("rewards", [{"function": "math_accuracy", **answer}])
        done.notes.append(f"env.{chosen} became the built-in reward math_accuracy; check the column with the answer")
        done.skip(f"env.{chosen}.")
    elif chosen == "reward_model" and (path := done.settings.get("env.reward_model.model_name")):
        done.put("rewards", [{"function": "reward_model", "kwargs": {"path": path}}])
        done.skip("env.reward_model.")
    _overlong(done)
    if chosen:
        done.skip(*(f"env.{each}." for each in places - {chosen}))


def _overlong(done: Conversion) -> None:
    section = "grpo.reward_shaping."
    names = [f"{section}{name}" for name in ("enabled", "max_response_length", "overlong_buffer_length")]
    is_enabled, longest, soft = (done.settings.get(name) for name in names)
    rewards = done.tree.get("rewards")
    if not (is_enabled and rewards and longest and soft) or names[0] in done.used:
        return
    limits = {"max_completion_tokens": longest, "soft_tokens": soft}
    weight = done.take(f"{section}overlong_buffer_penalty", 1)
    rewards.append({"function": "soft_overlong", "kwargs": limits, "weight": weight})
    done.used.update(names)


def _engine(done: Conversion) -> None:
    backend = done.take("policy.generation.backend")
    if backend in ("vllm", "native"):
        done.put("policy.generation.backend", backend)
    elif backend is not None:
        done.put("policy.generation.backend", "vllm")
        done.notes.append(f"policy.generation.backend {backend!r} became vllm; engines are native and vllm")
        for name in [each for each in done.settings if each.startswith(f"policy.generation.{backend}")]:
            done.leave_out(name, "the spec has the engine vllm, which does not read it")
    _engine_arguments(done)
    if done.settings.get("policy.generation.vllm_cfg.precision") == "fp8":
        done.leave_out("policy.generation.vllm_cfg.precision", "weights are served in bfloat16, float16 or float32")
    for name in ("temperature", "top_p", "top_k"):
        if done.settings.get(f"policy.generation.val_{name}") == done.settings.get(f"policy.generation.{name}"):
            done.take(f"policy.generation.val_{name}")


def _engine_arguments(done: Conversion) -> None:
    """Convert vllm_kwargs: an argument with a key sets this key; one that no run may set is left out."""
    kwargs = done.settings.get("policy.generation.vllm_kwargs")
    if not isinstance(kwargs, dict):
        return
    done.settings["policy.generation.vllm_kwargs"] = {n: v for n, v in kwargs.items() if n in ALLOWED} or None
    if "max_num_seqs" in kwargs:
        done.put("policy.generation.max_batch_size", kwargs["max_num_seqs"])
    converted, drafts = {"max_num_seqs"}, kwargs.get("speculative_config")
    if isinstance(drafts, dict) and drafts.get("method") in ("ngram", "draft_model"):
        converted.add("speculative_config")
        for name in SpeculativeSection.model_fields.keys() & drafts.keys():
            done.put(f"policy.generation.vllm_cfg.speculative.{name}", drafts[name])
    for name in kwargs.keys() - ALLOWED.keys() - converted:
        reason = REFUSED.get(name, "it is no argument of vLLM that was tested")
        done.notes.append(f"policy.generation.vllm_kwargs.{name} was left out: {reason.removeprefix('remove it: ')}")


def _evaluation(done: Conversion) -> None:
    batches, size = done.take(f"{done.algorithm}.val_batches"), done.take(f"{done.algorithm}.val_global_batch_size")
    if isinstance(batches, int) and isinstance(size, int) and batches > 0:
        done.put("grpo.max_val_samples", batches * size)


def _objective(done: Conversion) -> None:
    normal, one_out = done.take("grpo.normalize_rewards"), done.take("grpo.use_leave_one_out_baseline")
    estimator = str(done.take("grpo.adv_estimator.name", "grpo"))
    normal = done.take("grpo.adv_estimator.normalize_rewards", normal)
    one_out = done.take("grpo.adv_estimator.use_leave_one_out_baseline", one_out)
    minus_baseline = done.take("grpo.adv_estimator.minus_baseline")
    if done.algorithm == "grpo":
        if estimator == "reinforce_plus_plus":
            done.put("grpo.advantage", "reinforce_pp_baseline" if minus_baseline else "reinforce_pp")
        elif estimator in ("gdpo", "gae"):
            done.put("grpo.advantage", estimator)
        elif estimator != "grpo":
            raise SpecError(f"grpo.adv_estimator.name {estimator!r}: grpo.advantage has no such estimator")
        elif normal is not None or one_out is not None:
            # In grpo_math_1B.yaml of NeMo RL both are true.
            pair = (normal is None or bool(normal), one_out is None or bool(one_out))
            done.put("grpo.advantage", ADVANTAGES[pair])
    if estimator == "gae":
        _value_model(done)
    else:
        done.skip("value.")
    _importance(done)
    if done.take("loss_fn.use_cispo"):
        done.put("loss_fn.preset", "cispo")
    is_async = done.take("grpo.async_grpo.enabled")
    age = done.take("grpo.async_grpo.max_trajectory_age_steps", 1)
    if is_async is not None:
        done.put("async_grpo.max_trajectory_age_steps", age if is_async else 0)
    for name in ("in_flight_weight_updates", "recompute_kv_cache_after_weight_updates"):
        done.move(f"grpo.async_grpo.{name}", f"async_grpo.{name}")


def _importance(done: Conversion) -> None:
    """Carry over the importance weight. Without the correction, the weight and its bounds are switched off."""
    names = [f"loss_fn.truncated_importance_sampling_{name}" for name in ("type", "ratio", "ratio_min")]
    if done.take("loss_fn.use_importance_sampling_correction") is False:
        done.used.update(names)
        done.put("loss_fn.truncated_importance_sampling_ratio", None)
    elif done.settings.get(names[0]) == "seq-mask-tis":
        done.take(names[0])
        done.put(names[0], "sequence_mask")
    if done.take("loss_fn.force_on_policy_ratio") and done.tree.get("policy", {}).get("num_updates_per_step", 1) > 1:
        done.leave_out("loss_fn.force_on_policy_ratio", "with policy.num_updates_per_step 1 the ratio is 1")


def _value_model(done: Conversion) -> None:
    done.move("grpo.adv_estimator.gae_lambda", "value.gae_lambda")
    done.move("grpo.adv_estimator.gae_gamma", "value.gae_gamma")
    done.move("grpo.policy_training_start_step", "value.policy_training_start_step")
    for name in ("model_name", "cliprange", "max_grad_norm"):
        done.move(f"value.{name}", f"value.{name}")
    for name in ("lr", "weight_decay", "betas", "eps"):
        done.move(f"value.optimizer.kwargs.{name}", f"value.optimizer.{name}")
    for name in [each for each in done.settings if each.startswith("value.") and each not in done.used]:
        done.leave_out(name, "the section value has only model_name, optimizer, max_grad_norm, cliprange and gae_*")


def _distillation(done: Conversion) -> None:
    if done.algorithm == "distillation":
        for name in ("kl_type", "mixed_kl_weight"):
            done.move(f"loss_fn.{name}", f"distillation.{name}")


def _best(done: Conversion) -> None:
    """Carry over the metric of the best checkpoint if an evaluation measures it at every checkpoint."""
    metric = done.take("checkpointing.metric_name")
    save, every = done.settings.get("checkpointing.save_period"), done.settings.get(f"{done.algorithm}.val_period")
    if metric == "train:loss":
        done.put("checkpointing.metric_name", metric)
    elif (
        metric in ("val_reward", "val:reward", "val:accuracy")
        and done.tree.get("data", {}).get("validation")
        and save
        and every
        and save % every == 0
    ):
        done.put("checkpointing.metric_name", "val:reward")
    else:
        reason = "write val:reward or train:loss, with save_period a multiple of val_period"
        done.leave_out("checkpointing.metric_name", reason)
        done.take("checkpointing.higher_is_better")
