"""Sandboxes: programs that are not trusted run where they can do no harm.

`make_sandbox("auto")` returns the first backend that holds on this host, and `run(argv, files, limits)` an `Outcome`. For
code rewards, tools of environments and whatever else executes what a model wrote. docs/use/sandbox.md has the threat model.
"""

from paceline.reward.sandbox.choosing import make_sandbox
from paceline.reward.sandbox.protocol import PYTHON, Limits, Outcome, Sandbox, SandboxFailed

__all__ = ["PYTHON", "Limits", "Outcome", "Sandbox", "SandboxFailed", "make_sandbox"]
