"""Converts verl: a composed YAML configuration, or the overrides of a command in a shell script.

verl's reward functions have another signature than ours, so an adapter file is written beside the spec.
"""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any

from paceline.apps.importers.conversion import Conversion, listed, plain, set_at, whole
from paceline.errors import SpecError

ADVANTAGES = {
    "gae": "gae",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        f"{ACTOR}.ppo_mini_batch_size": 256,
        f"{ACTOR}.clip_ratio_c": 3.0,
        f"{ROLLOUT}.n": 1,
    },
    "sft": {
        "data.train_batch_size": 256,
        "data.max_length": 1024,
        "optim.lr": 1e-5,
        "optim.betas": [0.9, 0.95],
        "optim.lr_warmup_steps_ratio": 0.1,
        "optim.lr_scheduler": "cosine",
    },
}
"""Values of verl/trainer/config (ppo_trainer.yaml, sft_trainer.yaml) at b178a3c, January 2026, that differ from
Paceline's. These values are written even if the configuration leaves them out."""
EPOCHS = {"grpo": 30, "sft": 4}
"""verl's trainer.total_epochs, if trainer.total_training_steps is not set."""
WHOLE = ("data.video_key", "actor_rollout_ref.hybrid_engine")
"""Every full configuration has one of these settings; in a full configuration `data.image_key` is only the default."""
ADAPTER = "verl_rewards.py"
OWN = '''"""The reward function of {file}, with the signature that Paceline calls."""

import importlib.util
import json
from pathlib import Path

_spec = importlib.util.spec_from_file_location("verl_reward", Path(__file__).parent / {file!r})
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_kwargs = json.loads({kwargs!r})


def reward(completions, reward_model, data_source=None, extra_info=None, **kwargs):
    """Return one number for each completion; the columns are those of verl's data."""
    count = len(completions)
    sources, extras = data_source or [None] * count, extra_info or [None] * count
    scores = [
        _module.{name}(
            data_source=source,
            solution_str=_text(completion),
            ground_truth=truth["ground_truth"],
            extra_info=extra,
            **_kwargs,
        )
        for completion, truth, source, extra in zip(completions, reward_model, sources, extras)
    ]
    return [float(score["score"] if isinstance(score, dict) else score) for score in scores]


def _text(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''
RULE = '''"""The final answer compared with verl's column reward_model, with the signature that Paceline calls."""

from paceline.reward.builtin.mathematics import math_accuracy


def reward(prompts, completions, reward_model, **columns):
    """Return 1.0 for each completion with the right final answer."""
    return math_accuracy(prompts, completions, answer=[str(truth["ground_truth"]) for truth in reward_model])
