"""Reward functions of this example. grpo.yaml names one as `reward.py:correct`; docs/use/rewards.md has the rules.

A function gets lists with one entry per completion: here the sampled texts, and the data set's column `answer`. It
returns one number per completion, or None for no score.
"""


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Return 1 for the right sum, else 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def right_digits(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Return the share of right digits, for partial credit; 0 for an answer of another length."""
    return [
        sum(a == b for a, b in zip(text, right, strict=True)) / len(right) if len(text) == len(right) else 0.0
        for text, right in zip(completions, answer, strict=True)
    ]
