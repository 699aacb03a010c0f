"""Registered models: made, signed, promoted, fetched and verified."""

COMMANDS = {
    "Models": {
        "models": (
            "paceline.apps.registry.models:models",
            "Register, promote, roll back and fetch models with their lineage and signature.",
        ),
    },
}
"""Commands of the app, by the heading of `paceline --help`."""
