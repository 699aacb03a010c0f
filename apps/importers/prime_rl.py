"""Converts prime-rl: a TOML file for trainer, orchestrator and inference, or for one of them, with its `toml_files`.

prime-rl's batch_size counts completions of a step; ours counts prompts.
"""

from __future__ import annotations

from typing import Any

from paceline.apps.importers.conversion import Conversion, listed, plain, rest_or, whole
from paceline.errors import SpecError

ORCHESTRATOR = ("batch_size", "rollouts_per_example", "group_size", "sampling", "environment", "env", "eval", "buffer")
"""Top-level names of an orchestrator's separate file."""
TRAINER = ("optim", "scheduler", "loss")
"""Top-level names of a trainer's separate file."""
GROUP = ("orchestrator.rollouts_per_example", "orchestrator.group_size", "orchestrator.train.group_size")
GROUP_SIZE = 8
"""Number of completions of each prompt that the spec gets if the file has only one."""
MAX_AGE = 8
"""prime-rl's max_off_policy_steps if the file does not set it (prime_rl.configs.orchestrator at 559b447)."""
SAMPLING = ("orchestrator.sampling", "orchestrator.train.sampling")
SOURCES = "orchestrator.train.source"
ENVIRONMENTS = ("orchestrator.env", "orchestrator.train.env", "orchestrator.environment", SOURCES)
MATHEMATICS = ("math", "gsm8k", "aime", "deepscaler")
"""Parts of the names of environments that compare the final answer with a column."""
OBJECTIVES = {
    "max_rl": "divides the advantage by the group's mean",
    "echo": "also trains the environment's tokens",
    "rae": "has a baseline for each agent of a game",
    "hierarchical_grpo": "compares proposers and solvers with their own kind",
    "opsd": "distills the policy with a demonstration in its prompt",
    "sft": "trains on a teacher's samples, which a server provides",
}
"""Maps each value of `algo.type` without a counterpart to a description of its effect."""
GSM8K = {"dataset_name": "openai/gsm8k", "dataset_subset": "main"}


def convert(settings: dict[str, Any]) -> Conversion:
    settings = {_place(name, settings): plain(value) for name, value in settings.items()}
    done = Conversion("prime_rl", settings, "sft" if _is_supervised(settings) else "grpo")
    if done.algorithm == "sft":
        _examples(done)
    else:
        _objective(done)
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
    if sections & {"orchestrator", "sampling", "environment", "env", "batch_size"}:
        return False
    return "data" in sections


def _examples(done: Conversion) -> None:
    done.put("algorithm", "sft")
    sources = [each.get("dataset") or each.get("name") for each in _tables(done.take("data.source"))]
    if names := [name for name in sources if name]:
        done.put("data.train", names[0] if len(names) == 1 else names)
    done.notes.append(
        "prime-rl reads the column messages, or prompt and completion; for messages, set data.messages_key"
    )


