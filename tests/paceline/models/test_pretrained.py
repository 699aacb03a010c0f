"""All loaders accept and refuse the same folders: learner, reference, native engine, reward model and conversion."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_models import save_classifier
from safetensors.torch import load_file, save_file
from tiny_models import tiny_qwen3
from tiny_policy import CPU, make_spec
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.errors import InvalidInput, Unreadable
from paceline.learner.checkpoints.conversion.folders import to_dcp, to_folder
from paceline.learner.model.policy import load_policy, load_reference, load_reward_model
from paceline.models.pretrained import check_model
from paceline.reward.models.scorer import load_scorer
from paceline.reward.models.settings import ModelSettings
from paceline.reward.reference import _load as load_pool_reference
from paceline.rollout.native.model import load_native_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, Tensor]


def with_tensors(change: Callable[[Tensors], Tensors | None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        save_file(change(tensors) or tensors, folder / SINGLE, metadata={"format": "pt"})

    return damage


def named(rename: Callable[[str], str]) -> Callable[[Path], None]:
    return with_tensors(lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})


def without(*parts: str) -> Callable[[Path], None]:
    return with_tensors(lambda tensors: {n: t for n, t in tensors.items() if not any(part in n for part in parts)})


def plus(**more: Tensor) -> Callable[[Path], None]:
    return with_tensors(lambda tensors: tensors | {n.replace("__", "."): t for n, t in more.items()})


def config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def value(name: str, number: float) -> Callable[[Path], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[3] = number

    return with_tensors(change)


def cast(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(dtype)

    return with_tensors(change)


def sharded(
    change: Callable[[dict[str, Tensors], dict[str, str]], None] = lambda shards, index: None,
    keep: bool = False,
) -> Callable[[Path], None]:
    """Divide the tensors over two files and an index, all of which `change` may change."""

    def damage(folder: Path) -> None:
        tensors = sorted(load_file(folder / SINGLE).items())
        shards = {"a.safetensors": dict(tensors[:9]), "b.safetensors": dict(tensors[9:])}
        index = {name: file for file, part in shards.items() for name in part}
        change(shards, index)
        for file, part in shards.items():
            save_file(part, folder / file, metadata={"format": "pt"})
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
        if not keep:
            (folder / SINGLE).unlink()

    return damage


def file_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes())) and None


def pickled(keep: bool) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04never read")
        if not keep:
            (folder / SINGLE).unlink()

    return damage


def both(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for each in damages:
            each(folder)

    return damage


def double_head(offset: float) -> Callable[[Path], None]:
    return with_tensors(lambda tensors: tensors | {HEAD: tensors[EMBEDDING] + offset})


def again(offset: float) -> Callable[[Path], None]:
    def change(shards: dict[str, Tensors], index: dict[str, str]) -> None:
        name, tensor = next(iter(shards["a.safetensors"].items()))
        shards["b.safetensors"][name] = tensor + offset

    return sharded(change)


def lost(shards: dict[str, Tensors], index: dict[str, str]) -> None:
    """Leave the second file out of the index."""
    for name in shards["b.safetensors"]:
        del index[name]


def absent(shards: dict[str, Tensors], index: dict[str, str]) -> None:
    del shards["b.safetensors"]


Case = tuple[bool, Callable[[Path], None], str | None]
"""Whether the config ties, what is done to the whole folder, and words of the refusal (None: the model loads)."""
NAN, LAYER = float("nan"), "model.layers.1."
CASES: dict[str, Case] = {
    "untied": (False, lambda folder: None, None),
    "tied": (True, lambda folder: None, None),
    "shards": (False, sharded(), None),
    "tied, with both tensors": (True, double_head(0), None),
    "tied, stored as the head": (True, named(lambda n: HEAD if n == EMBEDDING else n), None),
    "tied, names of the base model": (True, named(lambda n: n.removeprefix("model.")), None),
    "a tensor in two files": (False, again(0), None),
    "pickle beside": (False, pickled(keep=True), None),
    "rotary buffer of older versions": (
        True,
        plus(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8)),
        None,
    ),
    "rotary tables of older versions": (
        True,
        plus(model__layers__0__self_attn__rotary_emb__cos_cached=torch.ones(1, 1, 4, 8)),
        None,
    ),
    "mask of older versions": (True, plus(transformer__h__0__attn__masked_bias=torch.tensor(-1e4)), None),
    "speculative layers": (True, plus(mtp__layers__0__weight=torch.ones(8)), None),
    "value head": (True, plus(v_head__summary__weight=torch.ones(1, 32)), None),
    "float16": (True, cast("model.norm.weight", torch.float16), None),
    # vllm-project/vllm#53020: the head was missing and stayed random.
    "no head": (False, without("lm_head"), rf"lacks tensor '{HEAD}'"),
    "no embedding, tied": (True, without("embed_tokens"), "lacks tensor"),
    # huggingface/trl#5858, NVIDIA-NeMo/Automodel#2511: names of another namespace.
    "torch.compile's prefix": (False, named(lambda n: f"_orig_mod.{n}"), "names begin with '_orig_mod.'"),
    "DDP's prefix": (True, named(lambda n: f"module.{n}"), r"names begin with 'module\.'"),
    "peft's prefix": (False, named(lambda n: f"base_model.model.{n}"), "'base_model.model.model."),
    "FSDP's prefix": (
        True,
        named(lambda n: n.replace("model.layers.", "model.layers._fsdp_wrapped_module.")),
        "lacks tensor 'model.layers.0",
    ),
    "a vision model's names": (
        False,
        named(lambda n: n.replace("model.", "model.language_model.", 1)),
        r"has 'model\.language_model\.embed",
    ),
    "untied, names of the base model": (
        False,
        both(without("lm_head"), named(lambda n: n.removeprefix("model."))),
        "lacks tensor",
    ),
    "a layer less": (True, without(LAYER), rf"lacks tensor '{LAYER}input_layernorm"),
    "a tensor less": (True, without("1.mlp.up_proj"), "lacks tensor 'model.layers.1.mlp.up_proj"),
    "a layer more than the config": (True, config(num_hidden_layers=1, layer_types=None), f"has '{LAYER}"),
    "a layer less than the config": (True, config(num_hidden_layers=3, layer_types=None), "lacks .*layers.2"),
    "another width": (True, config(intermediate_size=40), r"shape .* config\.json makes it"),
    "more tokens than the files": (True, config(vocab_size=99), r"embed_tokens.* config\.json makes it"),
    "another architecture": (
        True,
        config(model_type="llama", architectures=["LlamaForCausalLM"]),
        "has 'model.layers.0.self_attn.k_norm.weight'",
    ),
    "a bias": (True, plus(model__layers__0__self_attn__q_proj__bias=torch.ones(32)), "has 'model.layers.0"),
    "a reward model's head": (True, plus(score__weight=torch.ones(1, 32)), r"has 'score\.weight'"),
    "tied, with two tensors": (True, double_head(1), "different values .*tie_word_embeddings"),
    "NaN": (True, value("model.layers.0.mlp.up_proj.weight", NAN), "up_proj.* has NaN or infinite"),
    "infinite": (False, value(HEAD, float("-inf")), "lm_head.* has NaN or infinite"),
    "float8 without scales": (
        True,
        cast("model.layers.0.mlp.up_proj.weight", torch.float8_e4m3fn),
        "F8_E4M3, and config.json has no quantization_config",
    ),
    "int8": (True, cast("model.layers.0.mlp.up_proj.weight", torch.int8), "I8, and config.json has no quant"),
    "cut off": (True, file_bytes(lambda data: data[:-100]), "is damaged"),
    "no header": (True, file_bytes(lambda data: b"\xff" * 20), "is damaged"),
    "empty": (True, file_bytes(lambda data: b""), "is damaged"),
    "a file is not there": (False, sharded(absent), r"no file b\.safetensors, which its .*index"),
    "a file is not in the index": (False, sharded(lost), "lacks tensor"),
    "an empty index": (False, sharded(lambda shards, index: index.clear()), r"index\.json is damaged"),
    "two different tensors of a name": (False, again(1), "have different tensors"),
    "a file and an index": (False, sharded(keep=True), "has both"),
    "pickle alone": (False, pickled(keep=False), r"pytorch_model\.bin; pickled weights are not read"),
    "no weights": (True, lambda folder: (folder / SINGLE).unlink(), "has no weights"),
    "an adapter's config beside": (
        True,
        lambda folder: (folder / "adapter_config.json").write_text("{}") and None,
        "is a LoRA adapter, not a model",
    ),
}
LOADERS: dict[str, Callable[[Path], Any]] = {
    "learner": lambda folder: load_policy(make_spec(folder).policy, CPU),
    "reference": lambda folder: load_reference(make_spec(folder).policy, CPU),
    "native engine": lambda folder: load_native_model(make_spec(folder).policy, "cpu", True).module,
    "reference of the pool": lambda folder: load_pool_reference(str(folder), torch.float32),
    "convert": lambda folder: to_dcp(str(folder), folder.parent / "dcp"),
}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folders = {tied: tmp_path_factory.mktemp(f"whole-{tied}") for tied in (True, False)}
    for tied, folder in folders.items():
        tiny_qwen3(tie_word_embeddings=tied).save_pretrained(folder)
    return folders


@pytest.mark.parametrize("name", CASES)
def test_all_loaders_agree(name: str, wholes: dict[bool, Path], tmp_path: Path) -> None:
    tied, damage, words = CASES[name]
    folder = tmp_path / "model"
    shutil.copytree(wholes[tied], folder)
    damage(folder)
    expected = tiny_qwen3(tie_word_embeddings=tied).state_dict()
    for loader, load in LOADERS.items():
        if words is not None:
            with pytest.raises((InvalidInput, Unreadable), match=f"(?s)model.*{words}"):
                pytest.fail(f"{loader} loads it: {load(folder)}")
        elif (model := load(folder)) is not None:
            torch.testing.assert_close(model.state_dict(), expected, rtol=1e-3, atol=1e-3, msg=loader)


@pytest.mark.parametrize("name", ["no head", "a vision model's names", "cut off", "an adapter's config beside"])
def test_headers_alone_refuse_a_folder_that_another_program_loads(
    name: str, wholes: dict[bool, Path], tmp_path: Path
) -> None:
    """As before vLLM reads a folder."""
    tied, damage, words = CASES[name]
    shutil.copytree(wholes[tied], tmp_path / "model")
    check_model(AutoModelForCausalLM, str(tmp_path / "model"), "policy.model_name")
    damage(tmp_path / "model")
    if name != "an adapter's config beside":  # where the folder comes from has refused that
        with pytest.raises(InvalidInput, match=words):
            check_model(AutoModelForCausalLM, str(tmp_path / "model"), "policy.model_name")


REWARD_CASES: dict[str, tuple[Callable[[Path], None], str | None]] = {
    "whole": (lambda folder: None, None),
    "no score": (without("score"), r"lacks tensor 'score\.weight'"),
    "a policy under its config": (
        with_tensors(lambda tensors: {HEAD if n == "score.weight" else n: t for n, t in tensors.items()}),
        r"lacks tensor 'score\.weight' .*has 'lm_head\.weight'",
    ),
    "a wrapper's names": (named(lambda n: f"module.{n}"), "names begin with 'module.'"),
    "a score of two": (
        with_tensors(lambda tensors: tensors | {"score.weight": torch.ones(2, 32)}),
        r"score\.weight' in .*shape \(2, 32\)",
    ),
    "NaN": (value("score.weight", NAN), r"score\.weight' has NaN"),
    "a layer less": (without("layers.1."), "lacks tensor 'model.layers.1"),
    "an LM head beside": (plus(lm_head__weight=torch.ones(4, 32)), r"has 'lm_head\.weight'"),
}


@pytest.mark.parametrize("name", REWARD_CASES)
def test_a_reward_model_is_whole(name: str, tmp_path: Path) -> None:
    damage, words = REWARD_CASES[name]
    save_classifier(tmp_path / "model")
    damage(tmp_path / "model")
    loaders: list[Callable[[Path], Any]] = [
        lambda folder: load_scorer(ModelSettings(path=str(folder))),
        lambda folder: load_reward_model(make_spec(folder, "rm").policy, CPU),
        lambda folder: to_folder(str(folder), tmp_path / "out", dtype=torch.float32),
    ]
    for load in loaders:
        if words is None:
            load(tmp_path / "model")
        else:
            with pytest.raises(InvalidInput, match=words):
                load(tmp_path / "model")


def test_a_type_that_is_too_small_is_refused(wholes: dict[bool, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(wholes[True], folder)
    value("model.norm.weight", 1e30)(folder)
    load_policy(make_spec(folder).policy, CPU)
    with pytest.raises(InvalidInput, match=r"infinite elements in torch\.float16"):
        to_folder(str(folder), tmp_path / "out", dtype=torch.float16)
    with pytest.raises(InvalidInput, match=r"infinite elements in torch\.float16"):
        load_native_model(make_spec(folder, generation_precision="float16").policy, "cpu", True)


def test_quantized_weights_are_neither_trained_nor_converted(wholes: dict[bool, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(wholes[True], folder)
    config(quantization_config={"quant_method": "fp8"})(folder)
    with pytest.raises(InvalidInput, match=r"is quantized .* cannot be converted or merged"):
        to_folder(str(folder), tmp_path / "out", dtype=torch.float16)
