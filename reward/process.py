"""One reward process, as the runner sees it.

runner → process    {"load": [{function, label, kwargs, memory_bytes, timeout_s}], "num_processes": P}   once, first
                    {"group": {prompts, completions, completion_ids, columns, trainer_state}}   no reply
                    {"call": i}   function i on the last group
process → runner    {"loaded": F} | {"refused": text, "passing": bool}
                    {"rewards": [C], "metrics": {name: [sum, count]}} | {"raised": text, "out_of_memory": bool} | {"invalid": text}
                    each with {"usage": {name: sum}}, of its requests to services

A process that is `out_of_memory` should not be used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.reward.endpoints.settings import KEY_VARIABLE
from paceline.reward.sandbox.remote import TOKEN_VARIABLE
from paceline.spec import RewardFunctionSection
from paceline.user_code.frames import encode
from paceline.user_code.process import UserProcess
from paceline.user_code.surroundings import Surroundings


class RewardProcess(UserProcess):
    """One child process with all functions of a run loaded. Used by one caller at a time."""

    def __init__(
        self, functions: Sequence[RewardFunctionSection], start_timeout_s: float, num_processes: int = 1
    ) -> None:
        """Set the functions; `start` starts the process. start_timeout_s: limit of the start with the functions' imports.
        num_processes: those of the runner, which share the limits of services."""
        functions_to_load = [
            {
                "function": f.function,
                "label": f.label,
                "kwargs": f.kwargs,
                "memory_bytes": f.memory_mb << 20,
                "timeout_s": f.timeout_s,
            }
            for f in functions
        ]
        load = encode({"load": functions_to_load, "num_processes": num_processes})
        code = tuple(f.function.rpartition(":")[0] for f in functions)
        surroundings = Surroundings(code, service_variables(functions), runs_sandboxed_only(functions))
        super().__init__("paceline.reward.worker", load, start_timeout_s, surroundings)


def runs_sandboxed_only(functions: Sequence[RewardFunctionSection]) -> bool:
    """Return whether all functions are built-in and one runs programs in its sandbox, which opens no further files to them."""
    has_programs = any(f.function == "code_tests" for f in functions)
    is_open = any(f.kwargs.get("sandbox") == "none" or f.kwargs.get("readable") for f in functions)
    return has_programs and not is_open and not any(":" in f.function for f in functions)


def service_variables(functions: Sequence[RewardFunctionSection]) -> tuple[str, ...]:
    """Return the environment variables with which built-in functions authenticate themselves to the services that they name."""
    found = []
    for kwargs in (f.kwargs for f in functions if ":" not in f.function):
        endpoint = kwargs.get("endpoint")
        key = endpoint.get("api_key_env") if isinstance(endpoint, Mapping) else None
        if isinstance(key, str) and key.endswith(KEY_VARIABLE):
            found.append(key)
        if kwargs.get("sandbox") == "remote":
            found.append(TOKEN_VARIABLE)
    return tuple(found)
