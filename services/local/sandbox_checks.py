"""Checks of what isolates user code on this machine, and programs that a reward or a tool runs because a model wrote them."""

from __future__ import annotations

from paceline.errors import InvalidInput
from paceline.services.local.machine_checks import Finding
from paceline.spec import RunSpec
from paceline.user_code.box import why_no_isolation

REMEDY = "install bubblewrap, or use a kernel with Landlock; docs/sandbox.md, for code rewards only"


def examine_sandbox(spec: RunSpec | None = None) -> list[Finding]:
    """Return what holds here, and what isolates files, network, processes, memory and kernel. A `fault` is a sandbox that `spec`
    names and that does not hold here."""
    from paceline.reward.sandbox.report import report

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
