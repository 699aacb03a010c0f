"""One model behind the OpenAI-compatible endpoint, which records traces and feedback."""

COMMANDS = {
    "paceline serve": {
        "model": (
            "paceline.apps.model_server.serve_model:main",
            "One model behind the OpenAI-compatible endpoint, without a run.",
        ),
    },
}
"""Commands of the app, by the heading of `paceline --help`."""
