"""Scores a second of a reward model: one text after another, as a loop over `reward_model` would, and in passes of a budget.

    python benchmarks/reward_models.py [--hidden 128] [--layers 2] [--texts 512] [--tokens 12] [--budget 16384] [--device auto]

The model is a Qwen3 sequence classification with random weights and the demo's tokenizer of characters; the demo's texts have
12 tokens. Lengths are spread by a half to both sides. Both ways take turns, three each, and the best of each counts;
`processor_ratio` is that of the processor's seconds, which other work on the machine hardly changes. Printed too is the largest
difference between the two ways' scores. A pass has a fixed cost and one for its tokens, so the gain is largest for short texts,
small models and GPUs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.short_form import parse  # noqa: E402

TURNS = 3
LONGEST = 128


def make_model(folder: Path, hidden: int, layers: int) -> int:
    """Write the model and return its parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from paceline.services.demo.task import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=LONGEST,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model: Any = Qwen3ForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(folder: Path, texts: int, tokens: int, budget: int, device: str) -> dict[str, Any]:
    """Return the texts a second of both ways, and their ratio."""
    from paceline.reward.models.scorer import load_scorer
    from paceline.reward.models.settings import ModelSettings

    dice = random.Random(0)
    lengths = [dice.randint(tokens // 2, tokens + tokens // 2) for _ in range(texts)]
    completions = ["".join(dice.choices("0123456789", k=max(1, length - 5))) for length in lengths]
    scorer = load_scorer(ModelSettings(path=str(folder), device=device, max_batch_tokens=budget))
    encoded = [scorer.encode("1+1=", completion) for completion in completions]
    ways = {
        "one_by_one": lambda: [scorer.scores([text])[0] for text in encoded],
        "batched": lambda: scorer.scores(encoded),
    }
    best = {name: (float("inf"), float("inf")) for name in ways}
    found: dict[str, list[Any]] = {}
    for _ in range(TURNS):
        for name, way in ways.items():
            started_s, used_s = time.perf_counter(), time.process_time()
            found[name] = way()
            took = (time.perf_counter() - started_s, time.process_time() - used_s)
            best[name] = (min(best[name][0], took[0]), min(best[name][1], took[1]))
    alone, together = best["one_by_one"], best["batched"]
    return {
        "one_by_one_per_s": round(texts / alone[0], 1),
        "batched_per_s": round(texts / together[0], 1),
        "ratio": round(alone[0] / together[0], 2),
        "processor_ratio": round(alone[1] / together[1], 2),
        "largest_difference": max(abs(a[0] - b[0]) for a, b in zip(*found.values(), strict=True)),
    }


def main() -> None:
    """Make the model, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=12, help="mean length of the texts, 85 at most")
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parse(parser, texts=16, hidden=32, layers=1)
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(Path(folder), options.hidden, options.layers)
        result = measure(Path(folder), options.texts, options.tokens, options.budget, options.device)
    result = {"parameters": parameters, **result}
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:>20} {value}")


if __name__ == "__main__":
    main()
