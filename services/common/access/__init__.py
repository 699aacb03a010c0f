"""Access control for calls: the caller, its token, and the roles that may make the call."""
