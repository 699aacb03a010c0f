"""The memory plan against what a learner's rank takes, for models of several shapes.

    python benchmarks/memory_plan.py [--shape NAME ...] [--device cpu|cuda] [--json]

Each shape is trained for two steps of full micro-batches in a process of its own, with random weights. Measured is the
peak of RssAnon on CPUs (of torch's allocator on a GPU) from the start of the process; predicted is what `paceline plan`
says of a rank that publishes nothing. `within` is the largest difference of the two over all shapes, as a share of the
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

from short_form import parse

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
STEPS = 2
SEQUENCES = 4
"""Of a step, two in a micro-batch."""
QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "wide vocabulary": (
        {
            "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4_864, "num_hidden_layers": 6,
            "num_attention_heads": 14, "num_key_value_heads": 2,
        },
        {},
        512,
    ),
    "many layers": (
        {
            "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3_072, "num_hidden_layers": 24,
            "num_attention_heads": 12, "num_key_value_heads": 4,
        },
        {},
        512,
    ),
    "long rows": (
        {
            "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 2_048, "num_hidden_layers": 12,
            "num_attention_heads": 8, "num_key_value_heads": 2,
        },
        {},
        4_096,
    ),
    "long rows, selective": (
        {
            "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 2_048, "num_hidden_layers": 12,
            "num_attention_heads": 8, "num_key_value_heads": 2,
        },
        {"activation_checkpointing": "selective"},
        4_096,
    ),
    "long rows, recomputed": (
        {
            "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 2_048, "num_hidden_layers": 12,
            "num_attention_heads": 8, "num_key_value_heads": 2,
        },
        {"activation_checkpointing": "full"},
        8_192,
    ),
    "adapter": (
        {
            "vocab_size": 32_000, "hidden_size": 1_024, "intermediate_size": 4_096, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 4,
        },
        {"lora_cfg": {"enabled": True, "dim": 32}},
        1_024,
    ),
    "bfloat16 moments": (
        {
            "vocab_size": 64_000, "hidden_size": 1_024, "intermediate_size": 4_096, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 4,
        },
        {"optimizer": {"state_dtype": "bfloat16"}, "activation_checkpointing": "full"},
        1_024,
    ),
}  # fmt: skip
"""Sizes of the model, settings of the policy, and tokens of a micro-batch, by name."""
TINY: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "tiny": (
        {
            "vocab_size": 1_024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2,
        },
        {},
        64,
    ),
}  # fmt: skip
"""The shape of --short."""


class Peak:
    """Largest value of a gauge while the block runs, sampled every 5 ms."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.005):
            self.bytes = max(self.bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    """Return RssAnon of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])


def spec_tree(model: str, policy: dict[str, Any], tokens: int, device: str) -> dict[str, Any]:
    """Return the spec of one shape: supervised, two sequences in a micro-batch."""
    return {
        "algorithm": "sft",
        "policy": {
            "model_name": model,
            "max_total_sequence_length": tokens // 2,
            "train_mb_tokens": tokens,
            **policy,
        },
        "data": {"train": "none.jsonl"},
        "sft": {"max_num_steps": STEPS, "num_examples_per_step": SEQUENCES},
        "cluster": {"device": "cpu"} if device == "cpu" else {"learner_gpus": [0]},
    }


def measure(folder: Path, policy: dict[str, Any], tokens: int, device_name: str) -> dict[str, int]:
    """Train in this process; return the predicted and the measured bytes."""
    from paceline.host.onednn import bound_caches
    from paceline.host.resources import return_large_tensors

    bound_caches()
    return_large_tensors()
    with Peak() as peak:
        import numpy as np
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

        from paceline.learner.batch.samples import TrainingSample
        from paceline.learner.step.trainer import Trainer
        from paceline.models.memory_estimate import estimate
        from paceline.models.shape import read_shape
        from paceline.spec.reading import parse_spec

        spec = parse_spec(spec_tree(str(folder), policy, tokens, device_name))
        shape = read_shape(str(folder))
        assert shape is not None
        needed = estimate(spec, shape)
        device = torch.device(device_name)
        trainer = Trainer(spec, device)
        dice = np.random.default_rng(0)
        length = tokens // 4
        for step in range(STEPS):
            ids = [dice.integers(0, shape.vocabulary, 2 * length + 1, dtype=np.int32) for _ in range(SEQUENCES)]
            batch = [
                TrainingSample(number, prompt_ids=row[: length + 1], completion_ids=row[length + 1 :])
                for number, row in enumerate(ids)
            ]
            trainer.train_step(batch, step)
    predicted = needed.learner_bytes - needed.learner.get("published", 0)
    measured = peak.bytes
    if device.type == "cuda":
        predicted, measured = predicted - needed.learner["process"], torch.cuda.max_memory_allocated()
    return {"predicted": predicted, "measured": measured, "activations": needed.activations}


def main() -> None:
    """Measure every shape in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("SHAPE", "FOLDER"), help=argparse.SUPPRESS)
    options = parse(parser, shape=list(TINY))
    sys.path.insert(0, str(ROOT))
    if options.one:
        name, folder = options.one
        _, policy, tokens = (SHAPES | TINY)[name]
        print(json.dumps(measure(Path(folder), policy, tokens, options.device)))
        return
    rows = []
    for name in options.shape or SHAPES:
        with tempfile.TemporaryDirectory(prefix="memory-plan-") as folder:
            make_model(Path(folder), (SHAPES | TINY)[name][0])
            started_s = time.monotonic()
            command = [sys.executable, __file__, "--device", options.device, "--one", name, folder]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        row = {"shape": name, **json.loads(done.stdout.splitlines()[-1])}
        row["ratio"] = round(row["predicted"] / row["measured"], 3)
        rows.append(row)
        if not options.json:
            print(
                f"{name:24} predicted {row['predicted'] / 1e9:6.2f} GB  measured {row['measured'] / 1e9:6.2f} GB  "
                f"ratio {row['ratio']:.3f}  {time.monotonic() - started_s:.0f} s",
                flush=True,
            )
    within = max(abs(row["ratio"] - 1) for row in rows)
    print(json.dumps({"shapes": rows, "within": within}) if options.json else f"within {within:.1%}")


def make_model(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a model of random weights, in a process of its own so that its memory goes."""
    code = (
        "import sys, json, torch\n"
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "torch.manual_seed(0)\n"
        "config = Qwen2Config(**json.loads(sys.argv[2]), dtype='bfloat16', max_position_embeddings=16384)\n"
        "Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])\n"
    )
    sizes = {**sizes, "tie_word_embeddings": True}
    subprocess.run([sys.executable, "-c", code, str(folder), json.dumps(sizes)], check=True)


if __name__ == "__main__":
    main()
