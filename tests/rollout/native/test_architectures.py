"""The native engine with every kind of layer, while sequences join, leave and get new weights: its logits are those of a
forward pass of transformers over each sequence alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import WORKING, Architecture
from tiny_policy import make_spec
from torch import Tensor
from transformers import Cache, DeepseekV32Config, Qwen3NextConfig, RwkvConfig

from paceline.errors import InvalidInput
from paceline.groups import Completion, Version
from paceline.models.architectures import MIXERS
from paceline.rollout.engine import GenerationRequest, SamplingParams
from paceline.rollout.native import model as native
from paceline.rollout.native.batch import DecodeBatch, RunningSequence
from paceline.rollout.native.model import NativeModel, load_native_model

MAX_TOKENS = 48
SAMPLED = 20
SHARPER: dict[str, dict[str, Any]] = {
    "FalconH1": {"time_step_limit": (0.5, 0.9), "ssm_multipliers": [0.5, 1.5, 1.2, 0.8, 0.7]},
    "NemotronH": {"time_step_min": 0.1},
}
"""Settings with which a wrong decode pass differs by more, by class."""


class Recorder(DecodeBatch):
    """A batch that keeps the logits from which each sequence was sampled."""

    def __init__(self, model: NativeModel) -> None:
        super().__init__(model, 8)
        self.logits_TV: dict[RunningSequence, list[Tensor]] = {}
        self.ended: list[tuple[RunningSequence, Completion]] = []

    def join(self, *prompts: tuple[np.ndarray, int]) -> None:
        """Add a sequence for each prompt and number of tokens to sample."""
        sequences = []
        for prompt, num_tokens in prompts:
            seed = len(self.logits_TV) + len(sequences)
            request = GenerationRequest(f"{seed}", prompt, SamplingParams(num_tokens), seed)
            sequences.append(RunningSequence(request, frozenset(), len(prompt) + num_tokens))
        self.ended += self.add(sequences)

    def run(self, most_steps: int) -> None:
        for _ in range(most_steps):
            if self.sequences:
                self.ended += self.step()

    def _append(self, logits_RV: Tensor, first: int, end: int) -> None:
        for sequence, logits_V in zip(self.sequences[first:end], logits_RV, strict=True):
            self.logits_TV.setdefault(sequence, []).append(logits_V.clone())
        super()._append(logits_RV, first, end)


def load(config: Any, folder: Path) -> NativeModel:
    """Return the engine's model for `config`, without weights."""
    config.save_pretrained(folder)
    spec = make_spec(folder, max_total_sequence_length=MAX_TOKENS, generation={"max_new_tokens": 8})
    return load_native_model(spec.policy, "cpu", load_weights=False)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, id=each.class_name, marks=() if each.always else (pytest.mark.slow, pytest.mark.merge))
        for each in WORKING
    ],
)
@torch.inference_mode()
def test_logits_are_those_of_each_sequence_alone(architecture: Architecture, tmp_path: Path) -> None:
    # With larger weights, rounding one of them changes some models' logits by more than 1e-5.
    changes = {"initializer_range": 0.1, **SHARPER.get(architecture.class_name, {})}
    architecture = replace(architecture, config={**architecture.config, **changes})
    old, new = architecture.make(), architecture.make()
    if old.config.model_type in MIXERS and not hasattr(Cache, "get_conv_state"):
        pytest.skip("states need transformers 5.23")
    for parameter in new.parameters():
        parameter.mul_(1 + 0.2 * torch.randn(parameter.shape))
    model = load(old.config, tmp_path)
    model.check(old.state_dict())
    model.replace(old.state_dict())
    rng = np.random.default_rng(0)
    a, b, c, d = (rng.integers(0, 23, size).astype(np.int32) for size in (9, 4, 1, 9))
    batch = Recorder(model)
    batch.change_version(Version(1, 0), None)
    batch.join((a, 3), (b, SAMPLED), (a, SAMPLED + 4), (c, 6), (b, SAMPLED + 1), (d, 7))
    batch.run(4)
    batch.join((a[::-1].copy(), 7), (a, SAMPLED))  # the results for `a` are cached
    batch.run(6)
    model.replace(new.state_dict())
    batch.change_version(Version(1, 1), 1)
    batch.join((d, SAMPLED))
    batch.run(MAX_TOKENS)
    assert len(batch.ended) == 9
    for sequence, completion in batch.ended:
        ids = np.concatenate((sequence.request.prompt_ids, completion.token_ids)).astype(np.int64)
        found_TV = torch.stack(batch.logits_TV[sequence])
        for span in completion.spans:
            plain = new if span.step else old
            logits_LV = plain(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
            expected_TV = logits_LV[sequence.prompt_length - 1 : -1]
            at = slice(span.start, span.end)
            torch.testing.assert_close(found_TV[at], expected_TV[at], atol=1e-5, rtol=1e-5)
    check_scores(model, new)


def check_scores(model: NativeModel, plain: Any) -> None:
    """Compare the log-probabilities of given texts, one of which is padded."""
    texts_RT = torch.randint(23, (2, 17), generator=torch.Generator().manual_seed(3))
    logprobs_RT, top_ids_RT, tops_RT = model.score(texts_RT)
    for row, length in ((0, 17), (1, 11)):
        text_T = texts_RT[row, :length]
        expected_TV = plain(input_ids=text_T[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen_T = expected_TV.gather(-1, text_T[1:, None])[:, 0]
        torch.testing.assert_close(logprobs_RT[row, 1:length], chosen_T, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(tops_RT[row, 1:length], expected_TV.max(-1).values, atol=1e-5, rtol=1e-5)
        assert torch.equal(top_ids_RT[row, 1:length], expected_TV.argmax(-1))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DeepseekV32Config(num_hidden_layers=1), "has layers of the kind [a-z_]+; use the vllm backend"),
        (
            RwkvConfig(num_hidden_layers=1),
            "keeps states in a form that this engine does not know; use the vllm backend",
        ),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(
    config: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "check_architecture", lambda *_: None)
    with pytest.raises(InvalidInput, match=f"cannot run a {config.model_type}, which {reason}"):
        load(config, tmp_path)


def test_a_transformers_without_states_in_its_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "Cache", object)
    with pytest.raises(InvalidInput, match=r"qwen3_next, which has states that .*; use transformers 5\.23"):
        load(Qwen3NextConfig(num_hidden_layers=4), tmp_path)
