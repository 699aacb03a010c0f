"""Parts of `benchmarks/weights.py`: models, the receiving processes, and one module for each channel."""
