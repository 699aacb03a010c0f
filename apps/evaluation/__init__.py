"""Measures models without a run, on tasks of files and of outside harnesses, and decides by two evaluations."""

COMMANDS = {
    "Models": {
        "eval": (
            "paceline.apps.evaluation.evaluate:evaluate",
            "Measure a model on the validation set of a file, without a run.",
        ),
        "gate": (
            "paceline.apps.evaluation.gate_command:gate",
            "Say whether a model may take the place of another, by two evaluations.",
        ),
    },
}
"""Commands of the app, by the heading of `paceline --help`."""
