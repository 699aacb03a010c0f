"""The files of user code that a spec names, as `path/to/file.py:name`: reward functions, and the environment with its agent.

Whatever has to know all of them (bundles, permitted folders, checks before a start) asks here.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.spec import RunSpec


def code_paths(spec: RunSpec) -> dict[str, str]:
    """Return each `file:name` of a spec by its field. Built-in functions have no file."""
    named = {f"rewards.{index}.function": reward.function for index, reward in enumerate(spec.rewards)}
    environment = spec.environment
    for name, each in environment.classes.items():
        named[f"environment.class.{name}" if name else "environment.class"] = each
    named |= {f"environment.tools.{index}": tool for index, tool in enumerate(environment.tools)}
    named |= {"environment.agent": environment.agent, "environment.train_call": environment.train_call}
    return {field: value for field, value in named.items() if ":" in value}


def file_of(code: str) -> str:
    """Return the file of a `file:name`."""
    return code.rpartition(":")[0]


def with_code_paths(spec: RunSpec, change: Callable[[str], str]) -> RunSpec:
    """Return the spec with `change` applied to each `file:name`."""

    def changed(value: str) -> str:
        return change(value) if ":" in value else value

    environment = spec.environment
    classes = (
        changed(environment.class_)
        if isinstance(environment.class_, str)
        else {name: changed(each) for name, each in environment.class_.items()}
    )
    rewards = tuple(r.model_copy(update={"function": changed(r.function)}) for r in spec.rewards)
    section = environment.model_copy(
        update={
            "class_": classes,
            "tools": tuple(map(changed, environment.tools)),
            "agent": changed(environment.agent),
            "train_call": changed(environment.train_call),
        }
    )
    return spec.model_copy(update={"rewards": rewards, "environment": section})
