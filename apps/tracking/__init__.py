"""Sends runs to Weights & Biases, MLflow and TensorBoard."""

COMMANDS = {
    "Records of runs": {
        "track": ("paceline.apps.tracking.track:track", "Send runs to Weights & Biases, MLflow or TensorBoard.")
    }
}
