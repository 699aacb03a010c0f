"""Conversions keep every bit, are read by torch's own loaders, and refuse what is not of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_models import save_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import tiny_qwen3
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM

from paceline.errors import Conflict, InvalidInput
from paceline.files.names import EXPORT_MANIFEST
from paceline.learner.checkpoints.conversion.folders import from_dcp, is_dcp, to_dcp, to_folder, write_box
from paceline.learner.checkpoints.export import compare_weights
from paceline.learner.checkpoints.model_folder import SafetensorsWriter, TensorHeader

AUTO: Any = AutoModelForCausalLM
ROOT = Path(__file__).resolve().parents[4]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def differing_tensors(first: Path, second: Path) -> list[str]:
    return compare_weights(tensors_of(first), tensors_of(second))[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of several shards, in bfloat16."""
    folder = save_model("untied", tmp_path / "model")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("kind", ["tied", "untied", "moe", "bias", "scaled"])
def test_a_folder_comes_back_bit_by_bit(kind: str, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path / "model")
    (model / "tokenizer.json").write_text('{"not": "touched"}')
    to_dcp(str(model), tmp_path / "dcp", block_bytes=1000)  # several blocks of most tensors
    assert is_dcp(tmp_path / "dcp")
    assert not is_dcp(model)
    from_dcp(tmp_path / "dcp", tmp_path / "back", max_file_bytes=20_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) >= 2
    assert differing_tensors(tmp_path / "back", model) == []
    assert (tmp_path / "back" / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"not": "touched"}'
    _, info = AUTO.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    listed = json.loads((tmp_path / "back" / EXPORT_MANIFEST).read_text())["files"]
    assert {file["path"] for file in listed} == {
        path.name for path in (tmp_path / "back").iterdir() if path.name != EXPORT_MANIFEST
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_what_was_written(model: Path, tmp_path: Path) -> None:
    to_dcp(str(model), tmp_path / "dcp", dtype=torch.float32, block_bytes=1000)
    expected = AUTO.from_pretrained(model, dtype=torch.float32)
    other = AUTO.from_config(expected.config)
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert compare_weights(state["model"], expected.state_dict()) == ([], 0.0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("nested", [True, False])
def test_a_trainers_checkpoint_becomes_a_folder(model: Path, tmp_path: Path, nested: bool) -> None:
    state = AUTO.from_pretrained(model, dtype=torch.float32).state_dict()
    saved = {"model": state, "step": torch.tensor(3), "note": "text"} if nested else state
    save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(InvalidInput, match="name with --config the model folder"):
        from_dcp(tmp_path / "dcp", tmp_path / "back")
    from_dcp(tmp_path / "dcp", tmp_path / "back", config=str(model), dtype=torch.bfloat16)
    assert differing_tensors(tmp_path / "back", model) == []
    with pytest.raises(Conflict, match="never overwrites"):
        from_dcp(tmp_path / "dcp", tmp_path / "back", config=str(model))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_columns_and_rows_of_a_divided_tensor_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(2 * 4 * 6, dtype=torch.float32).reshape(2, 4, 6)
    with SafetensorsWriter(tmp_path, [TensorHeader("w", torch.float32, (2, 4, 6))]) as writer:
        for begin, end in ((0, 2), (2, 6)):
            write_box(writer, "w", (2, 4, 6), (0, 0, begin), whole[:, :, begin:end])
        writer.finish()
    assert torch.equal(tensors_of(tmp_path)["w"], whole)
    with SafetensorsWriter(tmp_path, [TensorHeader("w", torch.float32, (2, 4, 6))]) as writer:
        for begin, end in ((0, 1), (1, 4)):
            write_box(writer, "w", (2, 4, 6), (0, begin, 0), whole[:, begin:end])
        writer.finish()
    assert torch.equal(tensors_of(tmp_path)["w"], whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_not_of_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    state = AUTO.from_pretrained(model).state_dict()
    dropped = next(iter(state))
    save(
        {"model": {n: t for n, t in state.items() if n != dropped}},
        checkpoint_id=tmp_path / "short",
        no_dist=True,
    )
    with pytest.raises(InvalidInput, match=f"{dropped} is missing"):
        from_dcp(tmp_path / "short", tmp_path / "out", config=str(model))
    save({"state": {"weights": state}}, checkpoint_id=tmp_path / "deep", no_dist=True)
    with pytest.raises(InvalidInput, match=r"no weights under 'model'.*The state dict has state"):
        from_dcp(tmp_path / "deep", tmp_path / "out", config=str(model))
    (tmp_path / "short" / ".metadata").write_bytes(b"cbuiltins\nprint\n.")
    with pytest.raises(InvalidInput, match=r"builtins.print, which does not belong in a checkpoint"):
        from_dcp(tmp_path / "short", tmp_path / "out", config=str(model))
    with pytest.raises(InvalidInput, match="is not a folder"):
        to_dcp("Qwen/Qwen3-0.6B", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("rslora", [True, False])
def test_an_adapter_is_merged_as_peft_merges(model: Path, tmp_path: Path, rslora: bool) -> None:
    torch.manual_seed(1)
    base = AUTO.from_pretrained(model, dtype=torch.float32)
    lora = LoraConfig(r=2, lora_alpha=8, use_rslora=rslora, target_modules=["q_proj", "down_proj"])
    adapted: Any = get_peft_model(base, lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    to_folder(str(model), tmp_path / "merged", dtype=torch.float32, adapter=tmp_path / "adapter")
    expected = adapted.merge_and_unload().state_dict()
    found = tensors_of(tmp_path / "merged")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "float32"


def test_an_adapter_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.model.layers.9.q_proj"
    parts = {f"{layer}.lora_A.weight": torch.zeros(2, 8), f"{layer}.lora_B.weight": torch.zeros(8, 2)}
    save_file(parts, adapter / "adapter_model.safetensors")
    with pytest.raises(InvalidInput, match=r"layers.9.q_proj.weight .* has no such tensor"):
        to_folder(str(model), tmp_path / "out", adapter=adapter)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(InvalidInput, match="use_dora is True, which paceline does not merge"):
        to_folder(str(model), tmp_path / "out", adapter=adapter)


MEASURED = """
import sys
from pathlib import Path
import transformers.models.qwen3.modeling_qwen3
from paceline.learner.checkpoints.conversion.folders import from_dcp, to_dcp
from paceline.host.resources import return_large_tensors
return_large_tensors()  # as the command does

def status_bytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def growth(convert, *arguments, **options):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    convert(*arguments, **options)
    print(status_bytes("VmHWM") - before)

model, folder, warm = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
to_dcp(warm, folder / "warm")  # what is imported and allocated once is no part of a conversion
from_dcp(folder / "warm", folder / "warm-back")
growth(to_dcp, model, folder / "dcp")
growth(from_dcp, folder / "dcp", folder / "back")
"""


@pytest.mark.merge
@pytest.mark.slow
def test_peak_memory_stays_below_a_shard(model: Path, tmp_path: Path) -> None:
    big = tiny_qwen3(hidden_size=1024, intermediate_size=8192, num_hidden_layers=6)
    big.bfloat16().save_pretrained(tmp_path / "big", max_shard_size="70MB")
    shards = [file.stat().st_size for file in (tmp_path / "big").glob("*.safetensors")]
    assert len(shards) >= 5
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "big"), str(tmp_path), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    there, back = map(int, done.stdout.split())
    assert 0 < there < 1.3 * max(shards)
    assert 0 < back < 1.3 * max(shards)
    assert differing_tensors(tmp_path / "back", tmp_path / "big") == []
