"""The measure of eval.yaml. Training never uses it: GRPO has only the reward model's scores."""


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Return 1 for the right sum, else 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
