"""Measures models without a run, on tasks in files and with external harnesses, and gates candidates."""

COMMANDS = {
    "Models": {
        "eval": (
            "paceline.apps.evaluation.evaluate:evaluate",
            "Measure a model on the validation set of a file, without a run.",
        ),
        "gate": (
            "paceline.apps.evaluation.gate_command:gate",
            "Decide by two evaluations whether a model may replace another.",
        ),
    }
}
