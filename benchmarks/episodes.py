"""Turns per second of the driver of episodes: everything between a sampled turn and the next prompt, without an engine.

    python benchmarks/episodes.py [--sessions 1000] [--turns 10] [--json]

Episodes of a class with `step`, all at a time, whose turns are one token each: rendered by a chat template with a bridge to the next
turn, answered by user code in a process of its own, encoded for the journal and assembled to groups of 8 samples. The engine is
a coroutine that answers at once, and the journal a counter of bytes. Both processes run on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.short_form import parse  # noqa: E402
from paceline.environment.episodes import run_episodes  # noqa: E402
from paceline.environment.hosting.pool import UserCode  # noqa: E402
from paceline.environment.protocols import EpisodeLease, SampledTurn, TurnParams, TurnRequest  # noqa: E402
from paceline.environment.setting import EpisodeSetting  # noqa: E402
from paceline.groups import VersionSpan  # noqa: E402
from paceline.spec import RunSpec  # noqa: E402
from paceline.v1 import exchange_pb2 as pb  # noqa: E402
from paceline.wire import TurnArrays  # noqa: E402

SAMPLES = 8
CODE = """
class Guess:
    def reset(self, **columns):
        self.turns = 0
    def step(self, text):
        self.turns += 1
        return f"{self.turns} is not it, guess again", 0.0, False
"""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class InstantEngine:
    """A source that samples the end of sequence at once."""

    def __init__(self, end: int) -> None:
        self._turn = SampledTurn(
            np.array([end], np.int32), np.array([-0.5], np.float32), (VersionSpan(1, 0, 0, 1),), "stop", ""
        )

    async def sample(self, request: TurnRequest) -> SampledTurn:
        """Return one token."""
        await asyncio.sleep(0)
        return self._turn


class CountingJournal:
    """A journal that encodes turns and counts them."""

    def __init__(self) -> None:
        self.turns = self.size_bytes = 0

    async def turn(self, sample: int, life: int, index: int, arrays: TurnArrays, note: pb.TurnNote, last: bool) -> None:
        """Encode a turn."""
        self.turns += 1
        self.size_bytes += len(arrays.encode()) + len(note.SerializeToString())

    async def end(self, sample: int, life: int, reason: str, error: str, give_up: bool) -> None:
        """Refuse, because no life ends here."""
        raise AssertionError(f"sample {sample} ended: {error}")


def make_tokenizer() -> Any:
    """A tokenizer of bytes with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return made


async def measure(sessions: int, turns: int, folder: Path) -> dict[str, float]:
    """Run all sessions at a time; return turns per second and what they took."""
    (folder / "guess.py").write_text(CODE)
    spec = RunSpec.model_validate(
        {
            "name": "driver",
            "data": {"train": "unused.jsonl"},
            "policy": {"model_name": "made", "max_total_sequence_length": 8192},
            "environment": {"class": f"{folder}/guess.py:Guess", "max_turns": turns},
            "rewards": [{"function": "length"}],
        }
    )
    tokenizer = make_tokenizer()
    setting, journal = EpisodeSetting.of(spec, tokenizer), CountingJournal()
    engine = InstantEngine(tokenizer.eos_token_id)
    async with UserCode(spec.environment, num_processes=1) as code:
        prompt = [{"role": "user", "content": "Guess a number. " * 8}]
        leases = [
            EpisodeLease(group, 1, prompt, {}, SAMPLES, group, TurnParams(16))
            for group in range(-(-sessions // SAMPLES))
        ]
        started_s, used_s = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run_episodes(setting, lease, engine, journal, code)) for lease in leases]
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - used_s
    for task in running:
        rows = task.result()
        assert len(rows.completions) == SAMPLES
        assert len(rows.rows.turns) == SAMPLES * turns
    return {
        "turns_per_s": round(journal.turns / wall_s, 1),
        "turns": journal.turns,
        "seconds": round(wall_s, 2),
        "driver_cpu_ms_per_turn": round(1000 * cpu_s / journal.turns, 3),
        "journal_bytes_per_turn": round(journal.size_bytes / journal.turns, 1),
        "rows_per_sample": round(setting.counts.rows / setting.counts.samples, 3),
    }


def main() -> None:
    """Measure on one core, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000, help="episodes at a time")
    parser.add_argument("--turns", type=int, default=10, help="turns of each")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parse(parser, sessions=16, turns=2)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(arguments.sessions, arguments.turns, Path(folder)))
    found: dict[str, Any] = {
        **result,
        "cores": 1,
        "load_average": round(load, 2),
        "python": platform.python_version(),
    }
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:24} {value}", file=sys.stdout)


if __name__ == "__main__":
    main()
