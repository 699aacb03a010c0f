"""Servers over gRPC and HTTP with their limits, and the addresses by which others reach them."""
