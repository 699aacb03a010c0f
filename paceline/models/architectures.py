"""Decides from a model's config whether its architecture can be trained. Promise: an architecture that would compute
wrong numbers without an error is refused by name, when a run is submitted or its model is loaded. The check reads
config.json alone, without transformers or weights; docs/use/models.md lists the architectures that work."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import InvalidInput
from paceline.host.regular_file import open_regular, read_named
from paceline.models.weight_files import MAX_HEADER_BYTES
from paceline.spec import RewardFunctionSection, RunSpec

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers that learner and engines support."""

MIXERS = {
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
}
"""By model type: the class in transformers of the layers that carry a state from token to token."""

COUNTING_ATTENTION = {"llama4_text": "Llama4TextAttention"}
"""By model type: the class in transformers of an attention that counts a row's tokens itself, to scale by position."""

STATEFUL_TYPES = frozenset({"minimax", "rwkv", "xlstm", "zamba", "zamba2", "zaya"})
"""Unsupported model types with layers that carry a state from token to token."""

BIASED_TYPES = frozenset({"bloom", "mpt"})
"""Model types whose attention adds a bias by distance (ALiBi)."""

TOKENIZERS = ("tokenizer*", "*.model", "vocab*", "tekken.json", "*.tiktoken")
"""Patterns of the files of tokenizers; every tokenizer has a file that matches one."""

MODALITIES = ("vision_config", "audio_config", "speech_config")
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Kinds of rotary embedding whose frequencies depend on the longest sequence of a forward pass."""


def check_architecture(config: Mapping[str, Any], field_and_name: str) -> None:
    """Raise InvalidInput, with the reason, for an architecture that the learner cannot train. `config` is the content
    of config.json or a config's `to_dict()`; `field_and_name` begins the message."""
    reason = _refusal(config)
    if reason:
        kind = config.get("model_type")
        raise InvalidInput(
            f"{field_and_name}: models of type {kind!r} are not supported: {reason}; see docs/use/models.md"
        )


def check_positions(config: Mapping[str, Any], field_and_name: str, longest_tokens: int) -> None:
    """Raise InvalidInput if a sequence of `longest_tokens` would change the positions of other sequences in its packed
    row."""
    text = _text(config)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    settings = rope if isinstance(rope, Mapping) else {}
    kind = settings.get("rope_type") or settings.get("type")
    trained = settings.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    trained = trained or text.get("max_position_embeddings")
    if kind in LENGTH_DEPENDENT and isinstance(trained, int) and longest_tokens > trained:
        raise InvalidInput(
            f"{field_and_name}: its rotary embedding of type {kind!r} changes if a sequence has over {trained} tokens. "
            "In the learner the change would also affect other sequences of the packed row, in the sampler it would "
            f"not; lower policy.max_total_sequence_length {longest_tokens} to at most {trained}"
        )


def _refusal(config: Mapping[str, Any]) -> str:
    """Return why the architecture is not supported; empty if it is."""
    text = _text(config)
    types = {config.get("model_type"), text.get("model_type")}
    towers = [name for name in MODALITIES if config.get(name)]
    kinds = text.get("layer_types")
    foreign = sorted({str(kind) for kind in kinds} - ATTENTION_KINDS) if isinstance(kinds, list | tuple) else []
    if towers:
        return f"they have a tower for another modality ({towers[0]})"
    if config.get("is_encoder_decoder"):
        return "they have an encoder"
    if text.get("index_topk"):
        return "their sparse attention (DSA, index_topk) chooses the keys of each token"
    if (foreign and not types & set(MIXERS)) or types & STATEFUL_TYPES:
        named = f" ({', '.join(foreign)})" if foreign else ""
        return f"the learner does not support their layers other than full, sliding or chunked attention{named}"
    if types & BIASED_TYPES or text.get("alibi"):
        return "the attention adds a bias by distance (ALiBi)"
    return ""


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _check_folder(path: Path, config: Any, what: str, *, may_be_empty: bool) -> None:
    """Raise InvalidInput for a path on this machine whose weights cannot be used: a file, an empty folder, GGUF,
    pickles, an adapter alone, a quantised model, a file that was cut off. Workers judge a folder without weights,
    which may be a tokenizer's."""
    if path.is_file():
        raise InvalidInput(f"{what} is a file; name the model's folder, with config.json and *.safetensors")
    if not path.is_dir():
        return
    remedy = "name a folder with config.json and *.safetensors, as `save_pretrained` writes it"
    if next(path.iterdir(), None) is None:
        if may_be_empty:
            return
        raise InvalidInput(f"{what} is an empty folder; {remedy}")
    has_weights = next(path.glob("*.safetensors"), None) is not None
    for pattern, kind in (("*.gguf", "GGUF, which"), ("pytorch_model*.bin", "pickled files, which")):
        if not has_weights and next(path.glob(pattern), None):
            raise InvalidInput(f"{what} has its weights as {kind} no worker loads; {remedy}")
    if config is None and (path / "adapter_config.json").is_file():
        raise InvalidInput(f"{what} has a LoRA adapter without its model; merge the adapter, and {remedy}")
    quantised = config.get("quantization_config") if isinstance(config, dict) else None
    if isinstance(quantised, dict):
        method = quantised.get("quant_method", "an unnamed method")
        raise InvalidInput(
            f"{what} is quantised ({method!s:.40}) and cannot be trained; name the original model, in 16 or 32 bits"
        )
    _check_sizes(path, what)


