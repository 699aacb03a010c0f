"""The control plane's workers: joining, assignments, reports, leaving."""
