"""An adapter trains alone, is its own reference when switched off, and is exported merged or separately."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_policy import CPU, VOCABULARY, make_batch, make_spec, save_tiny_policy
from transformers import AutoModelForCausalLM

from paceline.errors import InvalidInput, SpecError
from paceline.learner.batch.samples import pack_samples
from paceline.learner.checkpoints import checkpoint
from paceline.learner.checkpoints.checkpoint import read_state
from paceline.learner.checkpoints.export import (
    check_has_adapter,
    export_adapter,
    export_checkpoint,
    export_pretrained,
)
from paceline.learner.checkpoints.verification import verify
from paceline.learner.model.adapter import adapter_off, is_part_of_adapter
from paceline.learner.model.policy import load_policy, load_reference, packed_logprobs
from paceline.learner.step.reference import LocalReference
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.gather import gather_merged, gather_weights
from paceline.spec.reading import parse_spec
from paceline.weights.format.lora_names import FINGERPRINT, fingerprint
from paceline.weights.format.packing import plan

# PeftModel, the oracle here, asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TOKENS = torch.arange(VOCABULARY)[None]
LORA = {"enabled": True, "dim": 3, "alpha": 5}
AUTO: Any = AutoModelForCausalLM


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tiny_policy(tmp_path / "policy", tied=request.param)


@pytest.fixture
def trainer(policy: Path) -> Trainer:
    """After two steps, so that A and B both have moved."""
    trainer = Trainer(make_spec(policy, lora_cfg=LORA), CPU)
    for step in range(2):
        trainer.train_step(make_batch(), step)
    return trainer


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model.eval()(TOKENS).logits)


def base_model(policy: Path) -> Any:
    return AUTO.from_pretrained(policy, dtype=torch.float32)


def row_of(trainer: Trainer, model: Any) -> torch.Tensor:
    packed = pack_samples([sequence for sequence in make_batch() if len(sequence.completion_ids)], CPU)
    with torch.no_grad():
        return packed_logprobs(model, packed, temperature=0.8, chunk_tokens=7)[0]


def test_the_base_stays_bit_for_bit_and_only_the_adapter_has_state(trainer: Trainer, policy: Path) -> None:
    base = base_model(policy).state_dict()
    state = trainer.model.state_dict()
    for name, tensor in state.items():
        if not is_part_of_adapter(name):
            assert torch.equal(tensor, base[name.replace(".base_layer.", ".")]), name
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in state if is_part_of_adapter(name)}
    assert len(trained) == 2 * 2 * 7
    assert all(state[name].abs().max() > 0 for name in trained)
    assert len(trainer.optimizer.state) == len(trained)


def test_the_first_values_follow_from_the_seed_alone(policy: Path) -> None:
    spec = make_spec(policy, lora_cfg=LORA).policy
    first = gather_weights(load_policy(spec, CPU, seed=4), None)
    torch.manual_seed(99)
    again, other = (gather_weights(load_policy(spec, CPU, seed=seed), None) for seed in (4, 5))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_switched_off_the_policy_is_the_reference(trainer: Trainer, policy: Path) -> None:
    reference = load_reference(make_spec(policy).policy, CPU)
    expected = row_of(trainer, reference)
    with adapter_off(trainer.model):
        torch.testing.assert_close(row_of(trainer, trainer.model), expected, rtol=0, atol=1e-6)
    assert (row_of(trainer, trainer.model) - expected).abs().max() > 1e-2
    with adapter_off(reference):
        assert torch.equal(row_of(trainer, reference), expected)


def test_the_kl_penalty_needs_no_second_model_and_pulls_back(policy: Path) -> None:
    def trained(kl: float) -> tuple[Trainer, dict[str, float]]:
        trainer = Trainer(make_spec(policy, loss_fn={"reference_policy_kl_penalty": kl}, lora_cfg=LORA), CPU)
        for step in range(6):
            metrics = trainer.train_step(make_batch(), step)
        return trainer, metrics

    strong, metrics = trained(10.0)
    free, _ = trained(0.0)
    assert isinstance(strong.reference, LocalReference)
    assert strong.reference.model is strong.model
    assert not isinstance(free.reference, LocalReference)
    assert metrics["kl_reference"] > 0
    with adapter_off(strong.model):
        at_first = row_of(strong, strong.model)
    moved = [(row_of(one, one.model) - at_first).abs().mean() for one in (strong, free)]
    assert moved[0] < moved[1] / 2


def test_what_is_published_is_the_adapter(trainer: Trainer, policy: Path) -> None:
    published = gather_weights(trainer.model, torch.float32)
    names = {
        f"base_model.model.model.layers.{layer}.{module}.lora_{part}.weight"
        for layer in range(2)
        for module in (
            *(f"self_attn.{which}_proj" for which in "qkvo"),
            *(f"mlp.{which}_proj" for which in ("gate", "up", "down")),
        )
        for part in "AB"
    }
    assert published.keys() == names | {FINGERPRINT}
    # 3·(in + out) numbers of 4 bytes for each layer, with heads of 8, 4 of them and 2 for keys and values.
    expected = 2 * 3 * 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 2 * (32 + 48) + (48 + 32))
    payload = sum(tensor.nbytes for name, tensor in published.items() if name != FINGERPRINT)
    assert payload == expected
    assert published[FINGERPRINT].tolist() == fingerprint(base_model(policy).state_dict()).tolist()
    on_the_wire = plan(published, 1 << 20).total_bytes
    assert payload <= on_the_wire <= payload + 64 * len(published)


def test_the_merged_model_the_adapter_folder_and_the_policy_are_one(
    trainer: Trainer, policy: Path, tmp_path: Path
) -> None:
    merged = export_pretrained(tmp_path / "merged", gather_merged(trainer.model), model_name=str(policy))
    alone = export_adapter(
        tmp_path / "adapter", gather_weights(trainer.model, None), trainer.spec.policy.lora_cfg, str(policy)
    )
    whole = logits(AUTO.from_pretrained(merged))
    adapted: Any = PeftModel.from_pretrained(base_model(policy), str(alone))
    torch.testing.assert_close(logits(adapted), whole, rtol=0, atol=1e-4)
    assert (whole - logits(base_model(policy))).abs().max() > 1e-2
    names = {"adapter_config.json", "adapter_model.safetensors", "paceline_manifest.json"}
    assert {path.name for path in alone.iterdir()} == names
    assert len({path.stat().st_mode for path in alone.iterdir()}) == 1, "other users may read all of it or nothing"
    config = json.loads((alone / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 5, str(policy))


def test_a_checkpoint_holds_the_adapter_alone_and_training_goes_on_from_it(
    trainer: Trainer, policy: Path, tmp_path: Path
) -> None:
    saved = checkpoint.save(tmp_path, session=1, step=2, model=trainer.model, optimizer=trainer.optimizer)
    assert saved is not None
    with pytest.raises(Exception, match="does not fit"):
        read_state(
            verify(saved.path, saved.manifest_sha256),
            {"model": {"model.embed_tokens.weight": torch.empty(VOCABULARY, 32)}},
        )

    resumed = Trainer(make_spec(policy, lora_cfg=LORA), CPU)
    checkpoint.load(saved.path, expected_sha256=saved.manifest_sha256, model=resumed.model, optimizer=resumed.optimizer)
    for one in (trainer, resumed):
        one.train_step(make_batch(), 2)
    expected, got = (one.model.state_dict() for one in (trainer, resumed))
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_exports_from_a_checkpoint_equal_those_from_the_live_model(trainer: Trainer, tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, session=1, step=2, model=trainer.model, optimizer=trainer.optimizer)
    assert saved is not None
    policy = trainer.spec.policy
    options: Any = {"expected_sha256": saved.manifest_sha256, "policy": policy}
    merged = export_checkpoint(saved.path, tmp_path / "merged", **options)
    alone = export_checkpoint(saved.path, tmp_path / "alone", adapter_only=True, **options)
    live = gather_merged(trainer.model)
    written = load_file(merged / "model.safetensors")
    assert all(torch.equal(tensor, live[name]) for name, tensor in written.items())
    adapter = gather_weights(trainer.model, None)
    for name, tensor in load_file(alone / "adapter_model.safetensors").items():
        assert torch.equal(tensor, adapter[name])


def test_layers_are_chosen_by_name_and_the_rest_stays_whole(policy: Path, tmp_path: Path) -> None:
    chosen = {**LORA, "target_modules": ["q_proj", "down_proj"]}
    model = load_policy(make_spec(policy, lora_cfg=chosen).policy, CPU)
    names = [name for name in gather_weights(model, None) if name.endswith("lora_A.weight")]
    assert len(names) == 4
    assert all("q_proj" in name or "down_proj" in name for name in names)

    most = {**LORA, "exclude_modules": ["q_proj"]}
    spec = make_spec(policy, lora_cfg=most)
    trainer = Trainer(spec, CPU)
    for step in range(2):
        trainer.train_step(make_batch(), step)
    adapter = gather_weights(trainer.model, None)
    assert not [name for name in adapter if "q_proj" in name]
    folder = export_adapter(tmp_path / "adapter", adapter, spec.policy.lora_cfg, str(policy))
    adapted: Any = PeftModel.from_pretrained(base_model(policy), str(folder))
    model = base_model(policy)
    model.load_state_dict(gather_merged(trainer.model))
    torch.testing.assert_close(logits(adapted), logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_proj", "no_such_proj"),
        ("lm_head", "below the LM head"),
        ("embed_tokens", "below the LM head"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused(policy: Path, target: str, message: str) -> None:
    spec = make_spec(policy, lora_cfg={**LORA, "target_modules": [target]})
    with pytest.raises(InvalidInput, match=message):
        load_policy(spec.policy, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_cfg": {"enabled": True, "dropout": 0.1}}, "dropout 0.1 with algorithm grpo"),
        ({"lora_cfg": {"enabled": True, "dropout": 0.1}, "activation_checkpointing": True}, "another mask"),
        ({"lora_cfg": {"enabled": True, "rank": 4}}, "rank"),
        ({"lora_cfg": {"enabled": True, "dim": 0}}, "dim"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(change: dict[str, Any], message: str) -> None:
    tree: dict[str, Any] = {
        "policy": {"model_name": "org/model", **change},
        "data": {"train": "org/data"},
        "rewards": [{"function": "length"}],
    }
    with pytest.raises(SpecError, match=message):
        parse_spec(tree)


def test_a_run_without_an_adapter_has_none_to_export(policy: Path) -> None:
    with pytest.raises(InvalidInput, match="no adapter"):
        check_has_adapter(make_spec(policy).policy)


def test_supervised_training_may_drop_inputs_of_the_adapter(policy: Path) -> None:
    spec = make_spec(policy, algorithm="sft", lora_cfg={**LORA, "dropout": 0.5})
    trainer = Trainer(spec, CPU)
    losses = [trainer.train_step(make_batch(supervised=True), step)["loss"] for step in range(12)]
    assert losses[-1] < losses[0]


def test_in_bfloat16_the_adapter_keeps_float32_masters(policy: Path) -> None:
    trainer = Trainer(make_spec(policy, lora_cfg=LORA, precision="bfloat16"), CPU)
    for step in range(3):
        metrics = trainer.train_step(make_batch(), step)
    assert metrics["grad_norm"] > 0
    adapter = gather_weights(trainer.model, None)
    assert {tensor.dtype for name, tensor in adapter.items() if name != FINGERPRINT} == {torch.float32}
    # Values that bfloat16 cannot hold: the masters were stepped, not their copies.
    moved = adapter["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    assert not torch.equal(moved, moved.bfloat16().float())
    merged = gather_merged(trainer.model)
    expected = base_model(policy).state_dict()
    assert merged.keys() == expected.keys()
    assert torch.equal(merged["model.embed_tokens.weight"], expected["model.embed_tokens.weight"])
