"""Requests and answers of the OpenAI API, which rollout workers and the sessions of agents speak; see docs/use/endpoint.md."""
