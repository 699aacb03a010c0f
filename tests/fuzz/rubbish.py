"""Rubbish in place of a file: what is not the file that a command expects, and the places at which commands read one.

A kind of rubbish is content or something that is no file at all. A place is a path and a command that reads it; the command has to
end with a sentence that names the path, neither with a traceback nor not at all.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from command_line import paceline
from registry_place import Workplace
from safetensors.torch import save_file
from trained_ledger import RUN_ID

from paceline.files.names import LEDGER_NAME


def _contents() -> Mapping[str, Callable[[bytes], bytes]]:
    bomb = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    return {
        "nothing": lambda valid: b"",
        "binary": lambda valid: random.Random(7).randbytes(5000),
        "truncated": lambda valid: valid[: len(valid) * 2 // 3],
        "not UTF-8": lambda valid: b'{"prompt": "\xc3\x28\xff"}\n',
        "zeros": lambda valid: bytes(5000),
        "deep YAML": lambda valid: b"? " * 3000,
        "deep JSON": lambda valid: b'{"a":' * 100_000,
        "aliases of aliases": lambda valid: bomb.encode(),
        "not a number": lambda valid: b"NaN\n",
        "another type": lambda valid: b'[null, 1, "x", true]\n',
        "types of values": lambda valid: json.dumps({key: [[]] for key in _keys(valid)}).encode(),
        "a huge number": lambda valid: b'{"name": ' + b"9" * 10_000 + b"}",
        "a huge exponent": lambda valid: b'{"trials": 1e999, "prompt": -1e999}',
    }


def _keys(valid: bytes) -> list[str]:
    """Return the keys of a file of YAML or JSON, so that all have a wrong value; those of a trace for another file."""
    try:
        tree: Any = yaml.safe_load(valid[:100_000])
    except (yaml.YAMLError, UnicodeDecodeError):
        tree = None
    return [str(key) for key in tree] if isinstance(tree, dict) else ["prompt", "completion", "model_type"]


def _folder(path: Path) -> None:
    path.mkdir()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


CONTENTS = _contents()
OBJECTS: Mapping[str, Callable[[Path], None]] = {
    "a folder": _folder,
    "a FIFO": _fifo,
    "a loop of links": _loop,
    "an endless device": _endless,
    "no permission": lambda path: path.touch(0o000),
}
KINDS = (*CONTENTS, *OBJECTS)


def put(kind: str, path: Path) -> None:
    """Replace the file at `path` by rubbish."""
    valid = path.read_bytes()
    path.unlink()
    if kind in CONTENTS:
        path.write_bytes(CONTENTS[kind](valid))
    else:
        OBJECTS[kind](path)


@dataclass(frozen=True)
class Place:
    """A file that a command reads."""

    file: str
    """Path below the folder of a workplace."""
    command: tuple[str, ...]
    named: str = ""
    """Words of which the message has one, divided by `|`; default the file's name."""
    taken: tuple[str, ...] = ()
    """Kinds that the command can take."""


SPEC = {
    "name": "sums",
    "policy": {"model_name": "./model", "max_total_sequence_length": 64, "generation": {"max_new_tokens": 8}},
    "data": {"train": "./rows.jsonl", "validation": "./rows.jsonl"},
    "rewards": [{"function": "exact_match"}],
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 3},
}
SWEEP = {"trials": 2, "search": {"policy.optimizer.lr": {"low": 1e-6, "high": 1e-4, "log": True}}}
ROWS = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n'
TRACES = "".join(
    json.dumps({"prompt": "1+1=", "completion": "2", "final_reward": reward}) + "\n" for reward in (1.0, 0.0)
)

EVAL = ("eval", "spec.yaml", "--model", "model", "--output", "out", "--device", "cpu")
GATE = ("gate", "first", "--baseline", "second")
REGISTER = ("models", "register", "sums", "model", "--signing-key", "signing.pem", "--evaluation", "first")
CAST = ("convert", "model", "cast", "--dtype", "float16")
MERGE = ("convert", "model", "merged", "--adapter", "adapter")
LEDGER = f"runs/{LEDGER_NAME}"
PLACES = {
    "spec of eval": Place("spec.yaml", EVAL, named="spec.yaml|policy"),
    "rows of eval": Place("rows.jsonl", EVAL, named="rows.jsonl|/dev/zero"),
    "config of eval": Place("model/config.json", EVAL, named="model"),
    "weights of eval": Place("model/model.safetensors", EVAL, named="model"),
    "tokenizer of eval": Place("model/tokenizer.json", EVAL, named="model"),
    "ledger of replay": Place(LEDGER, ("replay", RUN_ID)),
    "spec of sweep": Place("spec.yaml", ("sweep", "spec.yaml", "sweep.yaml"), named="spec.yaml|policy"),
    "sweep": Place("sweep.yaml", ("sweep", "spec.yaml", "sweep.yaml")),
    "result of gate": Place("first/result.json", GATE, named="first"),
    "samples of gate": Place("first/samples.jsonl", GATE),
    "baseline of gate": Place("second/result.json", GATE, named="second"),
    "file of gate": Place("first/result.json", ("gate", "first/result.json", "--baseline", "second")),
    "traces to convert": Place("spans.jsonl", ("traces", "convert", "spans.jsonl", "made.jsonl")),
    "traces for pairs": Place("traces.jsonl", ("traces", "pairs", "traces.jsonl", "made.jsonl")),
    "traces to compare": Place("traces.jsonl", ("traces", "compare", "traces.jsonl", "traces.jsonl")),
    "ledger of traces": Place(LEDGER, ("traces", "export", RUN_ID, "made.jsonl")),
    "ledger of models": Place(LEDGER, ("models", "list")),
    "key of models": Place("signing.pem", REGISTER),
    "evaluation of models": Place("first/result.json", REGISTER, named="first"),
    "verdict of models": Place("verdict.json", (*REGISTER, "--verdict", "verdict.json"), named="verdict"),
    "config of models": Place("model/config.json", REGISTER, named="model files|config.json"),
    "config of convert": Place("model/config.json", CAST, taken=("types of values", "a huge exponent")),
    "weights of convert": Place("model/model.safetensors", CAST, named="model"),
    "config of an adapter": Place("adapter/adapter_config.json", MERGE),
    "weights of an adapter": Place("adapter/adapter_model.safetensors", MERGE),
    "metadata of a checkpoint": Place("dcp/.metadata", ("convert", "dcp", "made"), named="dcp"),
}
CASES = [(name, kind) for name, place in PLACES.items() for kind in KINDS if kind not in place.taken]


def fill(place: Workplace) -> None:
    """Write the valid files of PLACES into a workplace."""
    folder = place.folder
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "traces.jsonl").write_text(TRACES)
    (folder / "spans.jsonl").write_text(TRACES)
    first, second = place.evaluated("first", [1.0] * 30), place.evaluated("second", [1.0] * 30)
    place.judged("verdict.json", first, second)
    layer, adapter = "base_model.model.model.layers.0.self_attn.q_proj", folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    parts = {f"{layer}.lora_A.weight": torch.zeros(2, 32), f"{layer}.lora_B.weight": torch.zeros(32, 2)}
    save_file(parts, adapter / "adapter_model.safetensors")
    made = paceline("convert", folder / "model", folder / "dcp", "--to", "dcp")
    assert made.exit_code == 0, made.output
