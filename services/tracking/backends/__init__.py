"""The trackers: Weights & Biases, trackio, MLflow and TensorBoard. Each imports its library when it opens."""
