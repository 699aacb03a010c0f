"""User code of environments and agents, in processes of its own."""
