"""Servers over gRPC and HTTP with their limits, and their addresses for others."""
