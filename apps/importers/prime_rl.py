"""Converts prime-rl: a TOML file for trainer, orchestrator and inference or for one of them, with `toml_files` below
it.

prime-rl's batch_size counts completions of a step; ours counts prompts.
"""

from __future__ import annotations

from typing import Any

from paceline.apps.importers.conversion import Conversion, listed, plain, whole

ORCHESTRATOR = (
    "batch_size",
    "rollouts_per_example",
    "group_size",
    "sampling",
    "environment",
    "env",
    "eval",
    "buffer",
)
"""Top-level names of an orchestrator's separate file."""
TRAINER = ("optim", "scheduler", "loss")
"""Top-level names of a trainer's separate file."""
GROUP = ("orchestrator.rollouts_per_example", "orchestrator.group_size", "orchestrator.train.group_size")
SAMPLING = ("orchestrator.sampling", "orchestrator.train.sampling")
ENVIRONMENTS = ("orchestrator.env", "orchestrator.train.env", "orchestrator.environment")
MATHEMATICS = ("math", "gsm8k", "aime", "deepscaler")
"""Parts of the names of environments that compare the final answer with a column."""
GSM8K = {"dataset_name": "openai/gsm8k", "dataset_subset": "main"}


def convert(settings: dict[str, Any]) -> Conversion:
    settings = {_place(name, settings): plain(value) for name, value in settings.items()}
    done = Conversion("prime_rl", settings, "sft" if _is_supervised(settings) else "grpo")
    if done.algorithm == "sft":
        _examples(done)
    else:
        _batch(done)
        _environments(done)
        done.put("policy.generation.backend", "vllm")
        done.notes.append("prime-rl samples with vLLM; policy.generation.backend=native needs no further package")
    _lengths(done)
    _optimizer(done)
    _model(done)
    _gpus(done)
    if isinstance(name := done.take("wandb.name"), str):
        done.put("name", name)
    done.used.update(name for name, value in settings.items() if value == {})  # a table without settings
    done.carry()
    return done


def _place(name: str, settings: dict[str, Any]) -> str:
    first = name.partition(".")[0]
    if any(each.partition(".")[0] in ("orchestrator", "trainer") for each in settings):
        return name
    if first in ORCHESTRATOR and not _is_supervised(settings):
        return f"orchestrator.{name}"
    if first in TRAINER or (first == "model" and name != "model.name"):
        return f"trainer.{name}"
    return name


def _is_supervised(settings: dict[str, Any]) -> bool:
    sections = {name.partition(".")[0] for name in settings}
    return "data" in sections and not sections & {"orchestrator", "sampling", "environment", "env"}


def _examples(done: Conversion) -> None:
    done.put("algorithm", "sft")
    sources = [each.get("dataset") or each.get("name") for each in _tables(done.take("data.source"))]
    if names := [name for name in sources if name]:
        done.put("data.train", names[0] if len(names) == 1 else names)
    done.notes.append(
        "prime-rl reads the column messages, or prompt and completion; for messages, set data.messages_key"
    )


def _batch(done: Conversion) -> None:
    batch = done.take("orchestrator.batch_size", 128)
    group = next((size for name in GROUP if isinstance(size := done.take(name), int)), 1)
    if isinstance(batch, int):
        done.put("grpo.num_prompts_per_step", whole(batch, group))
    if group > 1:
        done.put("grpo.num_generations_per_prompt", group)
    else:
        done.notes.append(
            "the file has one completion for each prompt, but a group's advantage needs several: set "
            "grpo.num_generations_per_prompt"
        )


def _lengths(done: Conversion) -> None:
    packed = done.take("trainer.model.seq_len")
    ours = ("orchestrator.seq_len", "seq_len", "data.seq_len", "inference.model.max_model_len")
    totals = [total for name in ours if isinstance(total := done.take(name), int)]
    total = totals[0] if totals else packed
    if isinstance(packed, int):
        done.put("policy.train_mb_tokens", packed)
    if isinstance(total, int):
        done.put("policy.max_total_sequence_length", total)
    given = [done.take(f"{section}.{key}") for section in SAMPLING for key in ("max_tokens", "max_completion_tokens")]
    new = next((tokens for tokens in given if isinstance(tokens, int)), None)
    if done.algorithm == "sft" or (new is None and not isinstance(total, int)):
        return
    if new is None:
        new = total // 2
        done.notes.append(
            f"prime-rl lets completions fill the sequence; policy.generation.max_new_tokens was set to {new}, half of it"
        )
    elif isinstance(total, int) and new >= total:
        done.notes.append(
            f"max_tokens {new} would leave no room for a prompt in {total} tokens; policy.generation.max_new_tokens was set to "
            "half of them"
        )
        new = total // 2
    done.put("policy.generation.max_new_tokens", new)


