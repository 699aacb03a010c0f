"""Every objective on the demo's task, before and after: one command, one table.

    python benchmarks/objectives.py [--families policy,examples] [--only gspo,cispo] [--steps 40] [--lag 2] [--updates 2] [--json]

The demo's model first imitates a teacher who errs in half of its answers; every objective then trains from there. A family
is a module in objective_runs/ with `NAMES` and `run(name, files, taught, options)`, which returns one row: `measure` (what
the numbers are), `before`, `after`, `seconds` and whatever else it has to show. More of `measure` is better; the command
fails unless every objective gains. Each row is printed when it is there (on stderr with --json). Further arguments of the
form key=value change the spec of policy runs. Recorded results: docs/use/objectives.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from objective_runs.policy import imitate_teacher
from short_form import parse

from paceline.services.demo.run import make_files

FAMILIES = ("policy", "examples", "distillation")


def main() -> None:
    """Runs the objectives asked for and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated")
    parser.add_argument("--only", default="", help="objectives, comma-separated; default all of the families")
    parser.add_argument("--steps", type=int, default=40, help="steps of each objective")
    parser.add_argument("--prompts", type=int, default=32, help="policy, distillation: groups of each batch")
    parser.add_argument("--lag", type=int, default=2, help="policy: age of the sampler's weights in steps")
    parser.add_argument("--updates", type=int, default=2, help="policy: updates that each batch gets")
    parser.add_argument("--held-out", type=int, default=512, help="examples that before and after are about")
    parser.add_argument("--teacher-steps", type=int, default=600)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, progress on stderr")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parse(
        parser, only="grpo,dpo_sigmoid,distillation_forward", steps=2, prompts=4, held_out=16, teacher_steps=10
    )
    torch.set_num_threads(1)
    modules = {name: importlib.import_module(f"objective_runs.{name}") for name in options.families.split(",")}
    chosen = {
        name: family
        for family, module in modules.items()
        for name in module.NAMES
        if not options.only or name in options.only.split(",")
    }
    screen = sys.stderr if options.json else sys.stdout
    table: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder), seed=0)
        taught = imitate_teacher(files, options.teacher_steps)
        for name, family in chosen.items():
            row = table[name] = {"family": family, **modules[family].run(name, files, taught, options)}
            print(f"{len(table):3d}/{len(chosen)}  {as_line(name, row)}", file=screen, flush=True)
    if options.json:
        print(json.dumps(table))
    sys.exit(int(not options.short and any(row["after"] <= row["before"] for row in table.values())))


def as_line(name: str, row: dict[str, Any]) -> str:
    """One row for people."""
    known = ("family", "measure", "before", "after", "seconds")
    others = "  ".join(f"{key} {value}" for key, value in row.items() if key not in known)
    return f"{name:<24}{row['measure']:<18}{row['before']:7.3f} →{row['after']:7.3f}{row['seconds']:6.0f} s  {others}"


if __name__ == "__main__":
    main()
