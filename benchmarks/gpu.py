"""What one GPU does: training by shape and length, memory against the plan, publishing beside training, the pause of a
swap against the bus, checkpoints, engines.

    python benchmarks/gpu.py [--only SECTION ...] [--results FILE] [--again] [--device cuda|cpu] [--table]

Every case runs in a process of its own, and its result is written to the results' file (`gpu-results.json`) before the next
begins, so a run that was cut short goes on where it was; `--again` measures anew. A case that the memory plan has no room for
is noted with the plan's reason. `--table` prints the tables for docs/performance.md from the file and measures nothing.

With `--device cpu` the cases run with a tiny model, which checks this benchmark and says nothing about speed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from paceline.host.process import end_process  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

CASE_S = 900
"""Seconds that a case may take."""
SECTIONS = ("train", "publish", "swap", "checkpoint", "engine")


def cases(device: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name, section, arguments), the quickest and most telling first."""
    if device == "cpu":
        for settings in ({}, {"activation_checkpointing": "full"}):
            yield _train("tiny", 128, settings)
        yield "publish tiny", "publish", {"shape": "tiny", "tokens": 128}
        yield "swap native tiny", "swap", {"shape": "tiny", "backend": "native"}
        yield "checkpoint tiny", "checkpoint", {"shape": "tiny", "tokens": 128}
        yield "engine native demo", "engine", {"backend": "native", "size": "demo"}
        return
    for shape in ("0.6B", "1.7B", "4B", "8B"):
        yield _train(shape, 4096, {})
    yield "publish 1.7B", "publish", {"shape": "1.7B", "tokens": 4096}
    yield "swap native 8B", "swap", {"shape": "8B", "backend": "native"}
    yield "checkpoint 1.7B", "checkpoint", {"shape": "1.7B", "tokens": 4096}
    yield "engine native bench", "engine", {"backend": "native", "size": "bench"}
    if importlib.util.find_spec("vllm") is not None:
        yield "engine vllm bench", "engine", {"backend": "vllm", "size": "bench"}
        yield "swap vllm 8B", "swap", {"shape": "8B", "backend": "vllm"}
    for settings in (
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"compile": True},
        {"float32_head": True},
        {"deterministic": True},
        {"lora_cfg": {"enabled": True, "dim": 32}},
    ):
        yield _train("1.7B", 4096, settings)
    for tokens in (16_384, 32_768):
        for shape in ("0.6B", "1.7B", "4B", "8B"):
            yield _train(shape, tokens, {})
    yield "publish 4B", "publish", {"shape": "4B", "tokens": 4096}


def _train(shape: str, tokens: int, settings: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    more = "".join(f" {key}={json.dumps(value)}" for key, value in settings.items())
    name = f"train {shape} {tokens}{more}"
    return name, "train", {"shape": shape, "tokens": tokens, "settings": settings}


def run_case(section: str, arguments: dict[str, Any], device_type: str, models: Path) -> dict[str, Any]:
    """Run one case in this process."""
    import torch

    from benchmarks.gpu_cases import training, weights
    from benchmarks.gpu_cases.models import model_folder

    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    if section == "engine":
        return weights.engine(arguments["backend"], arguments["size"], device)
    folder = model_folder(arguments["shape"], models)
    if section == "swap":
        return weights.swap(folder, arguments["backend"], device)
    tokens = arguments["tokens"]
    try:
        if section == "train":
            return training.train(folder, tokens, device, arguments["settings"])
        measure = weights.publish if section == "publish" else weights.save_and_load
        return measure(folder, tokens, device)
    except training.DoesNotFit as error:
        return {"does_not_fit": str(error)}


def measure_all(results: Path, device: str, only: tuple[str, ...], again: bool) -> bool:
    """Run the cases that have no result yet; return whether all have one."""
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() and not again else {}
    known.setdefault("machine", _machine(device))
    with tempfile.TemporaryDirectory(prefix="gpu-models-") as models:
        for name, section, arguments in cases(device):
            if section not in only or "error" not in known.get(name, {"error": ""}):
                continue
            given = json.dumps([section, arguments, device, models])
            print(f"{name} …", flush=True)
            try:
                done = subprocess.run(
                    [sys.executable, __file__, "--case", given],
                    capture_output=True,
                    text=True,
                    timeout=CASE_S,
                    cwd=ROOT,
                )
            except subprocess.TimeoutExpired:
                known[name] = {"error": f"not done after {CASE_S} s"}
            else:
                known[name] = _result_of(done)
            results.write_text(json.dumps(known, indent=1))
            print(f"  {json.dumps(known[name])[:300]}", flush=True)
    missing = [
        name for name, section, _ in cases(device) if section in only and "error" in known.get(name, {})
    ]
    if missing:
        print(f"without a result: {', '.join(missing)}")
    return not missing


def _result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if done.returncode == 0:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    return {"error": f"exit status {done.returncode}: {done.stderr[-2000:]}"}


def _machine(device: str) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name(0) if device == "cuda" else ""
    return {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version()}


def tables(results: dict[str, Any]) -> str:
    """Return the results as tables in Markdown."""
    lines = [f"Machine: {json.dumps(results.get('machine', {}))}", ""]
    lines += [
        "| shape | tokens | settings | step | tokens/s | TFLOP/s | MFU | plan | measured | ratio |",
        "|" + "---|" * 10,
    ]
    for name, row in results.items():
        if not name.startswith("train "):
            continue
        _, shape, tokens, *_ = name.split()
        if "step_s" not in row:
            lines.append(
                f"| {shape} | {tokens} | {row.get('does_not_fit') or row.get('error', '')[:80]} | | | | | | | |"
            )
            continue
        settings = ", ".join(
            f"{key} {value}" for key, value in row["settings"].items() if value not in (False, "float32")
        )
        memory = (
            f"{row['predicted_bytes'] / 1e9:.1f} GB | {row['measured_bytes'] / 1e9:.1f} GB | {row['ratio']:.2f}"
            if "ratio" in row
            else " | | "
        )
        utilisation = f"{row['mfu']:.2f}" if "mfu" in row else ""
        lines.append(
            f"| {shape} | {tokens} | {settings} | {row['step_s']:.3f} s | {row['tokens_per_s']:,.0f} | {row['teraflops']:.1f} | "
            f"{utilisation} | {memory} |"
        )
    for name, row in results.items():
        if name.split()[0] in ("publish", "swap", "checkpoint", "engine"):
            lines += ["", f"{name}: `{json.dumps(row)}`"]
    return "\n".join(lines)


def main() -> int:
    """Measure, or print the tables; exit status 1 when a case has no result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=SECTIONS)
    parser.add_argument("--results", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        section, arguments, device, models = json.loads(options.case)
        print(json.dumps(run_case(section, arguments, device, Path(models))))
        end_process()  # threads of weight links drop tensors, which the interpreter's finalisation does not survive
    if options.table:
        print(tables(json.loads(options.results.read_text())))
        return 0
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} finds no GPU here; `paceline doctor` says more, --device cpu checks the benchmark"
        )
        return 1
    complete = measure_all(options.results, options.device, tuple(options.only or SECTIONS), options.again)
    print(tables(json.loads(options.results.read_text())))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
