"""Answers of RecordsService from a ledger that the real exchange wrote, and from one with many events."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trained_ledger import COMPLETION_LENGTHS, RUN_ID, Writer

from paceline.errors import InvalidInput, NotFound, Unavailable
from paceline.records import Records
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.records.events import get_metrics, list_events
from paceline.services.coordinator.records.reader import RecordsReader
from paceline.v1 import records_pb2 as pb

STEPS = 50


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[RecordsReader]:
    """A reader beside the writer of a ledger with a trained step."""
    writer = Writer(tmp_path, str(tmp_path / "model"))
    writer.train_a_step()
    found = RecordsReader.opened(writer.ledger.path)
    try:
        yield found
    finally:
        found.close()
        writer.ledger.close()


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[RecordsReader]:
    """A reader of a run with 50 steps, a warning after each fifth, and a metric that every second step has."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with ledger.transaction():
        ledger.add_run("sums-1", "{}", str(tmp_path / "sums-1"), STEPS)
        ledger.update_run("sums-1", next_step=STEPS)
        for step in range(STEPS):
            content: dict[str, Any] = {"step": step, "time": 1000.0 + step, "reward": step / 10, "age/0": 4}
            ledger.add_event("sums-1", "step", content | ({"kl": 1.0} if step % 2 else {}))
            if step % 5 == 4:
                ledger.add_event("sums-1", "warning", {"message": f"after {step}"})
    ledger.close()
    found = RecordsReader.opened(tmp_path / "ledger.sqlite")
    yield found
    found.close()


def records(reader: RecordsReader) -> Records:
    return Records(lambda method, request: getattr(reader, method)(request))


def test_metrics_are_named_and_averaged(steps: RecordsReader) -> None:
    names = steps.GetMetrics(pb.GetMetricsRequest(run_id="sums-1")).names
    assert list(names) == ["age/0", "kl", "reward"]
    answer = steps.GetMetrics(pb.GetMetricsRequest(run_id="sums-1", names=["reward", "k*"], max_points=5))
    width = math.ceil((STEPS + 1) / 5)
    assert answer.steps_per_point == width == 11
    assert list(answer.steps) == [0, 11, 22, 33, 44]
    assert answer.times[1] == 1011.0
    kl, reward = answer.series
    assert (kl.name, reward.name) == ("kl", "reward")
    assert reward.values[0] == pytest.approx(0.5)  # the mean of 0.0, 0.1 … 1.0
    assert (reward.least[1], reward.greatest[1]) == pytest.approx((1.1, 2.1))
    assert list(kl.values) == [1.0] * 5


def test_a_range_of_single_steps_has_gaps_where_a_metric_is_missing(steps: RecordsReader) -> None:
    request = pb.GetMetricsRequest(run_id="sums-1", names=["kl"], from_step=10, to_step=13)
    answer = steps.GetMetrics(request)
    assert list(answer.steps) == [10, 11, 12, 13]
    assert [math.isnan(value) for value in answer.series[0].values] == [True, False, True, False]
    assert not answer.series[0].least


@pytest.mark.parametrize("at_once", [1, 3, 7, 13, 1000])
def test_points_do_not_depend_on_the_pages(steps: RecordsReader, at_once: int) -> None:
    calls: dict[str, Callable[..., Any]] = {"GetMetrics": get_metrics, "ListEvents": list_events}
    paged = Records(lambda method, request: calls[method](steps.ledger, request, at_once))
    assert paged.series("sums-1", ["*"], max_points=10) == records(steps).series("sums-1", ["*"], max_points=10)
    assert [event.sequence for event in paged.events("sums-1")] == list(range(1, 61))


def test_events_say_at_which_step_they_happened(steps: RecordsReader) -> None:
    found = list(records(steps).events("sums-1", kinds=["warning"]))
    assert [(event.content["message"], event.at_step) for event in found[:2]] == [
        ("after 4", 5),
        ("after 9", 10),
    ]
    newest = steps.ListEvents(pb.ListEventsRequest(run_id="sums-1", newest=True, page_size=2))
    assert [event.sequence for event in newest.events] == [59, 60]
    assert not newest.more