def _objective(done: Conversion) -> None:
    """Set the algorithm and the loss. Raises SpecError if one of them has no counterpart."""
    teacher = done.take("orchestrator.algo.teacher.name")
    algorithms = [_mapping(each.get("algo")) for each in _tables(done.settings.get(SOURCES))]
    kinds = {
        str(kind) for kind in (done.take("orchestrator.algo.type"), *(each.get("type") for each in algorithms)) if kind
    }
    if len(kinds) > 1:
        raise SpecError(
            f"orchestrator.algo.type: a run of Paceline has one algorithm, but this file has {', '.join(sorted(kinds))}"
        )
    kind = next(iter(kinds), "grpo")
    if kind in OBJECTIVES or kind not in ("grpo", "opd"):
        raise SpecError(
            f"orchestrator.algo.type {kind!r} {OBJECTIVES.get(kind, 'is unknown')}; no objective of Paceline does that"
        )
    if kind == "opd":
        done.algorithm = "distillation"
        done.put("algorithm", "distillation")
        teacher = teacher or next((_mapping(each.get("teacher")).get("name") for each in algorithms), None)
        done.put("distillation.teacher_model_name", teacher)
        done.leave_out("orchestrator.algo.teacher.base_url", "the learner runs the teacher")
        return
    if "orchestrator.rollouts_per_example" in done.settings:
        return  # an older file, whose objective was another
    done.put("grpo.advantage", "dr_grpo")
    loss = str(done.take("trainer.loss.type", "default"))
    if loss != "default":
        raise SpecError(
            f"trainer.loss.type {loss!r}: no objective here is the same; loss_fn.preset lists the objectives"
        )
    done.put("loss_fn.preset", "dppo")
    done.move("trainer.loss.dppo_mask_low", "loss_fn.dppo_mask_low")
    done.move("trainer.loss.dppo_mask_high", "loss_fn.dppo_mask_high")
    done.move("trainer.loss.kl_tau", "loss_fn.dppo_square_penalty")
    oldest = done.take("orchestrator.max_off_policy_steps", done.take("max_off_policy_steps", MAX_AGE))
    if isinstance(oldest, int):
        done.put("async_grpo.hard_max_age", oldest)
        if oldest == 0:
            done.put("async_grpo.max_trajectory_age_steps", 0)


def _batch(done: Conversion) -> None:
    batch = done.take("orchestrator.batch_size", 128)
    given = next((size for name in GROUP if isinstance(size := done.take(name), int)), 1)
    group = given if given > 1 else GROUP_SIZE
    if given == 1:
        done.notes.append(
            f"the file has one completion for each prompt, but a group's advantage needs several: the batch of {batch} "
            f"completions became groups of {group}; set grpo.num_generations_per_prompt and grpo.num_prompts_per_step"
        )
    if isinstance(batch, int):
        done.put("grpo.num_prompts_per_step", whole(batch, group))
    done.put("grpo.num_generations_per_prompt", group)


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
    done.put("policy.generation.max_new_tokens", "rest" if new is None else rest_or(new, total))


def _environments(done: Conversion) -> None:
    """Carry over the data set and the reward of an environment that compares final answers; leave out all others."""
    found = [(name, table) for name in ENVIRONMENTS for table in _tables(done.settings.get(name))]
    if "orchestrator.environment.id" in done.settings:
        found.append(("orchestrator.environment", {"id": done.settings["orchestrator.environment.id"]}))
    done.skip(*ENVIRONMENTS, "orchestrator.eval.env")
    for place, table in found:
        arguments: dict[str, Any] = {}
        for section in (table, _mapping(table.get("env"))):
            arguments |= _mapping(section.get("args")) | _mapping(section.get("taskset"))
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
    given = {"kwargs": {"answer_column": answer}} if answer != "answer" else {}
    done.put("rewards", [{"function": "math_accuracy", **given}])
    done.notes.append(
        f"the environment {name!r} became the built-in reward math_accuracy; check prompt, answer and data set"
    )


def _optimizer(done: Conversion) -> None:
    betas = done.take("trainer.optim.betas1"), done.take("trainer.optim.betas2")
    if any(beta is not None for beta in betas):
        done.put("policy.optimizer.betas", [betas[0] or 0.9, betas[1] or 0.999])
    kind = str(done.take("trainer.optim.type", "adamw")).lower()
    if kind != "adamw":
        done.notes.append(f"the optimizer {kind} became AdamW; choose policy.optimizer.lr for it")
    rate, lowest = done.settings.get("trainer.optim.lr"), done.settings.get("trainer.scheduler.min_lr")
    if isinstance(rate, float) and isinstance(lowest, int | float):
        done.take("trainer.scheduler.min_lr")
        done.put("policy.scheduler.min_lr_ratio", round(float(lowest) / rate, 6))


def _model(done: Conversion) -> None:
    if checkpointing := [name for name in done.settings if f"{name}.".startswith("trainer.model.ac.")]:
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
    per_engine = (
        done.settings.get("inference.parallel.tp") or done.settings.get("inference.vllm.tensor_parallel_size") or 1
    )
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
