"""Paceline: asynchronous, off-policy GRPO as plain services.

What everyone shares (`RunSpec`, the wire, the client) and what users touch (the command line). Nothing in this
package imports torch or one of the services at import time.
"""

__version__ = "0.1.0"
