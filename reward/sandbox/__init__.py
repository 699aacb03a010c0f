"""Runs untrusted programs in sandboxes, where they can do no harm.

`make_sandbox("auto")` returns the first backend that holds on this host; `run(argv, files, limits)` returns an
`Outcome`. It serves code rewards, tools of environments, and other code that a model writes. docs/use/sandbox.md has
the threat model.
"""

from paceline.reward.sandbox.choosing import make_sandbox
from paceline.reward.sandbox.protocol import PYTHON, Limits, Outcome, Sandbox, SandboxFailed

__all__ = ["PYTHON", "Limits", "Outcome", "Sandbox", "SandboxFailed", "make_sandbox"]
