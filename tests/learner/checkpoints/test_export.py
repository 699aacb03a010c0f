"""Exports give the trained weights back through transformers, from gathered weights and from a checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tiny_policy import CPU, VOCABULARY, make_batch, make_spec, save_tiny_policy
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from paceline.errors import Conflict, InvalidInput
from paceline.files.names import EXPORT_MANIFEST
from paceline.learner.checkpoints import checkpoint
from paceline.learner.checkpoints.export import export_checkpoint, export_pretrained
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.gather import gather_weights

TOKENS = torch.arange(VOCABULARY)[None]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Trainer:
    policy = save_tiny_policy(tmp_path / "policy", tied=request.param)
    GenerationConfig(eos_token_id=3, temperature=0.7, do_sample=True).save_pretrained(policy)
    (policy / "tokenizer.json").write_text('{"not": "touched"}')
    (policy / "chat_template.jinja").write_text("{{ messages }}")
    trainer = Trainer(make_spec(policy), CPU)
    trainer.train_step(make_batch(), 0)
    return trainer


def policy_of(trainer: Trainer) -> str:
    return trainer.spec.policy.model_name


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(TOKENS).logits)


def expected_logits(trainer: Trainer, dtype: torch.dtype) -> torch.Tensor:
    """Return the output of the base architecture with the trained weights."""
    model = AutoModelForCausalLM.from_pretrained(policy_of(trainer), dtype=dtype)
    model.load_state_dict(trainer.model.state_dict())
    return logits(model)


def loaded(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == dtype
    return model


def test_gathered_weights_load_with_equal_logits(trainer: Trainer, tmp_path: Path) -> None:
    folder = export_pretrained(tmp_path / "export", gather_weights(trainer.model, None), model_name=policy_of(trainer))
    model = loaded(folder, torch.float32)
    tied = trainer.model.config.tie_word_embeddings
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert torch.equal(logits(model), expected_logits(trainer, torch.float32))
    assert (folder / "tokenizer.json").read_text() == '{"not": "touched"}'
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert GenerationConfig.from_pretrained(folder).temperature == 0.7
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
    listed = json.loads((folder / EXPORT_MANIFEST).read_text())["files"]
    assert {file["path"] for file in listed} == {path.name for path in folder.iterdir()} - {EXPORT_MANIFEST}
    for file in listed:
        content = (folder / file["path"]).read_bytes()
        assert (file["size_bytes"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())


def test_checkpoint_exports_without_a_process_group(trainer: Trainer, tmp_path: Path) -> None:
    saved = checkpoint.save(
        tmp_path / "checkpoints", session=1, step=1, model=trainer.model, optimizer=trainer.optimizer
    )
    assert saved is not None
    folder = export_checkpoint(
        saved.path,
        tmp_path / "export",
        expected_sha256=saved.manifest_sha256,
        policy=trainer.spec.policy,
        dtype=torch.bfloat16,
    )
    assert torch.equal(logits(loaded(folder, torch.bfloat16)), expected_logits(trainer, torch.bfloat16))
    with pytest.raises(Conflict, match="not the expected"):
        export_checkpoint(saved.path, tmp_path / "other", expected_sha256="0" * 64, policy=trainer.spec.policy)


def test_export_refuses_to_overwrite_and_other_models_weights(trainer: Trainer, tmp_path: Path) -> None:
    weights = gather_weights(trainer.model, None)
    with pytest.raises(Conflict, match="never overwrites"):
        export_pretrained(tmp_path, weights, model_name=policy_of(trainer))
    del weights["model.norm.weight"]
    with pytest.raises(InvalidInput, match=r"model\.norm\.weight"):
        export_pretrained(tmp_path / "export", weights, model_name=policy_of(trainer))
    weights = gather_weights(trainer.model, None)
    with pytest.raises(InvalidInput, match="has no tokenizer files"):
        export_pretrained(tmp_path / "export", weights, model_name=policy_of(trainer), tokenizer_name=str(tmp_path))
    assert not (tmp_path / "export").exists()


def test_gathered_copy_is_not_touched_by_the_next_step(trainer: Trainer) -> None:
    gathered = gather_weights(trainer.model, torch.bfloat16)
    kept = {name: tensor.clone() for name, tensor in gathered.items()}
    trainer.train_step(make_batch(), 1)
    for name, tensor in trainer.model.state_dict().items():
        assert gathered[name].dtype == torch.bfloat16
        assert torch.equal(gathered[name], kept[name])
        assert not torch.equal(gathered[name], tensor.to(torch.bfloat16)), name
    head, embedding = gathered["lm_head.weight"], gathered["model.embed_tokens.weight"]
    assert (head.data_ptr() == embedding.data_ptr()) == trainer.model.config.tie_word_embeddings
