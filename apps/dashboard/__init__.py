"""A web page that shows runs, and a REST interface to their records."""

COMMANDS = {
    "paceline serve": {
        "dashboard": (
            "paceline.apps.dashboard.main:main",
            "A page that shows runs, and their records as JSON over HTTP.",
        )
    }
}
