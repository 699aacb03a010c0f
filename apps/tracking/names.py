"""Translates metrics' names to those of TRL and of NeMo RL.

A metric that the other library lacks keeps Paceline's name. docs/use/trackers.md lists differences in meaning.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Style = Literal["paceline", "trl", "nemo_rl"]
PREFIXES = {"step": "train", "evaluation": "eval"}


class Name(NamedTuple):
    """The names of one metric; `<x>` is the same text in all names. A name is empty if the library lacks the metric."""

    kind: str
    ours: str
    trl: str
    nemo_rl: str
    remark: str = ""


NAMES = (
    Name("step", "reward", "train/reward", "train/reward"),
    Name("step", "reward_group_std", "train/reward_std", "", "TRL's value is also the mean over groups"),
    Name("step", "reward/<function>", "train/rewards/<function>/mean", ""),
    Name("step", "reward_std/<function>", "train/rewards/<function>/std", ""),
    Name("step", "zero_variance_fraction", "train/frac_reward_zero_std", ""),
    Name("step", "completion_length", "train/completions/mean_length", "train/mean_gen_tokens_per_sample"),
    Name("step", "completion_length/min", "train/completions/min_length", "train/gen_tokens_per_sample/min"),
    Name("step", "completion_length/max", "train/completions/max_length", "train/gen_tokens_per_sample/max"),
    Name("step", "truncated_fraction", "train/completions/clipped_ratio", "train/truncation_rate"),
    Name("step", "loss", "train/loss", "train/loss"),
    Name("step", "grad_norm", "train/grad_norm", "train/grad_norm"),
    Name("step", "lr", "train/learning_rate", "train/lr"),
    Name("step", "entropy", "train/entropy", "train/approx_entropy",
         "NeMo RL's value is an estimate from the sampled tokens"),
    Name("step", "kl_reference", "train/kl", "train/kl_penalty",
         "NeMo RL's value is multiplied by the KL's coefficient"),
    Name("step", "kl_behaviour", "", "train/gen_kl_error"),
    Name("step", "ratio_behaviour", "train/sampling/importance_sampling_ratio/mean", "train/sampling_importance_ratio",
         "TRL and NeMo RL compare the learner before the step with the sampler"),
    Name("step", "clip_fraction", "train/clip_ratio/region_mean", ""),
    Name("step", "step_s", "train/step_time", "timing/train/total_step_time", "the learner's step, without waiting"),
    Name("step", "learner_wait_s", "", "timing/train/exposed_generation"),
    Name("step", "learner/tokens_per_s", "", "performance/tokens_per_sec_per_gpu", "sum over ranks"),
    Name("step", "epochs", "train/epoch", ""),
    Name("evaluation", "reward", "eval/reward", "validation/accuracy", "equal if all rewards are 0 or 1"),
    Name("evaluation", "reward/<function>", "eval/rewards/<function>/mean", ""),
    Name("evaluation", "completion_length", "eval/completions/mean_length", "validation/avg_length"),
)  # fmt: skip


def renamed(kind: str, name: str, style: Style) -> str:
    """Return a tracker's name of a metric of a `step` or an `evaluation`: `train/<name>` or `eval/<name>`, as in
    TensorBoard, or another library's name."""
    usual = f"{PREFIXES[kind]}/{name}"
    if style == "paceline":
        return usual
    for each in NAMES:
        theirs = each.trl if style == "trl" else each.nemo_rl
        found = re.fullmatch(re.escape(each.ours).replace("<function>", "(?P<function>.+)"), name)
        if theirs and found and each.kind == kind:
            return theirs.replace("<function>", found.groupdict().get("function", ""))
    return usual
