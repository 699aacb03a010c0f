"""What the learner leaves on disk: checkpoints and exports."""
