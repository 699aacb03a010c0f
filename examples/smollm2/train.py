"""Trains SmolLM2 on one of three tasks and compares the models: start, SFT, and GRPO for each seed and age.

python train.py words                         # 300 steps; on two busy cores 150 steps took 41 minutes
python train.py gsm8k --gsm8k FOLDER          # train.jsonl and test.jsonl; without it, openai/gsm8k from the hub
python train.py calculator

Every command is printed. If it is interrupted, the same command continues it: finished runs and evaluations are kept. The
folder gets report.json (results by kind, paired tests, tokens a second) and curve.svg (held-out reward by minutes).
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACELINE = Path(sys.executable).with_name("paceline")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4b94")
WIDTH, HEIGHT, MARGIN = 640, 320, 48


def main() -> None:
    """Train, evaluate and report one task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("words", "gsm8k", "calculator"))
    parser.add_argument("--model", default=MODEL, help="folder or name of the chat model")
    parser.add_argument("--directory", type=Path, default=HERE / "runs", help="folder of all tasks")
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ages", type=int, nargs="+", default=[1, 2])
    for stage in ("sft", "grpo"):
        parser.add_argument(
            f"--{stage}", nargs="+", default=[], metavar="KEY=VALUE", help=f"overrides of stage {stage}"
        )
    Study(parser.parse_args()).run()


