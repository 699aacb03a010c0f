"""Conversion of weights between Hugging Face folders and checkpoints of torch.distributed.checkpoint."""
