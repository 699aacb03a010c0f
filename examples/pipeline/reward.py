"""The measure of eval.yaml. Training never sees it: GRPO has the reward model's scores alone."""


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for the right sum, else 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