class Study:
    """All runs and evaluations of one task, in one folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._task: str = options.task
        self._options = options
        self._folder: Path = options.directory.resolve() / options.task
        self._model = str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model
        self._grpo: dict[str, Path] = {}
        """Folders of the GRPO runs, by their names."""

    def run(self) -> None:
        """Do what is not done yet."""
        if self._task != "gsm8k" and not (HERE / "data" / self._task).is_dir():
            call(sys.executable, str(HERE / "prepare.py"))
        self._evaluate("start", self._model)
        for seed in self._options.seeds:
            sft = self._train("sft", f"seed-{seed}", self._model, f"sft.seed={seed}") / "export"
            self._evaluate(f"seed-{seed}-sft", sft)
            for age in self._options.ages:
                name = f"seed-{seed}-age-{age}"
                overrides = (f"grpo.seed={seed}", f"async_grpo.max_trajectory_age_steps={age}")
                self._grpo[name] = self._train("grpo", name, sft, *overrides)
                self._evaluate(name, self._grpo[name] / "export")
        if self._task == "gsm8k":  # last, because they take the longest
            self._evaluate_whole("start", self._model)
            for name, run in self._grpo.items():
                self._evaluate_whole(name, run / "export")
        self._report()

    def _overrides(self, stage: str) -> list[str]:
        folder, given = self._options.gsm8k, list(getattr(self._options, stage))
        if folder is None:
            return given
        files = [f"data.train={folder.resolve() / 'train.jsonl'}", f"data.validation={folder.resolve() / 'test.jsonl'}"]
        return [*files, "data.train_config=null", *given]

    def _train(self, stage: str, name: str, model: object, *overrides: str) -> Path:
        """Return the folder of a finished run; begin it, or continue it."""
        directory = self._folder / f"{name}-{stage}" if stage == "sft" else self._folder / name
        run = directory / f"{self._task}-{stage}-1"
        if not (run / "export" / "config.json").is_file():
            words: list[object] = ["--directory", directory, "--no-page"]
            if not (directory / "ledger.sqlite").is_file():
                spec = HERE / f"{self._task}-{stage}.yaml"
                words = [spec, f"policy.model_name={model}", *self._overrides(stage), *overrides, *words]
            paceline("up", *words)
            paceline("ledger", "verify", run.name, "--directory", directory)
        return run

    def _evaluate(self, name: str, model: object) -> None:
        """Evaluate a model, four samples of each held-out problem. Episodes are evaluated in their runs alone."""
        output = self._folder / "results" / name
        if self._task == "calculator" or (output / "result.json").is_file():
            return
        spec = HERE / f"{self._task}-grpo.yaml"
        samples = [] if any("val_samples" in each for each in self._options.grpo) else ["grpo.val_samples_per_prompt=4"]
        paceline("eval", spec, *self._overrides("grpo"), *samples, "--model", model, "--output", output)

    def _evaluate_whole(self, name: str, model: object) -> None:
        """Evaluate a model on GSM8K's whole test, with the likeliest tokens."""
        folder, output = self._options.gsm8k, self._folder / "results" / f"{name}-whole"
        if (output / "result.json").is_file():
            return
        words = ["policy.generation.top_k=1", "policy.generation.max_new_tokens=200", "data.system_prompt=Solve."]
        if folder is not None:
            words += [f"data.validation={folder.resolve() / 'test.jsonl'}", "data.validation_config=null"]
        paceline("eval", "gsm8k", *words, "--model", model, "--output", output)

    def _compare(self, name: str, baseline: str) -> dict[str, Any]:
        """Return the paired differences of a model from another one: in all problems, and of each kind."""
        results = self._folder / "results"
        kinds = [kind for kind in self._metrics(name) if kind == "reward" or kind.startswith("reward[")]
        found = {}
        for kind in kinds:
            words = ("gate", results / name, "--baseline", results / baseline, "--metric", kind, "--json")
            verdict = json.loads(paceline(*words, statuses=(0, 1, 2)))
            found[kind] = {**verdict["difference"], "p": verdict["p"], "problems": verdict["problems"]}
        return found

    def _metrics(self, name: str) -> dict[str, float]:
        result = json.loads((self._folder / "results" / name / "result.json").read_text(encoding="utf-8"))
        return {metric: found["value"] for metric, found in result["metrics"].items()}

    def _report(self) -> None:
        report: dict[str, Any] = {}
        for name, run in self._grpo.items():
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            report[name] = speed(rows)
            if self._task != "calculator":
                baselines = ("start", f"{name.rpartition('-age-')[0]}-sft")
                report[name] |= {"metrics": self._metrics(name)}
                if self._task == "gsm8k":
                    whole = {each: self._metrics(f"{each}-whole")["reward"] for each in ("start", name)}
                    report[name]["whole test, greedy"] = whole
                report[name] |= {f"against {each}": self._compare(name, each) for each in baselines}
            report[name]["curve"] = curve_of(rows)
        (self._folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        picture = drawn({name: each["curve"] for name, each in report.items()})
        (self._folder / "curve.svg").write_text(picture, encoding="utf-8")
        print(f"{self._folder}: report.json, curve.svg")


def speed(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the minutes of GRPO, the median seconds of a step, and the tokens that the learner computes a second."""
    steps = [row for row in rows if row["kind"] == "train"]
    return {
        "minutes": (steps[-1]["time"] - steps[0]["time"] + steps[0]["step_s"]) / 60,
        "step_s": statistics.median(row["step_s"] for row in steps),
        "tokens_per_s": sum(row["row_tokens"] for row in steps) / sum(row["step_s"] for row in steps),
    }


def curve_of(rows: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """Return (minutes, reward, standard error) of each evaluation in a run."""
    start_s = min(row["time"] for row in rows if row["kind"] in ("train", "eval"))
    found = [row for row in rows if row["kind"] == "eval"]
    return [((row["time"] - start_s) / 60, row["reward"], row["reward_stderr"]) for row in found]


def drawn(curves: dict[str, list[tuple[float, float, float]]]) -> str:
    """Return a picture of curves as SVG: the reward from 0 to 1 by minutes, with standard errors."""
    longest = max((minutes for curve in curves.values() for minutes, *_ in curve), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    ]

    def at(minutes: float, reward: float) -> tuple[float, float]:
        x = MARGIN + minutes / longest * (WIDTH - 2 * MARGIN)
        return round(x, 1), round(HEIGHT - MARGIN - reward * (HEIGHT - 2 * MARGIN), 1)

    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = at(0, tick)[1]
        parts.append(
            f'<path d="M{MARGIN} {y}H{WIDTH - MARGIN}" stroke="#ddd"/><text x="8" y="{y + 4}">{tick:.2f}</text>'
        )
        parts.append(f'<text x="{at(longest * tick, 0)[0] - 8}" y="{HEIGHT - 28}">{longest * tick:.0f}</text>')
    parts.append(f'<text x="{WIDTH // 2 - 24}" y="{HEIGHT - 8}">minutes</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join("{},{}".format(*at(minutes, reward)) for minutes, reward, _ in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for minutes, reward, error in curve:
            (x, low), (_, high) = at(minutes, reward - error), at(minutes, reward + error)
            parts.append(f'<path d="M{x} {low}V{high}" stroke="{colour}"/>')
        parts.append(f'<text x="{MARGIN + 8}" y="{MARGIN + 16 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def paceline(*words: object, statuses: tuple[int, ...] = (0,)) -> str:
    """Run a command of Paceline; return what it prints."""
    return call(str(PACELINE), *map(str, words), statuses=statuses)


def call(*command: str, statuses: tuple[int, ...] = (0,)) -> str:
    """Print and run a command. A failure ends the study."""
    print(f"$ {shlex.join(command).replace(str(PACELINE), 'paceline')}", flush=True)
    as_json = "--json" in command
    done = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE if as_json else None, text=True, check=False)
    if done.returncode not in statuses:
        raise SystemExit(f"{shlex.join(command)} ended with status {done.returncode}; the same command continues")
    return done.stdout or ""


if __name__ == "__main__":
    main()
