"""What one GPU does, the most valuable first, within the minutes that it is given: the tests marked gpu, the card's ceilings,
training by shape and settings, memory against the plan, attention and head alone, engines alone
and against the learner, the pause of a swap against the bus, checkpoints.

    python benchmarks/gpu.py [--minutes 30] [--only NAME ...] [--results FILE] [--again] [--model FOLDER] [--table | --list]

NAME is a case, or the first word of several (`--list`). Each case runs in its own process with a time limit. Its result
is written to `gpu-results.json`, by card and release of torch, before the next begins, so a run that was cut short
goes on where it was, failed cases last; `--again` measures anew. A case that the memory plan has no room for is noted with the
plan's reason. `--table` prints the tables for docs/operate/performance.md and measures nothing.

Models have the shapes of Qwen3 and random weights. `--model` names a folder with real ones, which the comparison of engine and
learner, and the engines' pace, take instead. `--device cpu` rehearses all cases with tiny models, which checks this benchmark and
says nothing about speed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.short_form import parse  # noqa: E402
from paceline.host.process import end_process  # noqa: E402

LEAST_S = 15.0
"""A case with less time than this does not begin."""
ENDING_S = 3.0
"""Kept for the end of a case that is cut short."""
PRELOADED = ["benchmarks.gpu_cases.training", "benchmarks.gpu_cases.weights", "benchmarks.gpu_cases.engines"]
"""Modules that are imported once; the processes of all cases are forks of the process that has them."""
SELECTIVE = {"activation_checkpointing": "selective"}


@dataclass(frozen=True)
class Case:
    """One measurement, made by `function` of `benchmarks/gpu_cases` or of this file."""

    name: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 120.0


def cases(device: str, model: str = "") -> Iterator[Case]:
    """Yield the cases, the most valuable first. On a CPU each kind once, with tiny shapes."""
    if device == "cpu":
        yield from rehearsal()
        return
    real = {"folder": model} if model else {"shape": "0.6B"}
    load: dict[str, Any] = {**real, "sequences": [32, 128, 256], "new_tokens": 128}
    compared: dict[str, Any] = {**real, "sequences": 64, "new_tokens": 128}
    yield Case("tests", "tests", {"chosen": [], "workers": 4}, 300.0)
    yield Case("ceilings", "kernels.ceilings", {"size": 8192}, 60.0)
    yield _train("0.6B", 4096)
    yield _train("1.7B", 8192, SELECTIVE, packed=True)
    yield Case("attention", "kernels.attention", {"tokens": 8192})
    yield Case("head", "kernels.head", {"tokens": 8192, "hidden": 2048, "vocabulary": 151_936})
    yield Case("mismatch native", "engines.mismatch", {**compared, "backend": "native"})
    yield Case("engine native", "engines.pace", {**load, "backend": "native"})
    yield _train("1.7B", 8192, {"compile": True}, packed=True)
    yield Case("swap native 1.7B", "engines.swap", {"shape": "1.7B", "backend": "native"})
    yield Case("profile 1.7B", "training.profiled", {"shape": "1.7B", "tokens": 8192, "policy": SELECTIVE})
    yield _train("8B-12L", 8192, packed=True)
    if importlib.util.find_spec("vllm") is not None:
        yield Case("engine vllm", "engines.pace", {**load, "backend": "vllm"}, 240.0)
        yield Case("mismatch vllm", "engines.mismatch", {**compared, "backend": "vllm"}, 240.0)
        yield Case("swap vllm 8B", "engines.swap", {"shape": "8B", "backend": "vllm"}, 300.0)
    yield Case("checkpoint 0.6B", "weights.save_and_load", {"shape": "0.6B", "tokens": 4096})
    for policy in (
        {"activation_checkpointing": "full"},
        {"float32_head": True},
        {"deterministic": True},
        {"optimizer": {"state_dtype": "bfloat16"}},
        {"lora_cfg": {"enabled": True, "dim": 32}},
    ):
        yield _train("1.7B", 8192, policy, packed=True)
    for shape, tokens in (("1.7B", 32_768), ("4B", 4096), ("8B-12L", 32_768), ("8B", 4096)):
        yield _train(shape, tokens, limit_s=240.0)
    yield Case("swap native 8B", "engines.swap", {"shape": "8B", "backend": "native"}, 240.0)


def rehearsal() -> Iterator[Case]:
    """Yield every kind of case with shapes for a CPU."""
    tiny: dict[str, Any] = {"shape": "tiny"}
    yield Case("tests", "tests", {"chosen": ["tests/gpu/test_delta_on_gpu.py"], "workers": 0})
    yield Case("ceilings", "kernels.ceilings", {"size": 128})
    yield _train("tiny", 128)
    yield _train("tiny", 128, {"activation_checkpointing": "full"}, packed=True)
    yield Case("attention", "kernels.attention", {"tokens": 64})
    yield Case("head", "kernels.head", {"tokens": 64, "hidden": 32, "vocabulary": 512})
    yield Case("mismatch native", "engines.mismatch", {**tiny, "backend": "native", "sequences": 4, "new_tokens": 8})
    yield Case("engine native", "engines.pace", {**tiny, "backend": "native", "sequences": [2, 4], "new_tokens": 8})
    yield Case("swap native tiny", "engines.swap", {**tiny, "backend": "native"})
    yield Case("profile tiny", "training.profiled", {**tiny, "tokens": 128, "policy": SELECTIVE})
    yield Case("checkpoint tiny", "weights.save_and_load", {**tiny, "tokens": 128})


def _train(
    shape: str,
    tokens: int,
    policy: dict[str, Any] | None = None,
    *,
    packed: bool = False,
    limit_s: float = 120.0,
) -> Case:
    words = [f"train {shape} {tokens}", *(["packed"] if packed else [])]
    words += [f"{key}={json.dumps(value)}" for key, value in (policy or {}).items()]
    arguments = {"shape": shape, "tokens": tokens, "policy": policy or {}, "packed": packed}
    return Case(" ".join(words), "training.train", arguments, limit_s)


def tests(device: Any, chosen: list[str], workers: int) -> dict[str, Any]:
    """Run the tests marked gpu; those that failed are in the result with the ends of their messages."""
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    report = Path(tempfile.mkdtemp()) / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *(chosen or sorted(map(str, marked)))]
    command += ["--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}"]
    if workers and importlib.util.find_spec("xdist") is not None:
        # Plugins that warn beside xdist would fail every test.
        command += ["-n", str(workers), "--dist", "worksteal", "-p", "no:benchmark"]
    # Compiling in the tests' own processes: inductor's pool of processes has held up the interpreter's end for minutes.
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if device.type == "cpu":
        environment["PACELINE_GPU_TESTS"] = "cpu"
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if not report.exists():
        raise RuntimeError("pytest made no report; is it installed?")
    found: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": {}}
    for test in ElementTree.parse(report).iter("testcase"):
        faults = [*test.iter("failure"), *test.iter("error")]
        if faults:
            found["failed"][f"{test.get('classname')}::{test.get('name')}"] = (faults[0].text or "")[-900:]
        else:
            found["skipped" if test.find("skipped") is not None else "passed"] += 1
    return found | ({"error": f"{len(found['failed'])} tests failed"} if found["failed"] else {})


def run_case(case: Case, device_type: str, models: Path) -> dict[str, Any]:
    """Run one case in this process."""
    import torch

    from benchmarks.gpu_cases.models import model_folder
    from benchmarks.gpu_cases.training import DoesNotFit

    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    arguments = dict(case.arguments)
    if "shape" in arguments:
        arguments["folder"] = model_folder(arguments.pop("shape"), models)
    module, _, name = case.function.rpartition(".")
    function = getattr(importlib.import_module(f"benchmarks.gpu_cases.{module}"), name) if module else tests
    try:
        found: dict[str, Any] = function(device=device, **arguments)
    except DoesNotFit as error:
        return {"does_not_fit": str(error)}
    return found


def machine(device_type: str) -> dict[str, Any]:
    """Return what the results belong to."""
    import torch

    gpu = torch.cuda.get_device_name(0) if device_type == "cuda" else "CPU"
    return {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version()}


def _in_child(log: str, output: Path, function: Any, arguments: tuple[Any, ...]) -> None:
    """Write the function's result to `output`, and all that is printed to `log`."""
    os.setsid()  # its processes end with it
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    output.write_text(json.dumps(function(*arguments)))
    end_process()  # threads of gloo and of readers drop tensors, which the interpreter's finalisation does not survive


