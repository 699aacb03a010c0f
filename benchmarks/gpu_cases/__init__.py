"""What `benchmarks/gpu.py` measures, each case in a process of its own."""
