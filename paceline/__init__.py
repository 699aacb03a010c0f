"""Paceline: asynchronous, off-policy GRPO as plain services.

The core that all packages share: `RunSpec`, the wire, and the client. Nothing in this package imports torch or one of
the services at import time.
"""

__version__ = "0.1.0"
