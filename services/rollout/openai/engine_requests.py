"""Converts a request of the API to the engine's input: token ids, parameters, and a sampler for each choice. A call
that `tool_choice` demands is begun in the prompt, in the words of the chat template, so the model can only continue
within the call. The tokens of this beginning are context, like the rest of the prompt."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.chat.answer_reader import AnswerReader
from paceline.chat.completion_texts import END_THINK, opens_reasoning, special_tokens
from paceline.chat.messages import Json, Unsupported
from paceline.chat.rendering import AnswerFormat, ChatTemplate
from paceline.data.tokens import NO_KWARGS, encode_continuation, encode_prompt
from paceline.errors import InvalidInput
from paceline.groups import IntArray, Version
from paceline.rollout.engine import MAX_ID, SamplingParams, sample_seed
from paceline.services.openai.requests import GREEDY, Ask, ChatAsk, CompletionAsk, ToolChoice
from paceline.services.openai.token_route import TokenAsk
from paceline.services.rollout.openai.sampling import Sampler, Served

MAX_CHARS_PER_TOKEN = 64
"""Characters of a prompt for each token of the longest sequence; a longer prompt is refused before it is tokenized."""

EngineAsk = ChatAsk | CompletionAsk | TokenAsk


def num_prompts(ask: EngineAsk) -> int:
    return len(ask.prompts()) if isinstance(ask, CompletionAsk) else 1


def samplers_of(served: Served, ask: EngineAsk, answer_id: str, pinned: Version | None) -> list[Sampler]:
    """Return a sampler for each choice of the answer, in order. Raises InvalidInput."""
    params = sampling_params(ask, served.params, served.spec.policy.max_total_sequence_length)
    seed = secrets.randbits(63) if ask.seed is None else ask.seed
    stops = served.spec.policy.generation.stop_strings if ask.stop is None else ask.stops
    marks = special_tokens(served.tokenizer).marks.items()
    # Text contains no special tokens of the chat, so such a stop string ends the choice as a token.
    ends = [number for number, mark in marks if any(mark in stop for stop in stops)]
    params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends)) if ends else params
    prompts, reader = _prompts(served, ask)
    samplers: list[Sampler] = []
    for number, prompt_ids in enumerate(prompts):
        for i in range(ask.n or 1):
            index = len(samplers)
            request_id = f"http/{answer_id}/{index}"
            one_seed = sample_seed(seed, number, i)
            samplers.append(Sampler(served, prompt_ids, params, request_id, one_seed, index, reader(), stops, pinned))
            if isinstance(ask, ChatAsk):
                samplers[-1].in_reasoning = opens_reasoning(served.tokenizer, prompt_ids)
            if isinstance(ask, CompletionAsk) and ask.echo:
                samplers[-1].echo, samplers[-1].scores_prompt = True, ask.wants_logprobs
    return samplers


def _prompts(served: Served, ask: EngineAsk) -> tuple[Sequence[IntArray], Callable[[], AnswerReader]]:
    match ask:
        case ChatAsk():
            prompt_ids, reader = prepare(served, ask)
            return [prompt_ids], reader
        case TokenAsk():
            return [encode_text(served, ask.token_ids)], AnswerReader
        case CompletionAsk():
            return [encode_text(served, prompt) for prompt in ask.prompts()], AnswerReader


def encode_text(served: Served, prompt: str | list[int]) -> IntArray:
    """Return the [P] tokens of a `/v1/completions` prompt (text or ids), without a chat template. Raises InvalidInput
    if no sequence could hold the ids or the text, and the errors of `encode_prompt`."""
    limit = served.spec.policy.max_total_sequence_length
    if isinstance(prompt, list):
        if len(prompt) > limit or max(prompt) > MAX_ID:
            raise InvalidInput(
                f"the prompt has {len(prompt)} token ids up to {max(prompt)}, but at most {limit} ids up to {MAX_ID} "
                "are possible"
            )
        return np.array(prompt, np.int32)
    check_size(served, len(prompt))
    return encode_prompt(served.tokenizer, prompt, "never")


def prepare(served: Served, ask: ChatAsk) -> tuple[IntArray, Callable[[], AnswerReader]]:
    """Return a prepared chat, with the run's template arguments and its call format. Raises InvalidInput if no sequence
    could hold the text, and the errors of `prepare_chat`."""
    spec = served.spec
    try:
        check_size(served, len(json.dumps([ask.rendered(), ask.tools])))
        template = ChatTemplate(served.tokenizer)
        return prepare_chat(ask, template, spec.data.chat_template_kwargs, spec.environment.tool_parser)
    except RecursionError:
        raise InvalidInput("messages or tools are nested too deeply") from None


def check_size(served: Served, size: int) -> None:
    """Raise InvalidInput for a prompt of `size` characters if no sequence could hold it."""
    limit = served.spec.policy.max_total_sequence_length
    if size > MAX_CHARS_PER_TOKEN * limit:
        raise InvalidInput(
            f"a prompt of {size} characters exceeds {limit} tokens, the limit of prompt and completion together; "
            "shorten it"
        )


def sampling_params(ask: Ask, default: SamplingParams, limit: int) -> SamplingParams:
    """Return the parameters of a request, with `default` for missing fields. Raises InvalidInput beyond `limit` tokens."""
    most = ask.max_tokens or default.max_new_tokens
    if most > limit:
        raise Unsupported(
            f"max_tokens {most} exceeds {limit}, the limit of prompt and completion together", "max_tokens"
        )
    temperature = default.temperature if ask.temperature is None else max(ask.temperature, GREEDY)
    return SamplingParams(
        max_new_tokens=most,
        min_new_tokens=min(default.min_new_tokens, most) if ask.min_tokens is None else ask.min_tokens,
        temperature=temperature,
        top_p=default.top_p if ask.top_p is None else ask.top_p,
        top_k=default.top_k if ask.top_k is None else max(ask.top_k, 0),
        stop_token_ids=tuple(dict.fromkeys((*default.stop_token_ids, *(ask.stop_token_ids or ())))),
        min_p=default.min_p if ask.min_p is None else ask.min_p,
        repetition_penalty=ask.repetition_penalty or default.repetition_penalty,
    )


NO_CALLS = AnswerFormat("none", False)


def prepare_chat(
    ask: ChatAsk, template: ChatTemplate, run_kwargs: Mapping[str, Any] = NO_KWARGS, call_format: str = "auto"
) -> tuple[IntArray, Callable[[], AnswerReader]]:
    """Return the [P] tokens of a chat, which end where the answer begins, and a function that makes a reader of the
    answer. `run_kwargs` are the run's template arguments; those of the request replace them. `call_format` is the
    spec's format of tool calls (`auto`: the template's format). Raises Unsupported for content that the template
    does not render, for tools whose calls could not be read, and for a call that cannot be demanded; InvalidInput
    for content that the template refuses."""
    kwargs = {**run_kwargs, **(ask.chat_template_kwargs or {}), **template.effort_kwargs(ask.reasoning_effort)}
    tools, choice = ask.tools or [], ask.tool_choice
    written = template.answer_format
    calls = written.calls if call_format == "auto" else call_format
    messages = ask.rendered()
    prompt_ids = template.encode(messages, [] if choice.kind == "none" else tools, kwargs)
    if choice.kind == "none":
        calls = "none"
    elif calls == "none" and call_format == "auto":
        raise Unsupported(
            "tools are given, but the chat template of this model writes calls in an unknown form, so no call could "
            "be read from its answers (known: <tool_call> marks, and a call as the whole text); set environment.tool_parser",
            "tools",
        )
    reasons = written.reasons and ask.separate_reasoning is not False
    opens = template.opens_reasoning(prompt_ids, messages)
    begun = ""
    if choice.kind in ("required", "function"):
        begun = _begun_call(choice, tools, written if calls == written.calls else NO_CALLS)
        text = f"\n{END_THINK}\n\n{begun}" if opens else begun
        ids = encode_continuation(template.tokenizer, prompt_ids, text)
        prompt_ids, opens = np.concatenate([prompt_ids, ids]), False

    def reader() -> AnswerReader:
        most = 1 if ask.parallel_tool_calls is False else None
        made = AnswerReader(calls, reasons, opens and reasons, tools, most)  # type: ignore[arg-type]  # the spec allows no other
        made.push(begun)
        return made

    return prompt_ids, reader


def _begun_call(choice: ToolChoice, tools: Sequence[Json], written: AnswerFormat) -> str:
    """Return the beginning of a demanded call, up to the first text that the model chooses."""
    if not written.opening:
        raise Unsupported(
            f"tool_choice is {choice.kind!r}, but the chat template of this model writes calls in an unknown form, "
            "so no call can be begun; use 'auto'",
            "tool_choice",
        )
    name = choice.name or (tools[0]["function"]["name"] if len(tools) == 1 else "")
    return written.opening + name + (written.after_name if name else "")
