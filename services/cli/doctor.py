"""`paceline doctor`: the findings about this machine as a list.

Checks of this machine against one spec: its files, its GPUs and its memory. Imports torch.

Checks of what isolates user code on this machine, and programs that a reward or a tool runs because a model wrote them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from paceline.errors import InvalidInput, SpecError
from paceline.host.memory import available_bytes
from paceline.models.memory_estimate import (
    Estimate,
    estimate,
    gigabytes,
    sentence,
    shortage,
)
from paceline.models.shape import read_shape
from paceline.services.common.gpus import divide, missing_gpus, named_in
from paceline.services.common.options import directory_option, json_option, print_json
from paceline.services.local.machine_checks import Finding
from paceline.services.local.missing_paths import missing_paths
from paceline.spec import RunSpec
from paceline.user_code.box import why_no_isolation

MARKS = {"ok": "✓", "absent": "·", "fault": "✗"}


@click.command()
@click.argument("spec", required=False, type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@directory_option
@json_option
def doctor(spec: str | None, overrides: tuple[str, ...], directory: Path, as_json: bool) -> None:
    """Say what this machine has, what is missing and how to get it; exit status 1 if something has to be fixed.

    With SPEC also whether its GPUs are there, and the memory that its services take by an estimate.
    """
    from paceline.services.local.machine_checks import examine
    from paceline.spec.reading import load_spec

    wanted = load_spec(spec, overrides) if spec else None
    findings = [*examine(directory), *examine_sandbox(wanted), examine_user_code()]
    if wanted is not None:
        findings += examine_spec(wanted)
    for finding in findings:
        if as_json:
            print_json(dataclasses.asdict(finding))
        else:
            remedy = f" → {finding.remedy}" if finding.remedy else ""
            click.echo(f"{MARKS[finding.status]} {finding.name:<13} {finding.value}{remedy}")
    if any(finding.status == "fault" for finding in findings):
        raise click.exceptions.Exit(1)


def examine_spec(
    spec: RunSpec, gpu_bytes: Sequence[int] | None = None, free_bytes: int | None = None
) -> list[Finding]:
    """Return whether this machine has the local files, the GPUs and the memory that the spec asks for.

    `gpu_bytes` are the sizes of the GPUs that torch can use, and `free_bytes` the host's free memory; by default both are
    detected.
    """
    sizes = _gpus_of_torch() if gpu_bytes is None else gpu_bytes
    findings = [Finding("its files", "fault", text) for text in missing_paths(spec)]
    if named_in(spec.cluster):
        missing = missing_gpus(spec.cluster, len(sizes))
        status, value = ("fault", missing) if missing else ("ok", "all that the spec names are here")
        findings.append(Finding("its GPUs", status, value))  # type: ignore[arg-type]
    try:
        cluster, _ = divide(spec.cluster, len(sizes), rollout=spec.samples)
        spec = spec.model_copy(update={"cluster": cluster})
    except SpecError as error:
        if not any(each.name == "its GPUs" for each in findings):
            findings.append(Finding("its GPUs", "fault", str(error)))
    shape = read_shape(spec.policy.model_name)
    if shape is None:
        value = f"not estimated: no config.json of {spec.policy.model_name!r} with the usual keys is on this machine"
        return [*findings, Finding("its memory", "absent", value)]
    return [*findings, _memory(spec, estimate(spec, shape), sizes, free_bytes)]


def _memory(spec: RunSpec, needed: Estimate, gpu_bytes: Sequence[int], free_bytes: int | None) -> Finding:
    if small := _too_small(spec, needed, gpu_bytes):
        return Finding("its memory", "absent", sentence(needed, spec), small)
    free = available_bytes() if free_bytes is None else free_bytes
    if warning := shortage(spec, free):
        return Finding(
            "its memory", "absent", warning, "an estimate; train where there is more, or change these keys"
        )
    return Finding("its memory", "ok", f"{sentence(needed, spec)}; {gigabytes(free)} are free here")


def _too_small(spec: RunSpec, needed: Estimate, gpu_bytes: Sequence[int]) -> str:
    """Return which GPU has less memory than the roles on it take; empty when none has."""
    load = dict.fromkeys(range(len(gpu_bytes)), 0)
    for on_gpu, gpus, size in (
        (needed.learner_on_gpu, spec.cluster.learner_gpus, needed.learner_bytes),
        (needed.sampler_on_gpu, spec.cluster.rollout_gpus, needed.sampler_bytes),
    ):
        for gpu in gpus if on_gpu else ():
            if gpu in load:
                load[gpu] += size
    for gpu, size in load.items():
        if size > gpu_bytes[gpu]:
            return f"GPU {gpu} has {gigabytes(gpu_bytes[gpu])} for {gigabytes(size)}"
    return ""


def _gpus_of_torch() -> list[int]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        int(torch.cuda.get_device_properties(index).total_memory)
        for index in range(torch.cuda.device_count())
    ]


REMEDY = "install bubblewrap, or use a kernel with Landlock; docs/sandbox.md, for code rewards only"


def examine_sandbox(spec: RunSpec | None = None) -> list[Finding]:
    """Return what holds here, and what isolates files, network, processes, memory and kernel. A `fault` is a sandbox that `spec`
    names and that does not hold here."""
    from paceline.reward.sandbox.choosing import report

    found = report()
    faults = [] if spec is None else _faults(spec)
    if not found.holding:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.reasons.items())
        return [Finding("sandbox", "absent", f"nothing holds ({reasons})", REMEDY), *faults]
    first, *others = found.holding
    value = first + (f"; {' and '.join(others)} hold too" if len(others) > 1 else "")
    value += f"; {others[0]} holds too" if len(others) == 1 else ""
    for name, reason in found.reasons.items():
        value += f"; not {name}: {reason}"
    return [
        Finding("sandbox", "ok", value),
        *(Finding(goal, "ok", means) for goal, means in found.means.items()),
        *faults,
    ]


def examine_user_code() -> Finding:
    """Return whether user code can be isolated here, as `--require-isolation` asks for."""
    why = why_no_isolation()
    if why:
        return Finding(
            "user code", "absent", f"not isolated: {why}", "docs/security.md says what holds without"
        )
    return Finding(
        "user code", "ok", "apart from other processes; beyond loopback secrets are hidden too (Landlock)"
    )


def _faults(spec: RunSpec) -> list[Finding]:
    """Return the sandboxes of the spec's functions that do not hold here, unless other hosts score."""
    from paceline.reward.builtin import SETTINGS

    faults = []
    for index, reward in enumerate(spec.rewards):
        if reward.function == "code_tests" and spec.cluster.reward_workers:
            try:
                SETTINGS[reward.function](reward.kwargs).check_host()
            except InvalidInput as error:
                faults.append(Finding(f"rewards.{index}", "fault", str(error)))
    return faults
