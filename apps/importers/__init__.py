"""Specs from the configurations of other libraries: TRL, NeMo RL and verl."""
