"""Writes, converts, pairs and compares traces."""

COMMANDS = {
    "Records of runs": {
        "traces": (
            "paceline.apps.traces.traces:traces",
            "Write a run's samples as traces, convert traces, make preference pairs of them, or compare two models.",
        )
    }
}
