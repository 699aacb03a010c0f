"""The vLLM engine: its processes, its weights, and the limit on its sequences."""
