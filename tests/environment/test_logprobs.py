"""Episodes on the native engine: log-probabilities of the sampled tokens of every row are those of a forward pass over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from episode_world import HERMES, LocalCode, lease, merged_tokenizer, run_group, run_spec, user
from transformers import Qwen3Config, Qwen3ForCausalLM

from paceline.environment.protocols import SampledTurn, TurnParams, TurnRequest
from paceline.environment.setting import EpisodeSetting
from paceline.groups import Version
from paceline.rollout.engine import GenerationRequest, SamplingParams
from paceline.rollout.engines import create_engine

MOST = 2e-5
"""Difference between engine and learner in float32, in nats."""


class Talk:
    def reset(self, **columns: Any) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool]:
        return f"{len(text)} characters, go on", 0.1, False


class NativeSource:
    """The native engine as a source of turns."""

    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self._engine, self._tokenizer, self._number = engine, tokenizer, 0

    async def sample(self, request: TurnRequest) -> SampledTurn:
        self._number += 1
        params = SamplingParams(request.params.max_new_tokens, stop_token_ids=(self._tokenizer.eos_token_id,))
        done = await self._engine.generate(
            GenerationRequest(str(self._number), request.prompt_ids, params, request.seed)
        )
        text = self._tokenizer.decode(done.token_ids, skip_special_tokens=True)
        return SampledTurn(done.token_ids, done.logprobs, done.spans, done.finish_reason, text)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = merged_tokenizer(HERMES)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def test_log_probabilities_are_those_of_a_forward_pass_over_the_rows(model_folder: Path) -> None:
    policy = {
        "model_name": str(model_folder),
        "max_total_sequence_length": 768,
        "generation": {"max_new_tokens": 24, "backend": "native", "max_batch_size": 8},
    }
    spec = run_spec(policy=policy, environment={"max_turns": 6}, cluster={"device": "cpu"})
    tokenizer = merged_tokenizer(HERMES)
    model = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    engine = create_engine(spec, device="cpu")
    try:
        await engine.ready()
        await engine.update_weights(Version(1, 0), dict(model.state_dict()))
        setting = EpisodeSetting.of(spec, tokenizer)
        leased = lease(user("add the numbers"), 8, params=TurnParams(24))
        rows = await run_group(setting, NativeSource(engine, tokenizer), LocalCode({"": Talk}), leased)
    finally:
        await engine.close()
    assert len(rows.rows.turns) == 8 * 6
    differences = []
    for completion in rows.completions:
        assert completion.prompt_ids is not None
        assert completion.sampled_T is not None
        tokens = torch.tensor(np.concatenate([completion.prompt_ids, completion.token_ids])[None], dtype=torch.long)
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(model(tokens).logits[0].float(), -1)
        start = len(completion.prompt_ids)
        own = logprobs_TV[start - 1 : -1].gather(1, tokens[0, start:, None])[:, 0].numpy()
        differences.append(np.abs(own - completion.logprobs)[completion.sampled_T].max())
    assert max(differences) <= MOST
