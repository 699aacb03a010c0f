"""Makes samples and packed batches from groups and examples."""
