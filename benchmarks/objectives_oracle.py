"""Paceline's objectives against TRL 1.16's own code on the same tensors, in value and gradient.

    python benchmarks/objectives_oracle.py [--json]

Policy losses on eight ragged sequences of up to 24 tokens, one of them empty, in float64, with ratios far outside every
clip; preference losses on four pairs. TRL runs
in a separate environment (`.venv-trl`, made on first use). Exits with 1 if anything differs by more than 1e-5. Needs
no GPU and takes seconds. Recorded results: docs/use/objectives.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from end_to_end import trl_environment
from oracle import preferences
from oracle.cases import CASES
from safetensors.torch import load_file, save_file
from short_form import parse
from torch import Tensor

from paceline.learner.objectives.base import Denominators, TokenArrays
from paceline.learner.objectives.policy import policy_loss
from paceline.spec import LossSection

LENGTHS = (24, 1, 9, 0, 17, 5, 24, 12)
MAX_TOKENS = 32
TOLERANCE = 1e-5


def make_batch(seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64)

    current = -noise(1.0).abs() - 0.05
    old = current - noise(0.3)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).double()
    # Groups of two: one without contrast; the last pair's ratios are extreme.
    advantages = torch.tensor([1.2, -1.2, 0.4, -0.4, 0.0, 0.0, 2.5, -2.5], dtype=torch.float64)
    old[6:, ::3] -= 6.0
    old[6:, 1::3] += 6.0
    return {
        "current": current,
        "old": old,
        "sampling": old - noise(0.35),
        "reference": current + noise(0.5),
        "entropy": noise(1.0).abs(),
        "mask": mask,
        "advantages": advantages,
        "max_tokens": torch.tensor(MAX_TOKENS),
    }


def paceline_side(batch: dict[str, Tensor], settings: dict[str, object]) -> dict[str, Tensor]:
    """Loss and gradients, the latter laid out as TRL's [B, T]."""
    config = LossSection.model_validate(settings)
    active = batch["mask"].bool()
    row_N = active.nonzero()[:, 0]
    kept = torch.tensor([i for i, length in enumerate(LENGTHS) if length])
    sequence_N = torch.searchsorted(kept, row_N)
    current_N = batch["current"][active].clone().requires_grad_()
    entropy_N = batch["entropy"][active].clone().requires_grad_()
    in_loss = config.reference_policy_kl_penalty > 0 and not config.use_kl_in_reward
    tokens = TokenArrays(
        current_N=current_N,
        entropy_N=entropy_N,
        lengths_N=torch.tensor(LENGTHS, dtype=torch.float64)[row_N],
        sequence_N=sequence_N,
        num_sequences=len(kept),
        behaviour_N=batch["sampling"][active],
        proximal_N=batch["old"][active],
        reference_N=batch["reference"][active] if in_loss else None,
        advantages_N=batch["advantages"][row_N],
    )
    loss = policy_loss(tokens, Denominators(sum(LENGTHS), len(LENGTHS), MAX_TOKENS, 1), config).loss
    gradients = torch.autograd.grad(loss, (current_N, entropy_N), allow_unused=True, materialize_grads=True)
    laid_out = [torch.zeros_like(batch["mask"]).masked_scatter(active, gradient) for gradient in gradients]
    return {"loss": loss.detach(), "logps": laid_out[0], "entropy": laid_out[1]}


def differences() -> dict[str, dict[str, float]]:
    """By objective: TRL's loss and the largest absolute differences of value and gradient."""
    batch = make_batch()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(batch, folder / "batch.safetensors")
        trl_environment.run_side(Path(__file__).parent / "oracle" / "trl_side.py", folder)
        theirs = load_file(folder / "trl.safetensors")
    table = {}
    for name, case in CASES.items():
        ours = paceline_side(batch, case.paceline)
        if case.empty_has_a_loss:
            empty = batch["mask"].sum(1) == 0
            ours["loss"] = ours["loss"] - batch["advantages"][empty].sum() / len(LENGTHS)
        table[name] = {
            "loss": theirs[f"{name}/loss"].item(),
            "value_difference": abs(ours["loss"] - theirs[f"{name}/loss"]).item(),
            "gradient_difference": max(
                (ours[key] - theirs[f"{name}/{key}"]).abs().max().item() for key in ("logps", "entropy")
            ),
            "gradient_norm": theirs[f"{name}/logps"].norm().item(),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    options = parse(parser)
    if options.short and not trl_environment.is_made():
        print(f"skipped: {trl_environment.ENVIRONMENT} is made on the first use without --short", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as name:
        table = {**differences(), **preferences.differences(Path(name))}
    if options.json:
        print(json.dumps(table))
    else:
        print(f"{'objective':<34}{'TRL loss':>12}{'|Δ value|':>12}{'|Δ gradient|':>14}{'‖gradient‖':>12}")
        for name, row in table.items():
            print(
                f"{name:<34}{row['loss']:12.4f}{row['value_difference']:12.1e}"
                f"{row['gradient_difference']:14.1e}{row['gradient_norm']:12.3g}"
            )
    worst = max(max(row["value_difference"], row["gradient_difference"]) for row in table.values())
    sys.exit(int(not worst <= TOLERANCE))


if __name__ == "__main__":
    main()