def check_local_models(spec: RunSpec) -> None:
    """Check the models of a spec in folders of this machine as far as their files tell: those that train, the policy's
    tokenizer, the teacher and reward models. Any other name passes. Raises InvalidInput."""
    trained = {"policy.model_name": spec.policy.model_name, "value.model_name": spec.value.model_name}
    scoring = {"distillation.teacher_model_name": spec.distillation.teacher_model_name}
    for index, reward in enumerate(spec.rewards):
        argument = RewardFunctionSection.PATH_ARGUMENTS.get(reward.function, "")
        if "endpoint" not in reward.kwargs:  # which has the weights
            scoring[f"rewards.{index}.kwargs.{argument}"] = reward.kwargs.get(argument)
    for field, name in (trained | scoring).items():
        path = Path(name).expanduser() if isinstance(name, str) else None
        if path is None or not os.access(path, os.R_OK):  # not here, or not for this user: the workers judge it
            continue
        config = None
        with contextlib.suppress(OSError, ValueError, RecursionError):
            config = json.loads(read_named(path / "config.json"))
        # Exports may still come into the folder of a reward model.
        may_be_empty = field.startswith("rewards.")
        _check_folder(path, config if field in trained else {}, f"{field} {name!r}", may_be_empty=may_be_empty)
        if field in trained and isinstance(config, dict):
            check_architecture(config, f"{field} {name!r}")
    if spec.policy.tokenizer_name is None:
        _check_tokenizer(Path(spec.policy.model_name).expanduser(), f"policy.model_name {spec.policy.model_name!r}")


def _check_tokenizer(folder: Path, what: str) -> None:
    if next(folder.glob("*.safetensors"), None) and not any(next(folder.glob(name), None) for name in TOKENIZERS):
        raise InvalidInput(
            f"{what} has weights but no tokenizer; copy the model's tokenizer.json and tokenizer_config.json there, or name a "
            "folder that has them in policy.tokenizer_name"
        )


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder from which the model is loaded: a single file, or the files that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    try:
        names = json.loads(read_named(index))["weight_map"].values()
        return sorted({folder / name for name in names if os.path.basename(name) == name})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # the workers report it
        return []


def _check_sizes(folder: Path, what: str) -> None:
    """Raise InvalidInput for a safetensors file that is shorter than its header says, as after an interrupted copy."""
    for path in _weight_files(folder):
        try:
            with open_regular(path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                header_bytes = int.from_bytes(file.read(8), "little")
                header = file.read(header_bytes) if header_bytes < min(size_bytes, MAX_HEADER_BYTES) else b""
        except OSError:  # the workers report it
            continue
        try:
            entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
            needed_bytes = 8 + header_bytes + max((int(entry["data_offsets"][1]) for entry in entries), default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise InvalidInput(f"{what}: {path} is damaged: its header cannot be read; copy it again") from None
        if size_bytes < needed_bytes:
            raise InvalidInput(
                f"{what}: {path} is damaged: it has {size_bytes:,} bytes, but {needed_bytes:,} by its header; copy it again"
            )
