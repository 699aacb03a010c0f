"""The trackers: Weights & Biases, MLflow, TensorBoard and webhooks. Each imports its library when it opens."""
