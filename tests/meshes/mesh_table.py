"""What every mesh of two and four ranks computes, against one rank: `make campaign NAME=meshes`.

A row for each case, a column for each mesh (replicate × shard): the largest difference of loss, gradient norm and gradients
in float32. `resumed` goes on from the checkpoint of the mesh before it; `weights` counts what is wrong with the loaded,
published and exported models. Exit status 0 only if all differences are at most 1e-5 and nothing is wrong.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path += [str(SUPPORT / name) for name in ("models", "services", "training")]  # pytest has them by its settings

from mesh_cases import CASES, TOLERANCE, save_models  # noqa: E402
from mesh_runs import MeshRun, one_rank, run_mesh  # noqa: E402

MESHES = ((1, 2), (2, 1), (1, 4), (2, 2), (4, 1))


def main() -> None:
    """Run all meshes and print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="paceline-meshes-") as name:
        models = Path(name) / "models"
        save_models(models)
        expected = one_rank(models)
        columns: dict[str, dict[str, float]] = {}
        last: MeshRun | None = None
        for replicate, shard in MESHES:
            run = run_mesh(models, Path(name) / f"{replicate}x{shard}", replicate, shard, last)
            column = {case: run.difference(case, expected[case]) for case in CASES}
            column["resumed"] = run.resumed_difference(expected["grpo"])
            wrong = [fault for kind in ("dense", "moe") for fault in run.faults(kind)]
            column["weights"] = float(len(wrong))
            print(*wrong, sep="\n", end="\n" if wrong else "")
            columns[f"{replicate} x {shard}"] = column
            last = run
    print(f"{'':8}" + "".join(f"{mesh:>10}" for mesh in columns))
    for case in next(iter(columns.values())):
        print(f"{case:8}" + "".join(f"{column[case]:10.1e}" for column in columns.values()))
    worst = max(value for column in columns.values() for value in column.values())
    print(f"meshes: largest difference {worst:.1e}, {'all hold' if worst <= TOLERANCE else 'NOT EQUAL'}")
    raise SystemExit(0 if worst <= TOLERANCE else 1)


if __name__ == "__main__":
    main()
