"""Converts between this project's requests and vLLM's: checks, sampling parameters, and completions from outputs. The
functions do not wait and keep no state. Versions travel through vLLM as labels, `session.step`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.errors import InvalidInput, Unavailable
from paceline.groups import Completion, Version, VersionSpan, append_span
from paceline.rollout.engine import GenerationRequest, PromptLogprobs, SamplingParams, empty_completion
from paceline.rollout.stop_strings import StopScanner, cut
from paceline.spec.sections.vllm import NOT_SPECULATED

LOWEST_TEMPERATURE = 0.01
"""Lowest temperature above 0 that vLLM uses. vLLM raises a lower temperature to this value, with only a log line; so
for a lower temperature this engine takes the likeliest token, and its log-probability is 0."""
LabelSpan = tuple[str, int, int]
"""Span of sampled tokens: label of its version, first token and end, counted from the first token that vLLM sampled."""


def label_of(version: Version) -> str:
    return f"{version.session}.{version.step}"


def version_of(label: str) -> Version:
    session, step = label.split(".")
    return Version(int(session), int(step))


def check_speculated(params: SamplingParams) -> None:
    """Raise InvalidInput for parameters with which speculative decoding does not sample exactly."""
    for name, reason in NOT_SPECULATED.items():
        if getattr(params, name):
            raise InvalidInput(
                f"{name} is {getattr(params, name)}, but the run has policy.generation.vllm_cfg.speculative, with which "
                f"{reason}; set {name} to 0"
            )


def sampling_params(request: GenerationRequest, limit: int, stop_ids: Iterable[int]) -> Any:
    """Return vLLM's parameters of a request with its `limit`; any of `stop_ids` ends it."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    params = request.params
    num_prefix = 0 if request.prefix is None else len(request.prefix.token_ids)
    room = limit - len(request.prompt_ids) - num_prefix
    watched = request.on_progress is not None or request.stop is not None
    return vllm.SamplingParams(
        n=1,
        temperature=0.0 if _is_greedy(request) else params.temperature,
        max_tokens=room,
        min_tokens=min(max(0, params.min_new_tokens - num_prefix), room),
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        seed=_seed(request.seed, num_prefix),
        stop_token_ids=sorted(stop_ids),
        ignore_eos=True,  # the end-of-sequence tokens are among the stop tokens
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE if watched else RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> Any:
    """Return vLLM's parameters of a request for the log-probabilities of its prompt. The log-probabilities are those of
    the model's own distribution, because parameters such as the temperature change only sampled tokens."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    return vllm.SamplingParams(
        n=1,
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        prompt_logprobs=1,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scored(token_ids: Sequence[int], entries: Sequence[Any], version: Version) -> PromptLogprobs:
    """Return the scored prompt of [P] `token_ids`. `entries` is vLLM's list of mappings from token id to an object with
    `logprob` and `rank`, None at the first position. Raises Unavailable for numbers that are not finite."""
    num = len(token_ids)
    logprobs, tops = np.full(num, np.nan, np.float32), np.full(num, np.nan, np.float32)
    top_ids = np.full(num, -1, np.int32)
    for index in range(1, num):
        at = entries[index]
        logprobs[index] = at[token_ids[index]].logprob
        top_ids[index] = max(at, key=lambda token_id: at[token_id].logprob)
        tops[index] = at[int(top_ids[index])].logprob
    if not np.isfinite(logprobs[1:]).all():
        raise Unavailable(
            f"the model's logits under {tuple(version)} are not finite for a given text; newer weights or "
            "policy.generation_precision=float32 may help"
        )
    return PromptLogprobs(logprobs, top_ids, tops, version)


def progress(request: GenerationRequest, output: Any, spans: list[LabelSpan]) -> Completion:
    """Return the tokens of a running request sampled so far, as a completion."""
    return _joined(request, output, spans, "abort")


def stopped(request: GenerationRequest, output: Any, spans: list[LabelSpan], scanner: StopScanner) -> Completion:
    """Return the completion up to the token that completes a stop string. vLLM may have sampled more tokens meanwhile.
    Raises Unavailable like `completion`."""
    return _finite(request, cut(_joined(request, output, spans, "stop"), scanner.num_tokens))


def completion(request: GenerationRequest, output: Any) -> Completion:
    """Return the completion of a request that has ended. Raises Unavailable if the model's numbers were not finite."""
    reason = output.finish_reason if output.finish_reason in ("stop", "length") else "abort"
    return _finite(request, _joined(request, output, reported_spans(output), reason))


def reported_spans(output: Any) -> list[LabelSpan]:
    """Return the version spans of an ended sequence's tokens, which vLLM has reported."""
    return [(span.version, span.start, span.end) for span in output.weight_versions or ()]


def _finite(request: GenerationRequest, ended: Completion) -> Completion:
    if not np.isfinite(ended.logprobs).all():
        version = tuple(ended.spans[-1][:2]) if ended.spans else None
        raise Unavailable(
            f"request {request.request_id!r}: the model's logits under {version} are not finite; "
            "newer weights or policy.generation_precision=float32 may help"
        )
    return ended


def spans_so_far(starts: list[tuple[str, int]], num_tokens: int) -> list[LabelSpan]:
    """Return the versions of an unfinished sequence's first `num_tokens`, from (label, first token) of each."""
    met = [(label, start) for label, start in starts if start < num_tokens]
    ends = [start for _, start in met[1:]] + [num_tokens]
    return [(label, start, end) for (label, start), end in zip(met, ends, strict=True)]


def _joined(request: GenerationRequest, output: Any, spans: list[LabelSpan], reason: str) -> Completion:
    """Return the prefix and the tokens that vLLM has sampled after it, as one completion."""
    prefix = request.prefix or empty_completion()
    num_new, num_prefix = len(output.token_ids), len(prefix.token_ids)
    logprobs = output.logprobs.logprobs[:num_new] if output.logprobs is not None else []
    sampled = np.array(logprobs, np.float32)
    if _is_greedy(request):
        sampled *= 0  # a NaN stays a NaN
    joined = list(prefix.spans)
    for label, start, end in spans:
        if end > start:
            append_span(joined, VersionSpan(*version_of(label), num_prefix + start, num_prefix + end))
    return Completion(
        np.concatenate([prefix.token_ids, np.array(output.token_ids, np.int32)]),
        np.concatenate([prefix.logprobs, sampled]),
        tuple(joined),
        reason,
    )


def _is_greedy(request: GenerationRequest) -> bool:
    return request.params.temperature < LOWEST_TEMPERATURE


def _seed(seed: int, position: int) -> int:
    """Return the seed of a request after `position` tokens. vLLM's generator starts again with each request, so a
    prefix needs another seed: repeated noise in one completion would not be a sample of the model's distribution."""
    if not position:
        return seed
    digest = hashlib.sha256(f"{seed}/{position}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