class Children:
    """Starts each function in a process with a limit."""

    def __init__(self, folder: Path, method: str = "forkserver") -> None:
        self._folder, self._number = folder, 0
        self._context = multiprocessing.get_context(method)
        self._context.set_forkserver_preload(PRELOADED)

    def call(self, limit_s: float, function: Any, *arguments: Any) -> dict[str, Any] | None:
        """Return the function's result, or its error; None if it takes longer."""
        self._number += 1
        log, output = (self._folder / f"{self._number}.{kind}" for kind in ("log", "json"))
        child = self._context.Process(target=_in_child, args=(str(log), output, function, arguments))  # type: ignore[attr-defined]
        child.start()
        late = True
        try:
            child.join(limit_s)
            late = child.is_alive()
        finally:
            try:
                os.killpg(child.pid or 0, signal.SIGKILL)
            except ProcessLookupError:
                child.kill()  # before it had a group
            child.join()
        if output.exists() and child.exitcode == 0:
            found: dict[str, Any] = json.loads(output.read_text())
            return found
        text = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        return None if late else {"error": f"exit status {child.exitcode}: {text}"}


class Results:
    """The file of results: {card: {"machine": …, "cases": {name: result}}}."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_card: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return the results of a machine by case, to be changed."""
        card = self.by_card.setdefault(f"{found['gpu']}, torch {found['torch']}", {"machine": found, "cases": {}})
        known: dict[str, Any] = card["cases"]
        return known

    def write(self) -> None:
        """Replace the file, whole."""
        whole = self.path.with_suffix(".partial")
        whole.write_text(json.dumps(self.by_card, indent=1))
        whole.replace(self.path)


