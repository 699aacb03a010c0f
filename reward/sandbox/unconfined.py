"""Backend `none`: no isolation. A program runs as the caller's user and may do whatever that user may.

For trusted code, and for hosts where something else isolates the whole worker. Output, disk in the program's folder, time,
memory and threads are bounded as elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.reward.sandbox.launching import PopenChild, launch_command, new_ready
from paceline.reward.sandbox.protocol import Limits, Outcome, SandboxFailed, check_request
from paceline.reward.sandbox.readable import command, environment
from paceline.reward.sandbox.supervisor import supervise
from paceline.reward.sandbox.workspace import Workspace


class NoSandbox:
    """As `paceline.reward.sandbox.protocol.Sandbox`, without its promises of isolation."""

    name = "none"

    def run(
        self, argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b""
    ) -> Outcome:
        """As `Sandbox.run`."""
        check_request(argv, files, stdin)
        ready = new_ready()
        try:
            workspace = Workspace(files)
        except OSError as error:
            raise SandboxFailed(f"no folder could be made for the program: {error}") from error
        with workspace:
            launched = launch_command(command(argv), limits, ready, confined=False)
            return supervise(
                lambda: PopenChild(launched, workspace.path, environment(workspace.path)),
                limits,
                workspace,
                ready.encode(),
                stdin,
            )
