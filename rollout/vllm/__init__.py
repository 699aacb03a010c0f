"""The vLLM engine: its processes, its weights, and how much it is given to do."""
