"""Statistics of evaluations, their result files, and the gate between two of them; see docs/evaluation.md."""
