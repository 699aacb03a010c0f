"""Searches over the keys of a spec, by runs one after the other."""

COMMANDS = {
    "Before a run": {
        "sweep": ("paceline.apps.sweeps.sweep:sweep", "Search over a spec's keys, by runs one after the other.")
    }
}
