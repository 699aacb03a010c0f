"""Requests and answers of the OpenAI API, for rollout workers and the conversations of agents; see docs/use/endpoint.md."""
