"""Serves one model through the OpenAI-compatible endpoint, and writes traces with feedback."""

COMMANDS = {
    "paceline serve": {
        "model": (
            "paceline.apps.model_server.serve_model:main",
            "Serve one model through the OpenAI-compatible endpoint, without a run.",
        )
    }
}
