"""One model behind the OpenAI-compatible endpoint, without a run or a coordinator; see docs/evaluation.md."""
