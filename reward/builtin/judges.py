"""Scores completions with a language model behind an OpenAI-compatible endpoint.

Promise: a completion without a verdict gets None, never a number. If the service gives no answer, the attempt ends and
the group is scored again later, unless the spec says otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.reward.builtin.inputs import answer_text, column_values, completion_text
from paceline.reward.trainer_view import CallView

if TYPE_CHECKING:
    from paceline.reward.endpoints.cache import AnswerCache
    from paceline.reward.judging.asking import Messages, Panel, Parse
    from paceline.reward.judging.settings import JudgeSettings, PairSettings, ScoreSettings
    from paceline.reward.judging.verdicts import Verdict

SCORE_SCHEMA = {"score": {"type": "number"}}
PAIR_SCHEMA = {"better": {"type": "string", "enum": ["A", "B", "tie"]}}


async def judge(
    prompts: list[Any], completions: list[Any], call: CallView, settings: Mapping[str, Any], **columns: Any
) -> list[float | None]:
    """Return [C] (score - min_score) / (max_score - min_score) from a judge that reads each completion separately.

    `settings` are `paceline.reward.judging.settings.ScoreSettings`. None if too few votes have a verdict. Raises
    EndpointUnavailable, RequestRefused and NoVerdict according to the settings, InvalidInput for wrong settings.
    """
    from paceline.reward.judging.settings import DATA_ONLY, SCORE_SYSTEM, fill, messages
    from paceline.reward.judging.verdicts import combined, score_verdict

    chosen = score_settings(settings)
    scale = {"min_score": f"{chosen.min_score:g}", "max_score": f"{chosen.max_score:g}"}
    said = {"rubric": chosen.rubric, "data_only": DATA_ONLY, **scale}
    system = fill(chosen.system or SCORE_SYSTEM, said)
    values = {name: column_values(columns, name) for name in sorted(chosen.columns)}
    questions = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = {name: column[index] for name, column in values.items()}
        text = fill(chosen.template, {**row, "prompt": prompt, "completion": _shown(chosen, completion)})
        questions.append(messages(system, text))

    def parse(text: str) -> Verdict | None:
        return score_verdict(text, chosen.min_score, chosen.max_score)

    verdicts = await _votes(chosen, questions, parse, SCORE_SCHEMA, call)
    _log_reasons(call, verdicts)

    def reward(given: Sequence[Verdict]) -> float:
        score = combined([v.value for v in given], chosen.vote)
        return (score - chosen.min_score) / (chosen.max_score - chosen.min_score)

    return [reward(given) if _is_enough(chosen, given) else None for given in verdicts]


async def judge_pairwise(
    prompts: list[Any], completions: list[Any], call: CallView, settings: Mapping[str, Any], **columns: Any
) -> list[float | None]:
    """Return [C] scores from 0 to 1, from comparisons within the group or with a reference, each pair in both orders.

    `settings` are `paceline.reward.judging.settings.PairSettings`. The result of a comparison is the mean of both
    orders; a tie is 0.5. For equal texts the judge is not asked, because they are a tie. None for a completion without
    a comparison. Raises the errors of `judge`.
    """
    from paceline.reward.judging.verdicts import balanced_pairs, bradley_terry, win_rates

    chosen = pair_settings(settings)
    texts, count = [_shown(chosen, completion) for completion in completions], len(completions)
    pairs = balanced_pairs(count, chosen.max_pairs)
    if chosen.reference_column is not None:  # behind the completions, so that one index names any text
        texts += [str(text) for text in column_values(columns, chosen.reference_column)]
        pairs = [(index, count + index) for index in range(count)]
    differing = [(i, j) for i, j in pairs if texts[i] != texts[j]]
    verdicts = await _comparisons(chosen, differing, texts, prompts, columns, call)
    results = {pair: 0.5 for pair in pairs if texts[pair[0]] == texts[pair[1]]}
    agreements = []
    for pair, (forth, back) in zip(differing, zip(verdicts[::2], verdicts[1::2], strict=True), strict=True):
        if not (_is_enough(chosen, forth) and _is_enough(chosen, back)):
            continue  # a single order would let the judge's preference for a position decide
        first = sum(v.value for v in forth) / len(forth)
        second = 1.0 - sum(v.value for v in back) / len(back)
        results[pair] = (first + second) / 2
        agreements.append((first > 0.5) == (second > 0.5) and (first < 0.5) == (second < 0.5))
    if agreements:
        call.log_metric(f"{call.label[:40]}_agree", sum(agreements) / len(agreements))
    if chosen.reference_column is not None:
        return [results.get(pair) for pair in pairs]
    scores = bradley_terry if chosen.scores == "bradley_terry" else win_rates
    return scores(count, results)


async def _comparisons(
    chosen: PairSettings,
    pairs: Sequence[tuple[int, int]],
    texts: Sequence[str],
    prompts: Sequence[Any],
    columns: Mapping[str, Any],
    call: CallView,
) -> list[list[Verdict]]:
    from paceline.reward.judging.settings import DATA_ONLY, PAIR_SYSTEM, fill, messages
    from paceline.reward.judging.verdicts import pair_verdict

    system = fill(chosen.system or PAIR_SYSTEM, {"rubric": chosen.rubric, "data_only": DATA_ONLY})
    values = {name: column_values(columns, name) for name in sorted(chosen.columns)}
    questions = []
    for first, second in pairs:
        row = {name: column[first] for name, column in values.items()} | {"prompt": prompts[first]}
        for a, b in ((first, second), (second, first)):
            shown = {"completion_a": texts[a], "completion_b": texts[b]}
            questions.append(messages(system, fill(chosen.template, {**row, **shown})))
    return await _votes(chosen, questions, pair_verdict, PAIR_SCHEMA, call)


async def _votes(
    chosen: JudgeSettings, questions: list[Messages], parse: Parse, schema: dict[str, Any], call: CallView
) -> list[list[Verdict]]:
    from paceline.reward.endpoints.client import Endpoint
    from paceline.reward.judging.asking import NoVerdict, Panel, deadline_of

    if not questions:
        return []
    async with Endpoint(chosen.endpoint, call.count, call.num_processes) as endpoint:
        panel: Panel = Panel(chosen, endpoint, _cache(), call.count, schema)
        found = await panel.votes(questions, parse, deadline_of(call.timeout_s))
    poor = sum(not _is_enough(chosen, given) for given in found)
    if poor and chosen.when_no_verdict == "fail":
        raise NoVerdict(
            f"{poor} of {len(found)} questions have fewer than {chosen.needed_votes} answers with a verdict"
        )
    return found


def _shown(chosen: JudgeSettings, completion: Any) -> str:
    return completion_text(completion) if chosen.reasoning else answer_text(completion)


def _is_enough(chosen: JudgeSettings, verdicts: Sequence[Verdict]) -> bool:
    return len(verdicts) >= chosen.needed_votes


def _log_reasons(call: CallView, verdicts: Sequence[Sequence[Verdict]]) -> None:
    texts = ["; ".join(f"{v.value:g}: {v.reasoning}" for v in given) or None for given in verdicts]
    if any(texts):
        call.log_extra(f"{call.label[:40]}_says", texts)


def score_settings(values: object) -> ScoreSettings:
    from paceline.reward.endpoints.settings import checked_settings
    from paceline.reward.judging.settings import ScoreSettings

    return checked_settings(ScoreSettings, values, "judge")


def pair_settings(values: object) -> PairSettings:
    from paceline.reward.endpoints.settings import checked_settings
    from paceline.reward.judging.settings import PairSettings

    return checked_settings(PairSettings, values, "judge_pairwise")


@functools.cache
def _cache() -> AnswerCache | None:
    from paceline.reward.endpoints.cache import AnswerCache

    return AnswerCache.of_user()
