"""Estimates memory, time and cost of a run before it starts."""

COMMANDS = {
    "Before a run": {"plan": ("paceline.apps.planning.plan:plan", "Estimate a spec's memory, and say whether it fits.")}
}
