"""Copies, byte for byte, the files of a model folder that are not weights; compares the copied tokenizer with the
source.

Promise: the tokenizer of a written folder encodes and decodes text as its source does; otherwise an error is raised.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from paceline.errors import InvalidInput
from paceline.files.model_source import WEIGHT_SUFFIXES, model_source, tokenizer_source
from paceline.files.names import (
    CARD,
    CHECKPOINT_MANIFEST,
    EVALUATIONS,
    EXPORT_MANIFEST,
    SIGNATURE,
    SPEC,
    STATEMENT,
    VERDICTS,
)
from paceline.learner.checkpoints.metadata import METADATA

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
ABOUT_WEIGHTS = frozenset(
    {CHECKPOINT_MANIFEST, EXPORT_MANIFEST, METADATA, EVALUATIONS, SPEC, VERDICTS, SIGNATURE, STATEMENT}
)
"""Files and folders that describe the source's weights and would be false beside other weights."""
OF_TOKENIZERS = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.tiktoken"),
    *("chat_template*", "additional_chat_templates", "*.model", "tekken.json"),
)
PROBES = (
    *("Hello, world!", "  two spaces,\n\n\ta tab ", "naïve 12345 × 67 日本語 🙂"),
    *("def f(x):\n    return x[0]", "a"),
)


def copy_other_files(source: Path, folder: Path, left_out: Collection[str] = ()) -> None:
    """Copy the files of a model folder, and a tokenizer's subfolder, but not weights, `left_out` or other folders."""
    for path in sorted(source.iterdir()):
        if path.name in ABOUT_WEIGHTS or path.name in left_out or path.name.startswith("."):
            continue
        if path.is_dir() and _is_of_tokenizer(path):
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        elif path.is_file() and not _is_weights(path):
            shutil.copyfile(path, folder / path.name)


def _is_weights(path: Path) -> bool:
    return path.suffix in {*WEIGHT_SUFFIXES, ".distcp"} or path.name.endswith(".index.json")


def copy_files_of_policy(model_name: str, tokenizer_name: str | None, folder: Path) -> None:
    """Copy the files of model and tokenizer to an export. Raises InvalidInput if the export's tokenizer differs."""
    model = _local_files(model_name, model_source(model_name), CONFIG)
    generates = (folder / GENERATION_CONFIG).exists()
    left_out = {CONFIG, CARD} | (set() if generates else {GENERATION_CONFIG})
    if tokenizer_name is None:
        copy_other_files(model, folder, left_out)
    else:
        of_tokenizer = {path.name for path in model.iterdir() if _is_of_tokenizer(path)}
        copy_other_files(model, folder, left_out | of_tokenizer)
        other = _local_files(tokenizer_name, tokenizer_source(tokenizer_name), "tokenizer_config.json")
        if not any(map(_is_of_tokenizer, other.iterdir())):
            raise InvalidInput(
                f"policy.tokenizer_name {tokenizer_name!r}: the folder has no tokenizer files; name a folder with them"
            )
        copy_other_files(other, folder, {CONFIG, CARD, GENERATION_CONFIG})
    tokenizer = check_tokenizer(tokenizer_name or model_name, folder)
    if generates and tokenizer is not None:
        _add_ends(folder, tokenizer.eos_token_id)


def _add_ends(folder: Path, end: int | None) -> None:
    """Add to the generation config the missing end tokens of config and tokenizer, because in a run a completion ends
    at any of them (`weights/model_layout.py:end_token_ids`)."""
    path = folder / GENERATION_CONFIG
    content, config = json.loads(path.read_bytes()), json.loads((folder / CONFIG).read_bytes())
    listed, others = _ids(content.get("eos_token_id")), [*_ids(config.get("eos_token_id")), *_ids(end)]
    if not set(others) <= set(listed):
        content["eos_token_id"] = list(dict.fromkeys([*listed, *others]))
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _ids(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_of_tokenizer(path: Path) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in OF_TOKENIZERS)


def _local_files(name: str, source: str, file: str) -> Path:
    """Return the folder with a model's files. For a model on the hub it is in the cache, where files may be missing."""
    if Path(source).is_dir():
        return Path(source)
    from transformers import AutoTokenizer
    from transformers.utils.hub import cached_file

    AutoTokenizer.from_pretrained(name)  # brings the tokenizer's files into the cache
    path = cached_file(name, file)
    assert path is not None
    return Path(path).parent


def check_tokenizer(source: str, folder: Path) -> Any:
    """Return the tokenizer of `folder`; None if `source` has none. Raises InvalidInput if the two tokenizers differ."""
    from transformers import AutoTokenizer

    try:
        expected = AutoTokenizer.from_pretrained(tokenizer_source(source))
    except Exception:  # a model without a tokenizer is complete; errors of tokenizers have no common base
        return None
    loaded = AutoTokenizer.from_pretrained(folder)
    for name, fact in FACTS.items():
        if fact(expected) != fact(loaded):
            raise InvalidInput(
                f"the tokenizer of {source!r} has different {name} when it loads beside this model's config.json: "
                f"{str(fact(expected))[:200]} become {str(fact(loaded))[:200]}; name its class in its tokenizer_config.json "
                "(tokenizer_class), or save it again with transformers' save_pretrained"
            )
    return loaded


FACTS: dict[str, Callable[[Any], Any]] = {
    "numbers of tokens": lambda tokenizer: sorted(tokenizer.get_vocab().items()),
    "special tokens": lambda tokenizer: (tokenizer.special_tokens_map, sorted(tokenizer.all_special_ids)),
    "ids of texts": lambda tokenizer: [
        tokenizer(text)["input_ids"] for text in (*PROBES, "".join(map(str, tokenizer.all_special_tokens)))
    ],
    "chat templates": lambda tokenizer: tokenizer.chat_template,
}
"""Functions whose results must be equal for a source's tokenizer and its copy."""
