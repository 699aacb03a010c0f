"""Runs the user code of environments and agents in separate processes."""
