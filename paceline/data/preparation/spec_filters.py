"""The filters of a spec (`data.preparation`), with what they compare prompts with: a tokenizer, evaluation sets, earlier runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from paceline.data.messages import tools_of_prompt
from paceline.data.overlap import OverlapIndex, prompt_texts, text_of
from paceline.data.preparation.evaluation_sets import evaluation_sets
from paceline.data.preparation.filters import Filter, Row, by_length, by_overlap, by_pass_rate, pass_rates
from paceline.errors import DataError, InvalidInput
from paceline.spec import RunSpec

Attempts = Callable[[str], Iterable[tuple[Any, Iterable[float]]]]
"""Takes the id of a run; returns the prompt of each of its scored groups, with the total rewards of its completions."""


def filters_of(spec: RunSpec, prepared: RunSpec, attempts_of: Attempts) -> list[Filter]:
    """Return the filters of a spec; `prepared` has its validation data as its function makes them. Raises InvalidInput without a
    tokenizer or an evaluation set; DataError, Unreadable for such a set; the errors of `attempts_of`."""
    return [*_by_length(spec), *_by_overlap(spec, prepared), *_by_pass_rate(spec, attempts_of)]


def _by_length(spec: RunSpec) -> Iterator[Filter]:
    section = spec.data.preparation
    if section.max_prompt_characters is not None:
        yield by_length(lambda prompt, _: len(text_of(prompt)), section.max_prompt_characters, "characters")
    if section.max_prompt_tokens is not None:
        from paceline.data.tokens import encode_prompt, load_tokenizer, with_system_prompt

        tokenizer, data = load_tokenizer(spec.policy), spec.data
        template = data.apply_chat_template, data.chat_template_kwargs

        def tokens(prompt: Any, row: Row) -> int:
            prompt = with_system_prompt(prompt, data)
            return len(encode_prompt(tokenizer, prompt, *template, tools=tools_of_prompt(prompt, row)))

        yield by_length(tokens, section.max_prompt_tokens, "tokens")


def _by_overlap(spec: RunSpec, prepared: RunSpec) -> Iterator[Filter]:
    share = spec.data.preparation.max_overlap
    if share is None:
        return
    sets = evaluation_sets(spec, prepared)
    if not sets:
        raise InvalidInput(
            f"data.preparation.max_overlap is {share:g}, but there is no evaluation set; set data.validation, or put test.jsonl "
            "beside the training data"
        )
    for name, rows in sets.items():
        if not any(prompt_texts(rows, spec.data.prompt_key)):
            raise DataError(
                f"data.preparation.max_overlap: {name} has no prompts in {spec.data.prompt_key!r} or a usual column, but "
                f"{', '.join(rows.columns)}; rename its column, or move the file if it is no evaluation set"
            )
    indexes = {name: OverlapIndex(prompt_texts(rows, spec.data.prompt_key)) for name, rows in sets.items()}
    yield by_overlap(indexes, share)


def _by_pass_rate(spec: RunSpec, attempts_of: Attempts) -> Iterator[Filter]:
    section = spec.data.preparation
    if section.pass_rate is None:
        return
    attempts = (attempt for run_id in section.pass_rate_of for attempt in attempts_of(run_id))
    yield by_pass_rate(pass_rates(attempts, section.passed_at), *section.pass_rate)
