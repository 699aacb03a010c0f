"""Episodes as people read them."""

from __future__ import annotations

from dataclasses import replace

from episode_groups import episode_group, episode_texts

from paceline.services.cli.render import sample_text
from paceline.services.coordinator.records.sample_pages import episodes
from paceline.wire import encode_result


def test_a_sample_has_its_conversation_turns_and_rows() -> None:
    group = episode_group()
    row, *others = group.completions
    named = replace(row, spans=(row.spans[0]._replace(sampler="rollout-1"), *row.spans[1:]))
    arrays, texts = encode_result(group.prompt_ids, [named, *others], group.rows, episode_texts())
    found = episodes(arrays, texts)
    assert found is not None
    first, second = found
    assert first["token_ids"] == [7, 8, 10, 11]
    assert first["spans"] == [[0, 2, 1, 3], [2, 3, 1, 3], [3, 4, 1, 4]]
    assert first["samplers"] == ["rollout-1", "", ""]
    assert [row["sampled"] for row in first["rows"]] == [[1, 1, 0, 1], [1]]
    assert first["turns"] == [[0, 0, 2, 0.5], [0, 3, 4, None], [1, 0, 1, 1.0]]
    assert first["text"] == "two"
    assert (second["ending"], second["detail"]) == ("truncated", "max_turns 1")
    shown = sample_text(
        {
            "group_id": 7,
            "step": 3,
            "reward": 0.5,
            "prompt": "1+1?",
            "completions": [sample | {"rewards": {"r": 1.0}} for sample in found],
        }
    )
    assert "done · 3 turns in 2 rows · 4 tokens sampled, 1 read" in shown
    assert '→ add({"a": 1})' in shown
    assert "│ [tool] 2" in shown


def test_a_group_without_an_environment_has_none() -> None:
    group = episode_group()
    arrays, texts = encode_result(group.prompt_ids, group.completions[2:])
    assert episodes(arrays, texts) is None