def test_columns_have_every_step(steps: RecordsReader) -> None:
    columns = records(steps).metrics("sums-1")
    assert columns["step"] == list(range(STEPS))
    assert columns["kl"][:4] == [None, 1.0, None, 1.0]


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (pb.GetMetricsRequest(run_id="nosuch"), NotFound, "no run 'nosuch'; the newest are: sums-1"),
        (
            pb.GetMetricsRequest(run_id="sums-1", kind="steps"),
            InvalidInput,
            "kind is 'steps', but must be one of",
        ),
        (
            pb.GetMetricsRequest(run_id="sums-1", names=["*"], page_token="1; DROP"),
            InvalidInput,
            "page_token '1; DROP' is invalid",
        ),
        (pb.GetMetricsRequest(run_id="sums-1", names=["x"] * 100), InvalidInput, "names has 100 entries"),
    ],
)
def test_wrong_requests_are_explained(
    steps: RecordsReader, request_: pb.GetMetricsRequest, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        steps.GetMetrics(request_)


def test_a_call_that_takes_too_long_ends(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    reader = RecordsReader(Ledger(path, read_only=True), limit_s=0.0)

    def forever(ledger: Ledger) -> None:
        ledger.db.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n"
        ).fetchone()
        raise AssertionError("it has no end")

    with pytest.raises(Unavailable, match="request fewer steps"):
        reader.limited(lambda: forever(reader.ledger))
    reader.close()


# Samples


def test_samples_have_what_a_table_shows(reader: RecordsReader) -> None:
    (group,) = reader.ListSamples(pb.ListSamplesRequest(run_id=RUN_ID)).groups
    assert (group.group_id, group.step, group.state) == (0, 0, "trained")
    assert json.loads(group.prompt_json) == "1+1="
    first, second = group.completions
    assert (first.text, first.num_tokens, dict(first.rewards)) == (
        "2",
        2,
        {"exact_match": 1.0, "length": 0.5},
    )
    assert first.reward == 1.25
    assert dict(second.rewards) == {"exact_match": 0.0}
    assert (second.reward, second.above_mean) == (0.0, -0.625)
    assert list(second.versions) == [0, 1]
    assert not group.json


@pytest.mark.parametrize(
    ("filters", "texts"),
    [
        ({"text": "THR"}, ["three"]),
        ({"text": "1+1"}, ["2", "three"]),
        ({"text": "nowhere"}, []),
        ({"min_reward": 1.0}, ["2"]),
        ({"max_reward": 0.5}, ["three"]),
        ({"min_tokens": 3}, ["three"]),
        ({"max_tokens": 2}, ["2"]),
        ({"finish_reason": "length"}, []),
        ({"min_age": 1}, []),
        ({"from_step": 1}, []),
        ({"state": "trained", "max_age": 0}, ["2", "three"]),
        ({"state": "scored"}, []),
        ({"group_id": 0, "min_tokens": 3}, ["three"]),
    ],
)
def test_filters_choose_completions(reader: RecordsReader, filters: dict[str, Any], texts: list[str]) -> None:
    columns = records(reader).samples(RUN_ID, **filters)
    assert columns.get("completion", []) == texts


def test_full_groups_are_whole(reader: RecordsReader) -> None:
    (group,) = records(reader).groups(RUN_ID, 0)
    assert (group["group_id"], group["step"], group["columns"]) == (0, 0, {"answer": "2"})
    assert [len(each["logprobs"]) for each in group["completions"]] == list(COMPLETION_LENGTHS)
    assert group["completions"][1]["rewards"] == {"exact_match": 0.0, "length": None}
    with pytest.raises(NotFound, match="step 7 of run sums-1 has no batch; the run's batches are of steps 0 to 0"):
        list(records(reader).groups(RUN_ID, 7))
    with pytest.raises(NotFound, match="no sample of step 0 of run sums-1 passes"):
        list(records(reader).groups(RUN_ID, 0, min_reward=9.0))
    with pytest.raises(NotFound, match="has no group 99"):
        reader.ListSamples(pb.ListSamplesRequest(run_id=RUN_ID, group_id=99))
    with pytest.raises(InvalidInput, match="state is 'done', but must be one of admitted"):
        reader.ListSamples(pb.ListSamplesRequest(run_id=RUN_ID, state="done"))
    with pytest.raises(NotFound, match="has no evaluation of version 3"):
        reader.ListSamples(pb.ListSamplesRequest(run_id=RUN_ID, evaluated_version=3))


def test_the_life_of_a_group_names_its_hops(reader: RecordsReader) -> None:
    life = records(reader).group_life(RUN_ID, 0)
    assert [hop.what for hop in life.hops] == [
        "admitted",
        "leased",
        "generated",
        "scoring",
        "scored",
        "batched",
        "trained",
    ]
    assert life.hops[1].member_id == "rollout"
    assert life.hops[-1].detail == "step 0, by rank 0 of session 1"
    assert life.tokens == sum(COMPLETION_LENGTHS)
    with pytest.raises(NotFound, match="no group 7"):
        records(reader).group_life(RUN_ID, 7)


def test_books_balance_and_records_agree(reader: RecordsReader) -> None:
    books = records(reader).books(RUN_ID)
    assert (books.generated, books.trained, books.balanced) == (5, 5, True)
    verified = records(reader).verify(RUN_ID)
    assert verified.problems == []
    assert verified.facts["batches"] == 1
    (batch,) = records(reader).batches(RUN_ID)
    assert (batch.step, batch.trained, batch.num_groups) == (0, True, 1)
    assert records(reader).checkpoints(RUN_ID) == []


def test_the_spec_marks_what_differs_from_the_defaults(reader: RecordsReader) -> None:
    keys = {key.path: key for key in records(reader).spec(RUN_ID)}
    assert keys["grpo.max_num_steps"].differs
    assert json.loads(keys["grpo.max_num_steps"].value_json) == 2
    assert not keys["grpo.use_dynamic_sampling"].differs
    assert keys["grpo.use_dynamic_sampling"].description
    assert keys["rewards.1.weight"].value_json == "0.5"
    assert records(reader).spec_difference(RUN_ID, RUN_ID) == []


def test_logs_are_named_and_cut_at_a_line(reader: RecordsReader) -> None:
    logs = reader.ledger.path.parent / "logs"
    logs.mkdir()
    (logs / "learner-0.log").write_text("first line\nsecond line\n")
    (logs / "secret.log").symlink_to(reader.ledger.path.parent / "token")
    assert records(reader).log_names() == ["learner-0", "secret"]
    assert records(reader).log_tail("learner-0", 15) == "second line\n"
    for name in ("../ledger.sqlite", "token", "/etc/passwd"):
        with pytest.raises(NotFound, match="there is no log"):
            records(reader).log_tail(name)
    with pytest.raises(NotFound, match="cannot be read"):
        records(reader).log_tail("secret")


def test_samples_of_hostile_text_are_whole(tmp_path: Path) -> None:
    row = {"prompt": "<script>\x1b]0;x\x07\u202e" + "a" * 9000, "answer": "2"}
    writer = Writer(tmp_path, str(tmp_path / "model"), row)
    writer.train_a_step()
    reader = RecordsReader.opened(writer.ledger.path)
    (short,) = reader.ListSamples(pb.ListSamplesRequest(run_id=RUN_ID)).groups
    assert json.loads(short.prompt_json) == row["prompt"][:4000]
    (full,) = reader.ListSamples(pb.ListSamplesRequest(run_id=RUN_ID, full=True)).groups
    assert json.loads(full.json)["prompt"] == row["prompt"]
    reader.close()
    writer.ledger.close()


def test_a_group_that_cannot_be_decoded_is_shown_without_completions(tmp_path: Path) -> None:
    writer = Writer(tmp_path, str(tmp_path / "model"))
    writer.train_a_step()
    with writer.ledger.transaction():
        writer.ledger.db.execute("UPDATE payloads SET segment = NULL, header = x'ff', arrays = x'ff'")
    reader = RecordsReader.opened(writer.ledger.path)
    (group,) = reader.ListSamples(pb.ListSamplesRequest(run_id=RUN_ID)).groups
    assert (group.group_id, group.num_completions, len(group.completions)) == (0, 0, 0)
    reader.close()
    writer.ledger.close()
