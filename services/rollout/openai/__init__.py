"""The OpenAI-compatible HTTP endpoint of a rollout worker; see docs/use/endpoint.md."""
