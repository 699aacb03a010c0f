"""A trained reward model as a reward function: an export of `algorithm: rm`, or any sequence classification with one output.

It runs in the reward worker's processes, on the CPU, so it has to be small, or its time limit generous.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from paceline.errors import InvalidInput


def reward_model(
    prompts: list[Any],
    completions: list[Any],
    *,
    path: str,
    scale: float = 1.0,
    offset: float = 0.0,
    chat_template_kwargs: dict[str, Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return [C] scale · (score - offset) of each prompt with its completion, by the reward model in folder `path`.

    The text is tokenised as in the model's training, with the model's tokenizer and chat template, whose arguments are
    `chat_template_kwargs`. torch and the
    model are loaded at the first call, which timeout_s and memory_mb have to allow for. Raises InvalidInput: no such folder,
    or no sequence classification with one output in it.
    """
    import torch

    from paceline.data.tokens import encode_for_scoring, padding_token_id

    tokenizer, model = _load(path)
    texts = [
        encode_for_scoring(tokenizer, prompt, completion, "auto", chat_template_kwargs or {})
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    longest = max(len(ids) for ids in texts)
    ids_CT = torch.full((len(texts), longest), padding_token_id(tokenizer))
    mask_CT = torch.zeros(len(texts), longest, dtype=torch.int64)
    for index, ids in enumerate(texts):
        ids_CT[index, : len(ids)] = torch.from_numpy(ids.astype("int64"))
        mask_CT[index, : len(ids)] = 1
    with torch.inference_mode():
        scores_C = model(input_ids=ids_CT, attention_mask=mask_CT).logits[:, 0].float()
    return [scale * (score - offset) for score in scores_C.tolist()]


@functools.lru_cache(maxsize=2)
def _load(path: str) -> tuple[Any, Any]:
    """Return tokenizer and model, loaded once a process."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from paceline.data.tokens import padding_token_id

    if not (Path(path) / "config.json").is_file():
        raise InvalidInput(
            f"reward_model: path {path!r} has no config.json; name an exported reward model's folder"
        )
    config = AutoConfig.from_pretrained(path)
    kinds = config.architectures or []
    if config.num_labels != 1 or not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise InvalidInput(
            f"reward_model: path {path!r} holds {', '.join(kinds) or 'no architecture'} with {config.num_labels} outputs; "
            "a reward model is a sequence classification with one output, as `paceline rm` exports it"
        )
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    model.config.pad_token_id = padding_token_id(tokenizer)
    return tokenizer, model
