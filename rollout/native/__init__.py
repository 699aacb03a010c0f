"""The native engine: continuous batching over a Hugging Face model, on any machine."""
