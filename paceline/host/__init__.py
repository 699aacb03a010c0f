"""Measures and controls the machine and this process: memory, cores, GPUs, isolation, the end of processes, oneDNN."""
