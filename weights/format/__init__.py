"""Lays out, checks and codes the bytes of a version, in the same way for all weight channels."""
