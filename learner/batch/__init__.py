"""From groups and examples to packed batches."""
