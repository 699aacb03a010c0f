"""torch's own log of a service: without the stack traces that it writes about peers that have gone."""

from __future__ import annotations

QUIET_TORCH = ("TORCH_CPP_LOG_LEVEL", "ERROR")
"""Variable and value to set before torch is imported. A link's store warns of every connection that its peer closed, as
at each normal stop, with the frames of a C++ stack."""
