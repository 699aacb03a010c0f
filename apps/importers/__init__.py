"""Writes specs from configurations of TRL, NeMo RL, verl and prime-rl."""

COMMANDS = {
    "Before a run": {
        "import": (
            "paceline.apps.importers.import_spec:import_spec",
            "Write a spec from a configuration of TRL, NeMo RL, verl or prime-rl.",
        )
    }
}
