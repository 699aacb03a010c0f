"""The machine and this process: memory, the end of processes, oneDNN."""
