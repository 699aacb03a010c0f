"""DPO, a reward model and offline GRPO on recorded GSM8K solutions: do held-out right solutions win over wrong ones?

    python benchmarks/gsm8k_preferences.py --data example_model_solutions.jsonl [--folds 2] [--steps 60] [--json]

`example_model_solutions.jsonl` is published with GSM8K (github.com/openai/grade-school-math): four models' solutions of
1,319 questions, marked right or wrong; 731 questions have both. Everything is made on the spot and small: a byte-level
BPE tokenizer and a two-layer Qwen3, both trained on the training questions alone.

Questions are split by a hash into folds; each fold is held out once, so every question is judged by a model that never
saw it. Training pairs are all right solutions of a question with all its wrong ones; a held-out question is one pair,
drawn by its hash, so that the n judgements are independent and the 95 % interval is Wilson's. Offline GRPO trains on all
solutions of a question as traces, with 1 and 0 as rewards and the starting policy as behaviour policy. The trainer, the
batch source and the losses are the services' own, in one process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from paceline.data.tokens import load_tokenizer
from paceline.learner.checkpoints.export import export_pretrained
from paceline.learner.objectives.examples import ExampleSource
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.gather import gather_weights
from paceline.spec import RunSpec

CPU = torch.device("cpu")
MAX_TOKENS = 1024
MAX_CHARACTERS = 800
"""Solutions are cut there: a few models went on for thousands."""
ALGORITHMS = ("dpo", "rm", "offline_grpo")
END, PAD = "<|end|>", "<|pad|>"


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Questions with at least one right and one wrong solution."""
    questions = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        solutions = [value for value in row.values() if isinstance(value, dict)]
        right = sorted({s["solution"][:MAX_CHARACTERS] for s in solutions if s["is_correct"]})
        wrong = sorted({s["solution"][:MAX_CHARACTERS] for s in solutions if not s["is_correct"]} - set(right))
        if right and wrong:
            questions.append({"prompt": row["question"] + "\n", "right": right, "wrong": wrong})
    return questions


def number_of(text: str) -> int:
    """A number that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def write_fold(questions: list[dict[str, Any]], fold: int, folds: int, folder: Path) -> None:
    """train.jsonl, validation.jsonl (one pair a question) and right.jsonl (what the first stage imitates); the same rows as
    traces, with rewards."""
    folder.mkdir(parents=True)
    with (
        (folder / "train.jsonl").open("w") as train,
        (folder / "validation.jsonl").open("w") as validation,
        (folder / "right.jsonl").open("w") as imitated,
        (folder / "traces.jsonl").open("w") as traces,
        (folder / "validation_traces.jsonl").open("w") as validation_traces,
    ):

        def trace(file: TextIO, prompt: str, solution: str, reward: float) -> None:
            row = {"prompt": prompt, "completion": solution, "final_reward": reward}
            file.write(json.dumps(row) + "\n")

        for question in questions:
            prompt, right, wrong = question["prompt"], question["right"], question["wrong"]
            number = number_of(prompt)
            if number % folds == fold:
                chosen = right[number // folds % len(right)]
                rejected = wrong[number // (folds * len(right)) % len(wrong)]
                validation.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")
                trace(validation_traces, prompt, chosen, 1.0)
                trace(validation_traces, prompt, rejected, 0.0)
                continue
            for solutions, reward in ((right, 1.0), (wrong, 0.0)):
                for solution in solutions:
                    trace(traces, prompt, solution, reward)
            for solution in right:
                pair = {"prompt": prompt, "chosen": solution, "rejected": wrong}
                train.write(json.dumps(pair) + "\n")
                imitated.write(json.dumps({"prompt": prompt, "completion": solution}) + "\n")


def make_model(folder: Path, texts: list[str], options: argparse.Namespace) -> Path:
    """A tokenizer made from `texts` and a model with random weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END, PAD],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=options.hidden // 4,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_spec(algorithm: str, model: Path, data: Path, steps: int, lr: float, **section: Any) -> RunSpec:
    """A spec as a file would have it."""
    files = {"sft": ("right", "validation"), "offline_grpo": ("traces", "validation_traces")}
    train, validation = (data / f"{name}.jsonl" for name in files.get(algorithm, ("train", "validation")))
    return RunSpec.model_validate(
        {
            "name": algorithm,
            "algorithm": algorithm,
            "policy": {
                "model_name": str(model),
                "max_total_sequence_length": MAX_TOKENS,
                "train_mb_tokens": 4096,
                "optimizer": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
                "scheduler": {"name": "linear", "warmup_steps": min(10, steps), "min_lr_ratio": 0.1},
            },
            "data": {"train": str(train), "validation": str(validation)},
            algorithm: {
                "max_num_steps": steps,
                "num_examples_per_step": 16,
                "max_val_samples": 100_000,
                **section,
            },
        }
    )


