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

from collections.abc import Sequence

from paceline.spec import RewardFunctionSection
from paceline.user_code.frames import encode
from paceline.user_code.process import UserProcess


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
        super().__init__("reward.worker", load, start_timeout_s)
