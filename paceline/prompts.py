"""From a data set's prompt to token ids, the same way wherever it is needed: sampling, supervised training, asking.

Texts are tokenised once. What a model sampled is never decoded and tokenised again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import InvalidInput
from paceline.groups import IntArray
from paceline.spec import DataSection, PolicySection


def load_tokenizer(policy: PolicySection) -> Any:
    """The policy's tokenizer. Raises InvalidInput when there is none."""
    from transformers import AutoTokenizer

    name = policy.tokenizer_name or policy.model_name
    if name.startswith(("/", "./", "../")) and not Path(name).is_dir():
        raise InvalidInput(f"policy.tokenizer_name (or model_name): no folder {name!r}; check the path")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidInput(
            f"policy.tokenizer_name (or model_name) {name!r} has no usable tokenizer: {reason}"
        ) from None


def encode_prompt(tokenizer: Any, prompt: Any, template: str) -> IntArray:
    """[P] token ids of a prompt: messages by the chat template, text as it is.

    `template` is data.apply_chat_template. Raises InvalidInput: no template where one is needed, or no tokens.
    """
    if isinstance(prompt, str) and template == "always":
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
        if ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]  # some tokenizers end every text; a prompt goes on
    else:
        if template == "never" or not tokenizer.chat_template:
            raise InvalidInput(
                "the prompt is a list of messages, but the tokenizer has no chat template (or "
                "data.apply_chat_template is 'never'); use text prompts or another tokenizer"
            )
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    if not ids:
        raise InvalidInput(f"the prompt {prompt!r:.60} has no tokens")
    return np.array(ids, np.int32)


def encode_completion(tokenizer: Any, completion: str) -> IntArray:
    """[T] token ids of a target text, the end of sequence included."""
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
    return np.array([*ids, tokenizer.eos_token_id], np.int32)


def with_system_prompt(prompt: Any, data: DataSection) -> Any:
    """The prompt with data.system_prompt put before it, if there is one."""
    if data.system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [{"role": "system", "content": data.system_prompt}, *messages]
