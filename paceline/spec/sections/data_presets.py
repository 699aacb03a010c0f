"""Names and columns of public data sets, by a short name (`data.preset`).

Promise: a preset only fills in what the spec leaves out, so the resolved spec shows every value; `data.train` reads a local copy
with the same columns.

Columns are those of the cards on the hub: https://huggingface.co/datasets/ followed by the name in `train`.
"""

from __future__ import annotations

from typing import Any, Literal

DataPresetName = Literal["openmathinstruct2", "helpsteer3", "deepscaler", "tldr", "ultrafeedback"]

DATA_PRESETS: dict[DataPresetName, dict[str, Any]] = {
    # problem, generated_solution, expected_answer, problem_source. With math_accuracy: kwargs {answer_column: expected_answer}.
    "openmathinstruct2": {
        "train": "nvidia/OpenMathInstruct-2",
        "prompt_key": "problem",
        "completion_key": "generated_solution",
    },
    # domain, language, context (messages), response1, response2, overall_preference (-3: response1 is much better, 0: equal,
    # 3: response2 is much better), individual_preference. Its configuration `preference` is the default one.
    "helpsteer3": {
        "train": "nvidia/HelpSteer3",
        "validation_split": "validation",
        "prompt_key": "context",
        "chosen_key": "response1",
        "rejected_key": "response2",
        "preference_key": "overall_preference",
    },
    # problem, answer, solution.
    "deepscaler": {
        "train": "agentica-org/DeepScaleR-Preview-Dataset",
        "prompt_key": "problem",
        "completion_key": "solution",
    },
    # prompt, completion.
    "tldr": {"train": "trl-lib/tldr"},
    # chosen and rejected (whole conversations), score_chosen, score_rejected.
    "ultrafeedback": {"train": "trl-lib/ultrafeedback_binarized"},
}


def with_preset(values: Any) -> Any:
    """Return the values of a `data` section with those of its preset for keys that it leaves out. An unknown preset stays, and
    is refused as any other wrong value."""
    if not isinstance(values, dict):
        return values
    presets: dict[Any, dict[str, Any]] = {**DATA_PRESETS}
    name = values.get("preset")
    return {**presets.get(name, {}), **values} if isinstance(name, str) else values
