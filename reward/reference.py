"""Computes the run's reference in the reward pool: log-probabilities of samples by a teacher or the initial policy.

Promise: the numbers are log softmax(logits / temperature) at the sampled tokens, equal to the learner's reference up to
rounding. Only the logits of `logprob_chunk_tokens` tokens exist at a time. `ReferenceScorer` computes one group after
another on a separate thread, so that the service's event loop continues; a call of `score` waits for the groups of
earlier calls.

Suffixes: P prompt tokens, T tokens of a completion, R tokens of a padded row, B rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.tokens import check_same_tokenizer
from paceline.errors import InvalidInput
from paceline.files.model_source import model_source
from paceline.groups import FloatArray, IntArray
from paceline.models.loading import fault_of_load, resolved_dtype
from paceline.models.pretrained import load_pretrained
from paceline.spec import PolicySection, RunSpec

if TYPE_CHECKING:
    import torch


class ReferenceModel:
    """A frozen, complete causal language model on the first GPU that this process sees, else on the CPU."""

    def __init__(self, policy: PolicySection, temperature: float) -> None:
        """Load `policy.model_name` in `policy.precision`. Raises InvalidInput if there is no such model, or if its head
        cannot give log-probabilities in chunks."""
        import torch

        from paceline.models.logits import body_of, logit_rule

        self._temperature = temperature
        self._row_tokens = policy.row_tokens
        self._chunk_tokens = policy.logprob_chunk_tokens
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(torch, resolved_dtype(policy.precision, self._device.type))
        model = _load(policy.model_name, dtype)
        self._rule = logit_rule(model, f"the reference {policy.model_name!r}")
        self._body = body_of(model)
        self._model = model.to(self._device)

    def logprobs(self, prompt_ids: IntArray, completions: Sequence[IntArray]) -> list[FloatArray]:
        """Return [T] for each completion: the log-probability of its tokens after the prompt, in nats, float32.

        Rows are padded at their end, which does not affect a causal model. Completions of similar length share a pass
        of at most `policy.train_mb_tokens` tokens, or of one completion. Raises InvalidInput if a completion does not
        fit into memory or has a log-probability that is not finite.
        """
        import torch

        found: list[FloatArray] = [np.empty(0, np.float32)] * len(completions)
        try:
            with torch.inference_mode():
                for indices in self._passes(len(prompt_ids), [len(ids) for ids in completions]):
                    chosen = [completions[index] for index in indices]
                    for index, values in zip(indices, self._ask(prompt_ids, chosen), strict=True):
                        found[index] = values
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            lengths = [len(prompt_ids) + len(ids) for ids in completions]
            raise InvalidInput(
                f"the reference ran out of memory on completions of up to {max(lengths)} tokens with the prompt; lower "
                "policy.train_mb_tokens, or give the reward workers more memory"
            ) from None
        if not all(np.isfinite(values).all() for values in found):
            raise InvalidInput("the reference gives a log-probability that is not finite")
        return found

    def _passes(self, prompt_tokens: int, lengths: list[int]) -> Iterator[list[int]]:
        indices = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
        while indices:
            row_tokens = prompt_tokens + lengths[indices[0]] - 1
            count = max(1, self._row_tokens // row_tokens)
            yield indices[:count]
            indices = indices[count:]

    def _ask(self, prompt_ids: IntArray, completions: list[IntArray]) -> list[FloatArray]:
        import torch

        prompt = len(prompt_ids)
        rows_BR = np.zeros((len(completions), prompt + max(map(len, completions)) - 1), np.int64)
        rows_BR[:, :prompt] = prompt_ids
        for row, ids in enumerate(completions):
            rows_BR[row, prompt : prompt + len(ids) - 1] = ids[:-1]
        hidden_BRH = self._body(input_ids=torch.from_numpy(rows_BR).to(self._device), use_cache=False).last_hidden_state
        return [self._chosen(hidden_BRH[row, prompt - 1 :], ids) for row, ids in enumerate(completions)]

    def _chosen(self, hidden: torch.Tensor, ids: IntArray) -> FloatArray:
        import torch

        targets_T = torch.from_numpy(ids.astype(np.int64)).to(self._device)
        head = self._model.get_output_embeddings()
        parts = []
        for start in range(0, len(ids), self._chunk_tokens):
            chunk_T = targets_T[start : start + self._chunk_tokens]
            logits_TV = self._rule.logits(head(hidden[start : start + len(chunk_T)]).float()) / self._temperature
            parts.append(logits_TV.gather(-1, chunk_T[:, None])[:, 0] - logits_TV.logsumexp(-1))
        return torch.cat(parts).cpu().numpy()


class ReferenceScorer:
    """Computes the reference of one run on a thread. An async context manager.

    async with ReferenceScorer(spec) as scorer:
        logprobs = await scorer.score(prompt_ids, completions)
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._thread = ThreadPoolExecutor(1, "reference")
        self._model: ReferenceModel | None = None

    async def __aenter__(self) -> ReferenceScorer:
        if self._spec.pool_serves_reference:
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
            except BaseException:
                self._thread.shutdown(wait=False, cancel_futures=True)
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._model = None

    async def score(self, prompt_ids: IntArray, completions: Sequence[IntArray]) -> list[FloatArray]:
        """Return the result of `ReferenceModel.logprobs`, after those of earlier calls. Raises the errors of that
        method, and InvalidInput if the reward pool does not serve the run's reference."""
        if self._model is None:
            raise InvalidInput("a task needs the reference, but this run has none in the reward pool")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._model.logprobs, prompt_ids, completions)

    def _load(self) -> None:
        frozen = self._spec.frozen_policy
        assert frozen is not None, "pool_serves_reference is true"
        if self._spec.has_teacher:
            check_same_tokenizer(self._spec.policy, frozen)
        self._model = ReferenceModel(frozen, self._spec.policy.generation.temperature)


def _load(name: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        source = model_source(name, "the reference", weights=True)
        model = load_pretrained(AutoModelForCausalLM, name, "the reference", dtype=dtype, source=source)
    except Exception as error:
        fault = fault_of_load("the reference", name, error)
        if fault is None:
            raise
        raise fault from None
    if model.get_output_embeddings() is None:
        raise InvalidInput(f"the reference {name!r} has no LM head; name a causal language model")
    return model.requires_grad_(False).eval()
