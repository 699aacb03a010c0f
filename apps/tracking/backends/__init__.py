"""The trackers: Weights & Biases, MLflow and TensorBoard. Each imports its library when it opens."""
