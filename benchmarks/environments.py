"""Generation of episodes by real services: tokens per second with slow tools against none, and turns per second.

    python benchmarks/environments.py [--engine native|vllm] [--seconds 90] [--tool-s 5] [--json]

Coordinator, one rollout worker and one environment worker of this project on loopback, with a model of random weights; the
learner only publishes its first version, because no reward worker is there and so no batch comes to be. Every turn goes the
whole way: over gRPC to the engine, over ZeroMQ to the ledger, synced, and to a user's class in a process of its own.

`tokens_ratio_with_slow_tools`: tokens per second by the run's books, which count a turn when it is journaled, while each
turn's tool takes `--tool-s` seconds on average (exponentially distributed), by those of the same episodes with tools that
answer at once. Four batches of episodes are in flight, of which one fills the engine. Both arms run one after the other on the
same services, each from its own run; only the `--seconds` after a warm-up count.

`turns_per_s`: journaled turns of one token each per second, of a model whose time does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from short_form import parse
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paceline.client import Client
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.spec.reading import parse_spec

BATCH_GROUPS, GROUP_SIZE, BATCHES = 4, 4, 4
IN_FLIGHT = BATCH_GROUPS * GROUP_SIZE * BATCHES
TURNS = 4
"""Turns of an episode with slow tools."""

ONE_TOKEN_TURNS = 10
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CODE = """
import asyncio
import random

class Slow:
    def reset(self, tool_s, turns, row, **_):
        self.dice, self.tool_s, self.left = random.Random(row), tool_s, turns

    async def step(self, text):
        self.left -= 1
        if self.tool_s:
            await asyncio.sleep(self.dice.expovariate(1 / self.tool_s))
        return "go on", None, self.left == 0

    def get_reward(self):
        return 0.0
"""


def write_model(folder: Path, hidden: int, layers: int) -> Path:
    """Write a Qwen3 over bytes with random weights and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast), hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, head_dim=64,
        max_position_embeddings=4096, eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id,
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_spec(
    folder: Path, model: Path, engine: str, *, tokens: int, turns: int, tool_s: float, batches: int
) -> RunSpec:
    """Return a run of which so many batches may be open at a time; every turn has `tokens` tokens."""
    name = f"{turns}-{tool_s:g}"
    rows = [
        {"prompt": [{"role": "user", "content": f"task {n}"}], "row": n, "turns": turns, "tool_s": tool_s}
        for n in range(1000)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "slow.py").write_text(CODE)
    generation: dict[str, Any] = {
        "backend": engine,
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "allow_biased_sampling": True,
        "max_batch_size": BATCH_GROUPS * GROUP_SIZE,
    }
    if engine == "vllm":
        generation["vllm_cfg"] = {"kv_cache_memory_bytes": 1 << 30}
    return parse_spec(
        {
            "name": "episodes",
            "policy": {
                "model_name": str(model),
                "max_total_sequence_length": 2048,
                "generation": generation,
            },
            "data": {"train": f"{name}.jsonl"},
            # Coroutines of the class run side by side, so one process has all tools.
            "environment": {"class": "slow.py:Slow", "processes": 1, "parallel_calls": IN_FLIGHT},
            "grpo": {
                "num_prompts_per_step": BATCH_GROUPS,
                "num_generations_per_prompt": GROUP_SIZE,
                "max_num_steps": batches,
            },
            "async_grpo": {"max_trajectory_age_steps": batches},
            "logger": {"tensorboard": False},
        },
        base=folder,
    )


def measure(cluster: LocalCluster, client: Client, spec: RunSpec, warm_turns: int, seconds: float) -> dict[str, float]:
    """Run a spec until `seconds` after its first `warm_turns` turns; return turns and tokens per second of that time.

    The books count a group's tokens from its first turn to its end, while its journal goes when the group is whole. All turns
    of a spec have the same number of tokens.
    """
    run_id, tokens_per_turn = client.submit(spec).run_id, spec.policy.generation.max_new_tokens
    while (before := client.get(run_id).tokens["generated"]) < warm_turns * tokens_per_turn:
        cluster.check()
        time.sleep(0.2)
    began_s = time.monotonic()
    time.sleep(seconds)
    after, elapsed_s = client.get(run_id).tokens["generated"], time.monotonic() - began_s
    client.cancel(run_id)
    tokens_per_s = (after - before) / elapsed_s
    return {"turns_per_s": tokens_per_s / tokens_per_turn, "tokens_per_s": tokens_per_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("native", "vllm"), default="native")
    parser.add_argument("--seconds", type=float, default=90.0, help="measured seconds of each arm")
    parser.add_argument("--tool-s", type=float, default=5.0, help="mean seconds of a tool")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a turn")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    chosen = parse(parser, seconds=2.0, tool_s=0.2, tokens=4, hidden=64, layers=1)
    sizes = ClusterSection(rollout_workers=1, environment_workers=1, learner_ranks=1)
    sizes = sizes.model_copy(update={"reward_workers": 0})
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.platform()}",
        "engine": chosen.engine,
        "in_flight": IN_FLIGHT,
        "engine_batch": BATCH_GROUPS * GROUP_SIZE,
        "load_average": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory(prefix="paceline-environments-") as name:
        folder = Path(name)
        large = write_model(folder / "large", chosen.hidden, chosen.layers)
        small = write_model(folder / "small", 64, 1)
        with LocalCluster(folder / "runs", sizes, max_deaths=3) as cluster, Client(cluster.address) as client:
            for arm, tool_s in (("without_tools", 0.0), ("with_slow_tools", chosen.tool_s)):
                print(f"{arm} …", file=sys.stderr)
                spec = make_spec(
                    folder,
                    large,
                    chosen.engine,
                    tokens=chosen.tokens,
                    turns=TURNS,
                    tool_s=tool_s,
                    batches=250,
                )
                # A whole wave of turns and tools has to have passed, or the beginning would count, when no tool runs yet.
                result[arm] = measure(cluster, client, spec, 2 * IN_FLIGHT, chosen.seconds)
            print("turns of one token …", file=sys.stderr)
            spec = make_spec(folder, small, chosen.engine, tokens=1, turns=ONE_TOKEN_TURNS, tool_s=0.0, batches=250)
            result["one_token"] = measure(cluster, client, spec, 2 * IN_FLIGHT, min(20.0, chosen.seconds))
    result["tokens_ratio_with_slow_tools"] = (
        result["with_slow_tools"]["tokens_per_s"] / result["without_tools"]["tokens_per_s"]
    )
    result["turns_per_s"] = result["one_token"]["turns_per_s"]
    if chosen.json:
        print(json.dumps(result))
        return
    print(f"machine: {result['machine']}, engine: {chosen.engine}, load average {result['load_average']:.1f}")
    for arm in ("without_tools", "with_slow_tools", "one_token"):
        print(f"{arm}: {result[arm]['tokens_per_s']:.0f} tokens/s, {result[arm]['turns_per_s']:.1f} turns/s")
    print(f"tokens_ratio_with_slow_tools {result['tokens_ratio_with_slow_tools']:.3f}")
    print(f"turns_per_s {result['turns_per_s']:.1f}")


if __name__ == "__main__":
    main()
