"""Memory, time and cost of a run, estimated before it starts."""

COMMANDS = {
    "Before a run": {
        "plan": (
            "paceline.apps.planning.plan:plan",
            "Estimate the memory that a spec takes, and say whether it fits.",
        ),
    },
}
"""Commands of the app, by the heading of `paceline --help`."""
