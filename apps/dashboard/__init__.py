"""A page that shows runs, and the REST interface to their records."""

COMMANDS = {
    "paceline serve": {
        "dashboard": (
            "paceline.apps.dashboard.main:main",
            "A page that shows runs, and their records as JSON over HTTP.",
        ),
    },
}
"""Commands of the app, by the heading of `paceline --help`."""
