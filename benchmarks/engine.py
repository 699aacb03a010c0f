"""Tokens per second and pauses for new weights of the engines, against `model.generate`.

    python benchmarks/engine.py [--engines native|native,vllm] [--size demo|bench|both] [--rounds 3] [--json]

All sides run in turns, on the same random Qwen3 weights and the same prompts (groups of eight samples of one prompt), on
one thread; vLLM's worker is a process of its own (`make test-vllm` makes an environment that has it). `fixed` lets every
sequence run to the full length; `mixed` draws each length from 1 to the full one: there `model.generate` has to decode
until its longest row ends, and only wanted tokens count. `pause idle` is an update of the weights with nothing running,
`pause` one with all sequences in flight, whose keys and values are computed anew. GPUs, with
models of real shapes: benchmarks/gpu.py.

Recorded results: docs/operate/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from short_form import parse
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from paceline.groups import Version
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams
from paceline.rollout.engines import create_engine
from paceline.spec import RunSpec

SAMPLES_PER_PROMPT = 8


@dataclass(frozen=True)
class Size:
    """A model and a load."""

    hidden: int
    layers: int
    sequences: int
    prompt_tokens: int
    new_tokens: int


SIZES = {"demo": Size(128, 2, 64, 6, 6), "bench": Size(256, 4, 256, 16, 128)}


def make_model(size: Size) -> Any:
    """Random weights; three hidden sizes of MLP, heads of a quarter of the hidden size, 32 tokens of vocabulary."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=size.hidden // 4,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


async def make_engine(backend: str, size: Size, model: Any) -> Engine:
    """An engine for the model's structure, with its weights."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        generation = {
            "backend": backend,
            "max_new_tokens": size.new_tokens,
            "max_batch_size": size.sequences,
        }
        policy = {"model_name": folder, "max_total_sequence_length": 512, "generation": generation}
        spec = {"policy": policy, "data": {"train": "none"}, "rewards": [{"function": "none"}]}
        engine = create_engine(RunSpec.model_validate(spec))
        await engine.update_weights(Version(1, 0), model.state_dict())
        return engine


async def time_engine(engine: Engine, prompts: np.ndarray, lengths: list[int], round_: int) -> float:
    """Seconds for all sequences."""
    requests = make_requests(prompts, lengths, round_)
    start = time.perf_counter()
    completions = await asyncio.gather(*map(engine.generate, requests))
    elapsed_s = time.perf_counter() - start
    assert [len(completion.token_ids) for completion in completions] == lengths
    return elapsed_s


def make_requests(prompts: np.ndarray, lengths: list[int], round_: int) -> list[GenerationRequest]:
    """A request for each prompt; names and seeds differ from round to round."""
    return [
        GenerationRequest(f"{round_}-{i}", prompt, SamplingParams(length), seed=round_ * 10_000 + i)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


async def time_pauses(engine: Engine, model: Any, prompts: np.ndarray, num_tokens: int) -> tuple[float, float]:
    """Median seconds without a token of three updates: with nothing running, and with everything in flight."""
    versions = itertools.count(1)
    weights = model.state_dict()
    idle_s, busy_s = [], []
    for round_ in range(3):
        idle_s.append(await engine.update_weights(Version(1, next(versions)), weights))
        requests = make_requests(prompts, [num_tokens] * len(prompts), 1_000 + round_)
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        while not engine.num_running:  # noqa: ASYNC110 - the engine's counters have no event to wait for
            await asyncio.sleep(0.001)
        busy_s.append(await engine.update_weights(Version(1, next(versions)), weights))
        await asyncio.gather(*tasks)
    return statistics.median(idle_s), statistics.median(busy_s)


def time_generate(model: Any, prompts: np.ndarray, num_tokens: int) -> float:
    """Seconds of one `model.generate` call over the same prompts, to the longest length."""
    ids = torch.from_numpy(prompts.astype(np.int64))
    start = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=num_tokens,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    elapsed_s = time.perf_counter() - start
    assert output.sequences.shape[1] == prompts.shape[1] + num_tokens
    return elapsed_s


async def measure(name: str, engines: list[str], rounds: int) -> list[dict[str, Any]]:
    """One row of results for each engine and for `fixed` and `mixed` lengths; medians over `rounds` after one to warm up."""
    size = SIZES[name]
    model = make_model(size)
    running = {backend: await make_engine(backend, size, model) for backend in engines}
    random = np.random.default_rng(0)
    num_prompts = size.sequences // SAMPLES_PER_PROMPT
    prompts = random.integers(0, 32, (num_prompts, size.prompt_tokens)).astype(np.int32)
    prompts = prompts.repeat(SAMPLES_PER_PROMPT, 0)
    results = []
    for lengths_name, lengths in (
        ("fixed", [size.new_tokens] * size.sequences),
        ("mixed", random.integers(1, size.new_tokens + 1, size.sequences).tolist()),
    ):
        engine_s: dict[str, list[float]] = {backend: [] for backend in engines}
        generate_s = []
        for round_ in range(rounds + 1):
            for backend, engine in running.items():
                engine_s[backend].append(await time_engine(engine, prompts, lengths, round_))
            generate_s.append(time_generate(model, prompts, max(lengths)))
        generate = sum(lengths) / statistics.median(generate_s[1:])
        for backend, engine in running.items():
            idle_s, busy_s = await time_pauses(engine, model, prompts, size.new_tokens)
            tokens_per_s = sum(lengths) / statistics.median(engine_s[backend][1:])
            results.append(
                {
                    "size": name,
                    **asdict(size),
                    "lengths": lengths_name,
                    "engine": backend,
                    "tokens_per_s": round(tokens_per_s),
                    "generate_tokens_per_s": round(generate),
                    "ratio": round(tokens_per_s / generate, 2),
                    "idle_pause_ms": round(1e3 * idle_s, 2),
                    "pause_ms": round(1e3 * busy_s, 2),
                }
            )
    for engine in running.values():
        await engine.close()
    return results


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES, "both"], default="both")
    parser.add_argument("--engines", default="native", help="native, vllm, or both with a comma")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parse(parser, size="demo", rounds=1)
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    names = list(SIZES) if options.size == "both" else [options.size]
    engines = options.engines.split(",")
    rows = [row for name in names for row in asyncio.run(measure(name, engines, options.rounds))]
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "torch": torch.__version__,
    }
    if options.json:
        json.dump({"machine": machine, "results": rows}, sys.stdout, indent=2)
        print()
        return
    print(machine)
    for row in rows:
        print(
            f"{row['size']:6} {row['lengths']:6} {row['engine']:6} {row['tokens_per_s']:>7} tokens/s   "
            f"model.generate {row['generate_tokens_per_s']:>7} tokens/s   ratio {row['ratio']:5}   "
            f"pause idle {row['idle_pause_ms']:7} ms, in flight {row['pause_ms']:7} ms"
        )


if __name__ == "__main__":
    main()
