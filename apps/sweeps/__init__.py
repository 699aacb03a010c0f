"""Searches over the keys of a spec, by runs one after the other."""

COMMANDS = {
    "Before a run": {
        "sweep": (
            "paceline.apps.sweeps.sweep:sweep",
            "Search over keys of a spec, by runs one after the other.",
        ),
    },
}
"""Commands of the app, by the heading of `paceline --help`."""
