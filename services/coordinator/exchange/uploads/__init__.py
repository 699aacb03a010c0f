"""Uploaded groups: decoding, checks, and storage of their bytes."""
