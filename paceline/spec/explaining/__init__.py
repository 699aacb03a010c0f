"""Sentences about keys of the spec: what is wrong with a value, the key that was meant, what a key is for."""
