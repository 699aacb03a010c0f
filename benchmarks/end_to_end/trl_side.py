"""TRL's side: `GRPOTrainer` on the workload. Run by the Python of TRL's own environment; imports nothing of Paceline.

    python trl_side.py <workload directory> <steps to warm up> <steps to measure>

Prints one JSON line as its last: real completion tokens and seconds of the measured steps, and the seconds of a step's
phases. Settings are TRL's defaults but for those of the workload, and `use_cpu`, `bf16` and `gradient_checkpointing`, whose
defaults are meant for GPUs.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """The end of each optimizer step, the mean completion length that TRL logged for it, and the seconds of phases."""

    def __init__(self, warm_up: int) -> None:
        self.ends_s: list[float] = []
        self.cpu_s: list[float] = []
        """Processor seconds at the same moments."""
        self.mean_lengths: list[float] = []
        self.phases_s: Counter[str] = Counter()
        self._warm_up = warm_up
        self._begin_s: float | None = None

    def watch(self, trainer: GRPOTrainer) -> None:
        """Time the preparation of inputs, generation in it, and the first forward pass of a generation."""
        trainer._prepare_inputs = self._timed(trainer._prepare_inputs, "inputs")
        trainer.model.generate = self._timed(trainer.model.generate, "generate")
        trainer.model.register_forward_hook(self._note_prefill)

    def _timed(self, call: Any, name: str) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.perf_counter()
            self._begin_s = begin_s if name == "generate" else None
            result = call(*args, **kwargs)
            self.phases_s[name] += time.perf_counter() - begin_s
            return result

        return timed

    def _note_prefill(self, *_: Any) -> None:
        if self._begin_s is not None:
            self.phases_s["prefill"] += time.perf_counter() - self._begin_s
            self._begin_s = None

    def of_a_step(self, steps: int) -> dict[str, float]:
        """Return the phases of a measured step in seconds; `training` includes the optimizer and the data loader."""
        inputs_s, generate_s, prefill_s = (self.phases_s[name] / steps for name in ("inputs", "generate", "prefill"))
        step_s = (self.ends_s[self._warm_up + steps - 1] - self.ends_s[self._warm_up - 1]) / steps
        phases_s = (prefill_s, generate_s - prefill_s, step_s - inputs_s, inputs_s - generate_s)
        return {name: round(s, 3) for name, s in zip(("prefill", "decode", "training", "rest"), phases_s, strict=True)}

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """After an optimizer step."""
        self.ends_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())
        if len(self.ends_s) == self._warm_up:
            self.phases_s.clear()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """After TRL averaged the step's metrics."""
        if "completions/mean_length" in logs:
            self.mean_lengths.append(logs["completions/mean_length"])


def main() -> None:
    """Trains and prints."""
    directory, warm_up, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    load = json.loads((directory / "workload.json").read_text())
    sequences = load["prompts_per_step"] * load["completions_per_prompt"]
    clock = StepClock(warm_up)
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=load["trl_micro_batch"],
            gradient_accumulation_steps=sequences // load["trl_micro_batch"],
            num_generations=load["completions_per_prompt"],
            max_completion_length=load["max_new_tokens"],
            temperature=load["temperature"],
            learning_rate=load["learning_rate"],
            lr_scheduler_type="constant",
            max_steps=warm_up + steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32),
            reward_funcs=_reward(directory),
            args=config,
            train_dataset=load_dataset("json", data_files=str(directory / "prompts.jsonl"), split="train"),
            processing_class=AutoTokenizer.from_pretrained(directory / "model", padding_side="left"),
            callbacks=[clock],
        )
        clock.watch(trainer)
        trainer.train()
    measured = clock.mean_lengths[warm_up : warm_up + steps]
    tokens = sum(length * sequences for length in measured)
    ends_s = clock.ends_s[warm_up - 1 : warm_up + steps]
    steps_s = [after - before for before, after in itertools.pairwise(ends_s)]
    seconds = sum(steps_s)
    result = {
        "tokens": round(tokens),
        "seconds": round(seconds, 3),
        "steps": steps,
        "mean_length": round(tokens / steps / sequences, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "median_step_s": round(statistics.median(steps_s), 3),
        "step_s": round(seconds / steps, 3),
        "seconds_of_phases": clock.of_a_step(steps),
        "core_seconds_per_step": round((clock.cpu_s[warm_up + steps - 1] - clock.cpu_s[warm_up - 1]) / steps, 3),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result), flush=True)


def _reward(directory: Path) -> Any:
    """The workload's reward function, from the file that Paceline's side loads too."""
    where = json.loads((directory / "reward.json").read_text())
    spec = importlib.util.spec_from_file_location("benchmark_reward", where["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, where["name"])


if __name__ == "__main__":
    main()
