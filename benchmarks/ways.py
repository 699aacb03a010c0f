"""Which product files a group, a weight version and a spec enter in the smallest run: `python benchmarks/ways.py`.

    python benchmarks/ways.py [--tree FOLDER] [--python PROGRAM] [--files]

Starts `paceline up` on a small random model with a profiler in every process, which notes the file of each call below one of
ROOTS, of threads and tasks that these start too, and above ENDS. `__init__.py`, logs and spans are not counted. Another checkout needs an interpreter that
imports it. `--files` lists the files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from short_form import parse

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("paceline", "weights", "services", "learner", "rollout", "reward", "environment", "apps")
ROOTS = {
    # lease, generation, commit, scores, batch, step
    "group": [
        "handle",
        "handle_leases",
        "RolloutRun._generate",
        "NativeEngine._run",
        "RewardWorker._score",
        "LearnerRun._next_batch",
        "LearnerRun._train_step",
    ],
    # staged, announced, read by the host's process, loaded, acknowledged
    "version": [
        "Publishing.publish",
        "Relay.take_plan",
        "Relay._read_forever",
        "Relay._tell_forever",
        "_Client.run",
        "RolloutWeights.take_plan",
        "HostReceiver._reply",
        "HostReceiver._load_forever",
    ],
    # read, checked, submitted, started, read by a worker, until there is a trainer
    "spec": [
        "load_spec",
        "placed",
        "Client.submit",
        "RunServicer.Submit",
        "RunStarter.start_next",
        "LearnerRun._read",
    ],
}
"""Functions where a way begins in a process, by qualified name."""
ENDS = {
    "group": ["Publishing.publish", "LearnerRun._begin_save", "LearnerRun._validate", "LearnerRun._log_progress"],
    "version": [],
    "spec": ["Trainer.__init__"],
}
"""Functions below which a way is not followed: a version's way, checkpoints, the model."""
ASIDE = ("tracing.py", "rate_limited_log.py", "progress_log.py")
"""Files of logs and spans, which do not count."""
PROFILER = """\
import os, sys, threading
TREE, OUT, ROOTS, ENDS = {tree!r}, {out!r}, {roots!r}, {ends!r}
OF = {{name: way for way, names in ROOTS.items() for name in names}}
seen, place, running = set(), {{}}, threading.local()
out = os.open(OUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def of_product(name):
    if name not in place:
        real = os.path.realpath(name)
        place[name] = os.path.relpath(real, TREE) if real.startswith(TREE + os.sep) and ".venv" not in real else None
    return place[name]


def note(frame, event, argument):
    if event != "call" or (file := of_product(frame.f_code.co_filename)) is None:
        return
    if all((way, file) in seen for way in ROOTS):
        return
    at, ended = frame, set()
    while at is not None:
        if of_product(at.f_code.co_filename):
            name = at.f_code.co_qualname
            if (way := OF.get(name)) and way not in ended and (way, file) not in seen:
                seen.add((way, file))
                os.write(out, f"{{way}} {{file}}\\n".encode())
            ended |= {{way for way, names in ENDS.items() if name in names and at is not frame}}
        at = at.f_back


threading.setprofile(note)
sys.setprofile(note)
"""
RUN = """\
import json, sys
from pathlib import Path
try:
    from paceline.services.demo.task import make_model
    main = "paceline.services.cli.main"
except ImportError:
    from services.demo.model import make_model
    main = "services.cli.main"
make_model(Path("model"), seed=0, hidden=32, layers=1, heads=2)
Path("rows.jsonl").write_text("".join(json.dumps(dict(prompt=f"{n}+1=", answer=str(n + 1))) + "\\n" for n in range(4)))
Path("spec.yaml").write_text(json.dumps(dict(
    policy=dict(model_name="model", max_total_sequence_length=32, generation=dict(max_new_tokens=8)),
    data=dict(train="rows.jsonl"), rewards=[dict(function="exact_match")], cluster=dict(rollout_workers=1, device="cpu"),
    grpo=dict(num_prompts_per_step=2, num_generations_per_prompt=2, max_num_steps=2),
)))
print(main)
"""


def traced(tree: Path, python: str) -> dict[str, list[str]]:
    """Run the smallest run of a tree, and return the files of each way. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run([python, "-c", RUN], cwd=folder, check=True, capture_output=True, text=True)
        out = Path(folder, "ways.txt")
        out.touch()
        hook = Path(folder, "hook")
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(PROFILER.format(tree=str(tree), out=str(out), roots=ROOTS, ends=ENDS))
        command = [
            python,
            "-c",
            f"from {made.stdout.split()[-1]} import main; main()",
            "up",
            "spec.yaml",
            "--no-page",
            "--port",
            "0",
        ]
        subprocess.run(command, cwd=folder, check=True, env={**os.environ, "PYTHONPATH": str(hook)})
        found = sorted(set(out.read_text().splitlines()))
    ways: dict[str, list[str]] = {way: [] for way in ROOTS}
    for line in found:
        way, _, file = line.partition(" ")
        if file.startswith(PRODUCT) and not file.endswith(("__init__.py", *ASIDE)):
            ways[way].append(file)
    return ways


def main() -> None:
    """Print the number of files and folders of each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--files", action="store_true")
    options = parse(parser)
    ways = traced(options.tree.resolve(), options.python)
    for way, files in ways.items():
        folders = Counter(str(Path(file).parent) for file in files)
        print(f"{way}: {len(files)} files in {len(folders)} folders")
        if options.files:
            print(json.dumps(files, indent=1))


if __name__ == "__main__":
    main()