def _environments(done: Conversion) -> None:
    """Carry over the data set and the reward of an environment that compares final answers; leave out all others."""
    found = [(name, table) for name in ENVIRONMENTS for table in _tables(done.settings.get(name))]
    if "orchestrator.environment.id" in done.settings:
        found.append(("orchestrator.environment", {"id": done.settings["orchestrator.environment.id"]}))
    done.used.update(name for name in done.settings if name.startswith(ENVIRONMENTS))
    done.used.update(name for name in done.settings if name.startswith("orchestrator.eval.env"))
    for place, table in found:
        arguments = {**_mapping(table.get("args")), **_mapping(table.get("taskset"))}
        name = str(table.get("id") or arguments.get("id") or table.get("name") or "").lower()
        if "gsm8k" in name:
            arguments = GSM8K | arguments
        if len(found) > 1 or not any(part in name for part in MATHEMATICS):
            done.left_out.append(
                f"{place} ({name or 'without a name'}): the environment is not carried over; set its prompts (data.train) and its "
                "rewards"
            )
            continue
        _mathematics(done, name, arguments)


def _mathematics(done: Conversion, name: str, arguments: dict[str, Any]) -> None:
    if dataset := arguments.get("dataset_name"):
        done.put("data.train", dataset)
        done.put("data.prompt_key", arguments.get("question_key", "question"))
        if (subset := arguments.get("dataset_subset", "default")) != "default":
            done.put("data.train_config", subset)
        if split := arguments.get("dataset_split"):
            done.put("data.train_split", split)
    if system := arguments.get("system_prompt"):
        done.put("data.system_prompt", system)
    answer = arguments.get("answer_key", "answer")
    done.put(
        "rewards",
        [{"function": "math_accuracy"} | ({"kwargs": {"answer_column": answer}} if answer != "answer" else {})],
    )
    done.notes.append(
        f"the environment {name!r} became the built-in reward math_accuracy; check prompt, answer and data set"
    )


def _optimizer(done: Conversion) -> None:
    betas = done.take("trainer.optim.betas1"), done.take("trainer.optim.betas2")
    if any(beta is not None for beta in betas):
        done.put("policy.optimizer.betas", [betas[0] or 0.9, betas[1] or 0.999])
    if str(done.settings.get("trainer.optim.type", "adamw")).lower() == "adamw":
        done.take("trainer.optim.type")
    rate, lowest = done.settings.get("trainer.optim.lr"), done.settings.get("trainer.scheduler.min_lr")
    if isinstance(rate, float) and isinstance(lowest, int | float):
        done.take("trainer.scheduler.min_lr")
        done.put("policy.scheduler.min_lr_ratio", round(float(lowest) / rate, 6))


def _model(done: Conversion) -> None:
    checkpointing = [name for name in done.settings if f"{name}.".startswith("trainer.model.ac.")]
    if checkpointing:
        done.used.update(checkpointing)
        done.put("policy.activation_checkpointing", done.settings.get("trainer.model.ac") is not False)
    rank = done.take("trainer.model.lora.rank")
    if isinstance(rank, int):
        done.put("policy.lora_cfg.enabled", True)
        done.put("policy.lora_cfg.dim", rank)
        done.take("inference.enable_lora")


def _gpus(done: Conversion) -> None:
    """Carry over the GPUs of one host, by index or by number; the learner's GPUs come first."""
    trains, samples = done.take("deployment.num_train_gpus", 0), done.take("deployment.num_infer_gpus", 0)
    learner = listed(done.take("trainer_gpu_ids")) or list(range(trains))
    rollout = listed(done.take("inference_gpu_ids")) or list(range(trains, trains + samples))
    per_engine = done.settings.get("inference.parallel.tp") or 1
    if learner:
        done.put("cluster.learner_gpus", learner)
        done.put("cluster.learner_ranks", len(learner))
    if rollout and done.algorithm != "sft":
        done.put("cluster.rollout_gpus", rollout)
        done.put("cluster.rollout_workers", max(1, len(rollout) // per_engine))


def _tables(value: Any) -> list[dict[str, Any]]:
    return [each for each in listed(value) if isinstance(each, dict)] if not isinstance(value, dict) else [value]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