def measure(chosen: list[Case], results: Results, device: str, again: bool, end_s: float) -> bool:
    """Run the cases that have no result yet until `end_s` of the monotonic clock; return whether all have one."""
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as folder:
        children, models = Children(Path(folder)), Path(folder)
        found = children.call(end_s - time.monotonic(), machine, device)
        if found is not None and "forked subprocess" in found.get(
            "error", ""
        ):  # CUDA is in use where the forks come from
            children = Children(Path(folder), "spawn")
            found = children.call(end_s - time.monotonic(), machine, device)
        if found is None or "error" in found:
            print(
                f"torch finds no GPU here; `paceline doctor` says more, --device cpu rehearses\n{found or 'no answer'}"
            )
            return False
        known = results.of(found)
        if again:
            for case in chosen:
                known.pop(case.name, None)
        missing = [case for case in chosen if case.name not in known]
        missing += [case for case in chosen if "error" in known.get(case.name, {})]
        for case in missing:
            left_s = end_s - time.monotonic() - ENDING_S
            if left_s < LEAST_S:
                break
            limit_s = min(case.limit_s, left_s)
            print(f"{case.name} … ({limit_s:.0f} s at most)", flush=True)
            result = children.call(limit_s, run_case, case, device, models)
            if result is None and limit_s < case.limit_s:
                print("  cut short: the time is over", flush=True)
                break
            known[case.name] = result or {"error": f"not done after {limit_s:.0f} s"}
            results.write()
            print(f"  {json.dumps(known[case.name])[:300]}", flush=True)
    unmeasured = [case.name for case in chosen if "error" in known.get(case.name, {"error": ""})]
    if unmeasured:
        print(f"without a result: {', '.join(unmeasured)}; the same command goes on there")
    return not unmeasured


def tables(results: dict[str, Any]) -> str:
    """Return the results as tables in Markdown, one card after another."""
    lines = []
    for card, found in results.items():
        lines += [
            f"{card}:",
            "",
            "| shape | tokens | settings | step | tokens/s | TFLOP/s | MFU | plan | measured | ratio |",
        ]
        lines += ["|" + "---|" * 10]
        lines += [_row(name, row) for name, row in found["cases"].items() if name.startswith("train ")]
        for name, row in found["cases"].items():
            if not name.startswith("train "):
                lines += ["", f"{name}: `{json.dumps(_rounded(row))}`"]
        lines += [""]
    return "\n".join(lines)


def _row(name: str, row: dict[str, Any]) -> str:
    _, shape, tokens, *words = name.split()
    if "step_s" not in row:
        reason = (row.get("does_not_fit") or row.get("error", ""))[:120].replace("\n", " ")
        return f"| {shape} | {tokens} | {' '.join(words)} | {reason} | | | | | | |"
    settings = ["packed"] if "packed" in words else []
    settings += [f"{key} {value}" for key, value in row["settings"].items() if value not in (False, "float32")]
    utilisation = f"{row['mfu']:.2f}" if "mfu" in row else ""
    memory = " | | "
    if "ratio" in row:
        memory = f"{row['predicted_bytes'] / 1e9:.1f} GB | {row['measured_bytes'] / 1e9:.1f} GB | {row['ratio']:.2f}"
    return (
        f"| {shape} | {tokens} | {', '.join(settings)} | {row['step_s']:.3f} s | {row['tokens_per_s']:,.0f} | "
        f"{row['teraflops']:.1f} | {utilisation} | {memory} |"
    )


def _rounded(value: Any) -> Any:
    """Return the value with four digits of each float."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    """Measure, or print the tables; exit status 1 when a case has no result."""
    started_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="most minutes, with the tests (default: 30)")
    parser.add_argument("--only", action="append", metavar="NAME", help="a case, or the first word of several")
    parser.add_argument("--results", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--again", action="store_true", help="measure what has a result, too")
    parser.add_argument("--model", default="", help="a folder with real weights for the engines")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--table", action="store_true", help="print the tables of the results' file")
    parser.add_argument("--list", action="store_true", help="print the cases and their limits")
    scratch = tempfile.TemporaryDirectory(prefix="gpu-short-")
    results_of_trial = Path(scratch.name) / "results.json"
    options = parse(parser, device="cpu", minutes=5.0, only=["head", "swap"], results=results_of_trial)
    everything = list(cases(options.device, options.model and str(Path(options.model).resolve())))
    if options.list:
        print("\n".join(f"{case.name:60} {case.limit_s:4.0f} s at most" for case in everything))
        return 0
    results = Results(options.results)
    if options.table:
        print(tables(results.by_card))
        return 0
    chosen = [
        case
        for case in everything
        if options.only is None or any(f"{case.name} ".startswith(f"{name} ") for name in options.only)
    ]
    if not chosen:
        parser.error(f"no case is named {' or '.join(options.only)}; --list names them")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    if options.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for busy cores take minutes
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the case under way
    complete = measure(chosen, results, options.device, options.again, started_s + 60 * options.minutes)
    print(tables(results.by_card))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
