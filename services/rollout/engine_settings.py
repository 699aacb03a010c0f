"""Settings of one pool's engines (`--engine KEY=VALUE`): rollout workers of one run may have different engines and sizes.

Only keys of `policy.generation` that say how a worker computes can differ; what it samples from is the run's.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from paceline.errors import InvalidInput, SpecError
from paceline.spec import RunSpec
from paceline.spec.reading import apply_override, parse_spec

KEYS = ("backend", "max_batch_size", "stall_s", "vllm_cfg", "vllm_kwargs")
"""Keys below policy.generation that a worker may set."""
OF_VLLM = ("vllm_cfg", "vllm_kwargs")


def check_settings(
    _context: click.Context, _option: click.Parameter, settings: tuple[str, ...]
) -> tuple[str, ...]:
    """Callback of --engine. Raises click.UsageError for a setting that is not a worker's."""
    for setting in settings:
        dotted, equals, _ = setting.partition("=")
        key = dotted.removeprefix("policy.generation.")
        if not equals or key.partition(".")[0] not in KEYS:
            raise click.UsageError(
                f"--engine {setting!r}: it takes KEY=VALUE with a key of policy.generation that concerns this worker alone "
                f"({', '.join(KEYS)}); other keys are set in the run's spec"
            )
    return tuple(setting.removeprefix("policy.generation.") for setting in settings)


def with_engine_settings(spec: RunSpec, settings: Sequence[str]) -> RunSpec:
    """Return the spec with the worker's own engine settings. A worker with another backend than vLLM drops the run's vLLM
    settings. Raises InvalidInput for a combination that no spec may have."""
    if not settings:
        return spec
    tree = spec.model_dump(mode="json")
    try:
        for setting in settings:
            apply_override(tree, f"policy.generation.{setting}")
        generation = tree["policy"]["generation"]
        if generation["backend"] == "native" and not any(setting.startswith(OF_VLLM) for setting in settings):
            for name in OF_VLLM:
                generation.pop(name, None)
        return parse_spec(tree)
    except SpecError as error:
        raise InvalidInput(f"--engine {' '.join(settings)} does not fit the run: {error}") from None


engine_option = click.option(
    "--engine",
    "engine_settings",
    multiple=True,
    metavar="KEY=VALUE",
    callback=check_settings,
    help="Setting of policy.generation for this worker alone, such as backend=vllm, max_batch_size=256 or "
    "vllm_cfg.tensor_parallel_size=2; may be given several times.",
)
