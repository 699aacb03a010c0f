"""Texts of an environment are written behind the model's turn, not as texts that begin."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizer_kinds import KINDS, tokenizer_of

from paceline.environment.protocols import SampledTurn
from paceline.environment.rendering.protocol import Conversation, TextRendering


@pytest.mark.parametrize("text", ["42", " 42\n", "\nThe answer: no"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "strips"])
def test_an_answer_is_what_the_whole_text_has_there(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind, "b")
    rendering, before = TextRendering(tokenizer), Conversation([{"role": "user", "content": "say 42:"}])
    prompt_ids = rendering.prompt(before)
    said = tokenizer("is yes.", add_special_tokens=False)["input_ids"]
    turn = SampledTurn(np.array(said, np.int32), np.zeros(len(said), np.float32), (), "stop", "is yes.")
    answer = {"role": "assistant", "content": "is yes."}
    bridge = rendering.bridge(before, prompt_ids, turn, answer, [{"role": "user", "content": text}])
    whole = str(tokenizer.decode(np.concatenate([prompt_ids, turn.token_ids, bridge])))
    assert whole.endswith(f"is yes.{text}")