'''


def convert(settings: dict[str, Any], *, algorithm: str = "") -> Conversion:
    settings = {name: plain(value) for name, value in settings.items()}
    algorithm = algorithm or ("sft" if "model.partial_pretrain" in settings else "grpo")
    done = Conversion("verl", {**DEFAULTS[algorithm], **settings}, algorithm)
    if done.settings.get("trainer.total_training_steps") is None:
        done.settings.setdefault("trainer.total_epochs", EPOCHS[algorithm])
    if done.algorithm == "sft":
        done.put("algorithm", "sft")
    else:
        _batch(done)
        _objective(done)
        _rewards(done)
    _adapter(done)
    _data(done)
    _trainer(done)
    done.carry()
    return done


def _batch(done: Conversion) -> None:
    prompts = done.settings.get("data.train_batch_size") or 1024
    update = done.take(f"{ACTOR}.ppo_mini_batch_size")
    if isinstance(update, int):
        done.put("policy.num_updates_per_step", min(prompts, whole(prompts, update)))
    prompt, answer = done.take("data.max_prompt_length"), done.settings.get("data.max_response_length")
    if isinstance(prompt, int) and isinstance(answer, int):
        done.put("policy.max_total_sequence_length", prompt + answer)
    done.put("data.prompt_key", done.take("data.prompt_key", "prompt"))


def _objective(done: Conversion) -> None:
    mode = done.take(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode == "cispo" and (done.settings.get(f"{ACTOR}.clip_ratio_low") or 0) >= 1:
        done.take(f"{ACTOR}.clip_ratio_low")  # no lower bound
    if mode != "vanilla":
        done.take(f"{ACTOR}.clip_ratio_c")  # verl's other losses do not read it
    clip = done.take(f"{ACTOR}.clip_ratio")
    if clip is not None:
        done.put("loss_fn.ratio_clip_min", clip)
        done.put("loss_fn.ratio_clip_max", clip)
    # verl's trainer waits for its samples, and weighs no sample unless rollout_correction says so.
    done.put("async_grpo.max_trajectory_age_steps", 0)
    correction = "algorithm.rollout_correction."
    if done.settings.get(f"{correction}rollout_is") is None:
        done.skip(correction)
        if done.settings.get(f"{ACTOR}.tis_imp_ratio_cap") is None:
            done.put("loss_fn.truncated_importance_sampling_ratio", None)
    estimator = str(done.take("algorithm.adv_estimator", "gae"))
    by_std = done.take("algorithm.norm_adv_by_std_in_grpo", True)
    advantages = {**ADVANTAGES, "grpo": "trl" if by_std else "dr_grpo"}
    if estimator in advantages:
        done.put("grpo.advantage", advantages[estimator])
    else:
        done.leave_out("algorithm.adv_estimator", "the key grpo.advantage lists the possible estimators")
    in_loss, in_reward = done.take(f"{ACTOR}.use_kl_loss"), done.take("algorithm.use_kl_in_reward")
    weight = done.take(f"{ACTOR}.kl_loss_coef", 0.001)
    reward_weight = done.take("algorithm.kl_ctrl.kl_coef", 0.001)
    kinds = (f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty")
    if in_loss or in_reward:
        done.put("loss_fn.reference_policy_kl_penalty", weight if in_loss else reward_weight)
        done.used.add(kinds[1] if in_loss else kinds[0])
        if not in_loss:
            done.put("loss_fn.use_kl_in_reward", True)
    else:
        done.used.update(kinds)
    if mode in ("gspo", "cispo", "sapo"):
        done.put("loss_fn.preset", mode)
    elif mode != "vanilla":
        done.leave_out(f"{ACTOR}.policy_loss.loss_mode", "the key loss_fn.preset lists the possible objectives")


def _rewards(done: Conversion) -> None:
    function = "custom_reward_function."
    path, name = done.take(f"{function}path"), done.take(f"{function}name", "compute_score")
    kwargs = dict(done.take(f"{function}reward_kwargs", {}))
    for key, value in done.take_below(f"{function}reward_kwargs.").items():
        set_at(kwargs, key, value)
    model = done.take("reward_model.model.path") if done.take("reward_model.enable") else None
    if model:
        done.put("rewards", [{"function": "reward_model", "kwargs": {"path": model}}])
        return
    text = json.dumps(kwargs, default=str)
    is_own = path and str(name).isidentifier()
    done.files[ADAPTER] = OWN.format(file=str(path), name=name, kwargs=text) if is_own else RULE
    done.put("rewards", [{"function": f"{ADAPTER}:reward"}, *_length_penalty(done)])
    what = (
        f"{PurePath(str(path)).name}:{name}"
        if path
        else "the rule of verl's data_source (here: the right final answer)"
    )
    done.notes.append(f"{ADAPTER} calls {what} with Paceline's signature; it reads verl's column reward_model")


def _length_penalty(done: Conversion) -> list[dict[str, Any]]:
    """Return DAPO's penalty of long completions as a reward, if it is on."""
    for section in ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
        soft = done.settings.get(f"{section}.len")
        longest = done.settings.get(
            "reward_model.reward_kwargs.max_resp_len", done.settings.get("data.max_response_length")
        )
        if done.settings.get(f"{section}.enable") and isinstance(soft, int) and isinstance(longest, int):
            done.skip(section)
            done.used.update(("reward_model.reward_manager", "reward_model.reward_kwargs.max_resp_len"))
            done.notes.append(
                f"verl's math_dapo rewards a wrong answer with -1, {ADAPTER} with 0: check the weights of rewards"
            )
            weight = done.settings.get(f"{section}.penalty_factor", 1.0)
            kwargs = {"max_completion_tokens": longest, "soft_tokens": soft}
            return [{"function": "soft_overlong", "weight": weight, "kwargs": kwargs}]
    return []


def _adapter(done: Conversion) -> None:
    rank = done.take(f"{MODEL}.lora_rank", done.take("model.lora_rank", 0))
    if rank:
        done.put("policy.lora_cfg.enabled", True)
        done.put("policy.lora_cfg.dim", rank)
    modules = done.take(f"{MODEL}.target_modules")
    if rank and modules and modules != "all-linear":
        done.put("policy.lora_cfg.target_modules", listed(modules))
    if excluded := done.take(f"{MODEL}.exclude_modules"):
        done.put("policy.lora_cfg.exclude_modules", listed(excluded))


def _trainer(done: Conversion) -> None:
    save, test = done.take("trainer.save_freq", 0), done.take("trainer.test_freq", 0)
    if save > 0:
        done.put("checkpointing.save_period", save)
    has_data = done.settings.get("data.val_files") is not None
    if test > 0 and has_data:
        done.put("grpo.val_period", test)
    if not has_data:
        done.take("trainer.val_before_train")
    elif done.algorithm == "grpo":
        done.put("grpo.val_at_start", bool(done.take("trainer.val_before_train", True)))
    warmup = done.take(f"{ACTOR}.optim.lr_warmup_steps", 0)
    if warmup > 0:
        done.put("policy.scheduler.warmup_steps", warmup)


def _data(done: Conversion) -> None:
    if done.settings.get("data.image_key") and done.settings.keys().isdisjoint(WHOLE):
        raise SpecError(f"data.image_key {done.settings['data.image_key']!r}: samples with images cannot be trained")
    if arguments := done.take_below("data.apply_chat_template_kwargs."):
        done.put("data.chat_template_kwargs", arguments)
    for theirs, ours in (("data.train_files", "data.train"), ("data.val_files", "data.validation")):
        if files := listed(done.take(theirs)):
            done.put(ours, files[0] if len(files) == 1 else files)
