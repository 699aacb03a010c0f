"""Traces as data: written, converted, paired and compared."""

COMMANDS = {
    "Records of runs": {
        "traces": (
            "paceline.apps.traces.traces:traces",
            "Write what a run has sampled as traces, make preference pairs of traces, or compare two models.",
        ),
    },
}
"""Commands of the app, by the heading of `paceline --help`."""
