"""Registers, signs, promotes, fetches and verifies models."""

COMMANDS = {
    "Models": {
        "models": (
            "paceline.apps.registry.models:models",
            "Register, promote, roll back and fetch models with their lineage and signature.",
        )
    }
}
