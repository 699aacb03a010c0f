"""Trained tokens per second of Paceline's services and of TRL's `GRPOTrainer` on one workload, one after the other.

    python benchmarks/end_to_end.py [--steps 12] [--trl-steps 6] [--skip-trl] [--json] [section.key=value …]
    HF_HUB_OFFLINE=0 python benchmarks/end_to_end.py --pretrained [--model FOLDER] [--questions FILE.jsonl] …

A random Qwen3 (hidden 256, 4 layers, float32), 32 prompts × 8 completions a step, at most 128 new tokens, mean length about
82, one optimizer update a step (end_to_end/workload.py). With --pretrained: SmolLM2-135M-Instruct in float32, 8 questions of
GSM8K × 8 completions, at most 64 new tokens. Only real completion tokens count, over the steps after a warm-up. The
overrides change Paceline's run. Results: docs/operate/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from end_to_end import paceline_side, trl_environment
from end_to_end.workload import PRETRAINED, Workload, write_pretrained, write_workload
from short_form import parse

WARM_UP_STEPS = 3
TRL_WARM_UP_STEPS = 1


def main() -> None:
    """Parses, measures both sides, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of Paceline that are measured")
    parser.add_argument("--trl-steps", type=int, default=6, help="steps of TRL that are measured")
    parser.add_argument("--skip-trl", action="store_true")
    parser.add_argument("--trl-micro-batch", type=int, help="sequences of a pass of TRL (64; 16 with --pretrained)")
    parser.add_argument("--pretrained", action="store_true", help="train a pretrained model on questions")
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="its folder, or its name on the hub"
    )
    parser.add_argument(
        "--questions", default="openai/gsm8k", help="a JSONL file or a data set with the column `question`"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parse(parser, steps=1, skip_trl=True)
    workload = PRETRAINED if options.pretrained else Workload()
    if options.short:
        workload = Workload(32, 1, 4, 4, max_new_tokens=16, mean_length=8.0)
    if options.trl_micro_batch:
        workload = replace(workload, trl_micro_batch=options.trl_micro_batch)
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as name:
        directory = Path(name)
        if options.pretrained:
            write_pretrained(directory, workload, options.model, options.questions)
        else:
            write_workload(directory, workload)
        result: dict[str, Any] = {"machine": _machine()}
        ours = paceline_side.measure(directory, workload, WARM_UP_STEPS, options.steps, options.overrides)
        result |= {"tokens_per_s": ours["tokens_per_s"], "paceline": ours}
        if not options.skip_trl:
            result["load_average_between"] = os.getloadavg()[0]
            script = Path(paceline_side.__file__).with_name("trl_side.py")
            line = trl_environment.run_side(script, directory, TRL_WARM_UP_STEPS, options.trl_steps)
            theirs = json.loads(line)
            result |= {
                "trl_tokens_per_s": theirs["tokens_per_s"],
                "ratio": round(ours["tokens_per_s"] / theirs["tokens_per_s"], 2),
                "ratio_of_median_steps": round(_median_rate(ours) / _median_rate(theirs), 2),
                "trl": theirs,
            }
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        _print_table(result)


def _median_rate(side: dict[str, Any]) -> float:
    """Return tokens per second of the side's median step, which one disturbed step does not change."""
    return float(side["tokens"] / side["steps"] / side["median_step_s"])


def _machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _processor() -> str:
    """Return the processor's name, with the widest instructions that torch uses on it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _print_table(result: dict[str, Any]) -> None:
    ours, theirs = result["paceline"], result.get("trl")
    print(result["machine"])
    print(
        f"paceline {ours['tokens_per_s']:8.0f} tokens/s   {ours['step_s']:.2f} s a step, "
        f"mean length {ours['mean_length']:.1f}, mean age {ours['mean_age_steps']:.2f} steps"
    )
    if theirs is not None:
        print(
            f"trl      {theirs['tokens_per_s']:8.0f} tokens/s   {theirs['step_s']:.2f} s a step, "
            f"mean length {theirs['mean_length']:.1f}, {theirs['threads']} threads"
        )
        print(f"ratio {result['ratio']:.2f} (of median steps {result['ratio_of_median_steps']:.2f})")
        print(
            f"{'trl: seconds_of_phases':26}" + "  ".join(f"{n} {v:.3f}" for n, v in theirs["seconds_of_phases"].items())
        )
    print(f"prefill: {100 * ours['prefill_share_of_generate']:.1f} % of generate")
    for title in ("core_seconds_per_step", "learner_seconds_per_step", "weights"):
        print(f"{title:26}" + "  ".join(f"{name} {value:.3f}" for name, value in ours[title].items()))
    print(f"exchange and all around it: {100 * ours['exchange_share']:.1f} % of a step")


if __name__ == "__main__":
    main()
