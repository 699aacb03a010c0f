"""Runs on the demo's task that `benchmarks/objectives.py` and `benchmarks/age_study.py` are made of."""