def train(spec: RunSpec) -> Trainer:
    """Trains a spec to its end."""
    torch.manual_seed(spec.seed)
    trainer = Trainer(spec, CPU)
    source = ExampleSource(spec, load_tokenizer(spec.policy), trainer.objective)
    trainer.reference.prepare(source, 0)
    for step in range(spec.max_num_steps):
        trainer.train_step(source.of_step(step, 0, 1), step)
    return trainer


def measure(trainer: Trainer) -> dict[str, float]:
    """Metrics on the held-out pairs."""
    tokenizer = load_tokenizer(trainer.spec.policy)
    held_out = ExampleSource(trainer.spec, tokenizer, trainer.objective, validation=True)
    trainer.reference.prepare(held_out, 0)
    return {"n": float(len(held_out)), **trainer.evaluate(held_out.held_out(0, 1))}


def wilson(right: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a proportion (Wilson 1927)."""
    p, zz = right / n, z * z / n
    centre, half = p + zz / 2, z * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return (centre - half) / (1 + zz), (centre + half) / (1 + zz)


def run_fold(questions: list[dict[str, Any]], fold: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Imitates the right solutions of the training questions, then trains each algorithm from there."""
    write_fold(questions, fold, options.folds, folder / "data")
    rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    texts = [row["prompt"] + text for row in rows for text in (row["chosen"], *row["rejected"])]
    model = make_model(folder / "model", texts, options)
    start = model
    if options.sft_steps:
        taught = train(make_spec("sft", model, folder / "data", options.sft_steps, 3e-3))
        start = export_pretrained(
            folder / "taught",
            gather_weights(taught.model, None),
            model_name=str(model),
            tokenizer_name=str(model),
        )
    results = {}
    for algorithm, lr, section in (
        ("dpo", options.dpo_lr, {"reference_policy_kl_penalty": 0.1}),
        ("rm", options.rm_lr, {}),
        ("offline_grpo", options.offline_lr, {}),
    ):
        if algorithm not in options.algorithms:
            continue
        spec = make_spec(algorithm, start, folder / "data", options.steps, lr, **section)
        torch.manual_seed(spec.seed)
        before = measure(Trainer(spec, CPU))
        results[algorithm] = {"before": before, "after": measure(train(spec))}
    return results


def main() -> None:
    from short_form import parse  # the folder of a script is on the path

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="example_model_solutions.jsonl")
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--only-folds", type=int, help="stop after this many folds")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--questions", type=int, help="use the first this many questions")
    parser.add_argument("--steps", type=int, default=60, help="of each algorithm")
    parser.add_argument("--sft-steps", type=int, default=0, help="0: from random weights")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--dpo-lr", type=float, default=1e-3)
    parser.add_argument("--rm-lr", type=float, default=4e-3)
    parser.add_argument("--offline-lr", type=float, default=1e-3)
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    options = parse(parser, folds=2, only_folds=1, questions=24, steps=2, hidden=16, vocabulary=300)
    if options.data is None:
        if options.short:
            print("skipped: the recorded solutions are not in this repository; --data FILE names them", file=sys.stderr)
            return
        parser.error("--data is missing: the file of recorded solutions")
    torch.set_num_threads(1)
    started_s = time.monotonic()
    questions = read_questions(options.data)[: options.questions]
    totals: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for fold in range(options.only_folds or options.folds):
            results = run_fold(questions, fold, Path(name) / str(fold), options)
            for algorithm, result in results.items():
                total = totals.setdefault(algorithm, {"n": 0.0, "before": 0.0, "after": 0.0})
                total["n"] += result["after"]["n"]
                for when in ("before", "after"):
                    total[when] += result[when]["accuracy"] * result[when]["n"]
                    total[f"margin_{when}"] = total.get(f"margin_{when}", 0.0) + (
                        result[when].get("margin", math.nan) * result[when]["n"]
                    )
            if not options.json:
                shown = {name: f"{r['after']['accuracy']:.3f}" for name, r in results.items()}
                print(f"fold {fold}: {shown}  {time.monotonic() - started_s:.0f} s", flush=True)
    table = {}
    for algorithm, total in totals.items():
        n = int(total["n"])
        low, high = wilson(total["after"], n)
        table[algorithm] = {
            "n": n,
            "accuracy_before": total["before"] / n,
            "accuracy_after": total["after"] / n,
            "interval_95": [low, high],
            **(
                {}
                if math.isnan(total["margin_after"])
                else {f"margin_{when}": total[f"margin_{when}"] / n for when in ("before", "after")}
            ),
        }
    result = {"questions": len(questions), **table, "seconds": round(time.monotonic() - started_s, 1)}
    print(json.dumps(result, indent=None if options.json else 2))
    sys.exit(int(not options.short and any(row["accuracy_after"] <= row["accuracy_before"] for row in table.values())))


if __name__ == "__main__":
    main()
