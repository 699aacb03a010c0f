"""Sends runs to Weights & Biases, MLflow and TensorBoard."""

COMMANDS = {
    "What is on record": {
        "track": (
            "paceline.apps.tracking.track:track",
            "Send runs to Weights & Biases, MLflow or TensorBoard.",
        ),
    },
}
