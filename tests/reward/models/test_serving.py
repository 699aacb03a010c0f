"""The server of a reward model, in the test's process: groups share passes, and fail alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from reward_models import save_classifier

from paceline.reward.models.serving import ModelServer


def load(path: Path, **settings: Any) -> dict[str, Any]:
    return {"function": "reward_model", "model": {"path": str(path), **settings}, "memory_bytes": 1 << 60}


def group(number: int, *completions: Any) -> dict[str, Any]:
    return {"id": number, "prompts": ["1+1="] * len(completions), "completions": list(completions)}


def test_groups_share_passes_and_get_their_own_scores(tmp_path: Path) -> None:
    server = ModelServer(load(save_classifier(tmp_path)))
    sizes: list[int] = []
    scores = server._scorer.scores
    server._scorer.scores = lambda texts: scores(texts, sizes.append)  # type: ignore[method-assign]
    together = server.answers([group(5, "2", "30"), group(6, "30"), group(7, "2", "2", "4")])
    assert sizes == [6]
    assert [reply["id"] for reply in together] == [5, 6, 7]
    assert together[0]["scores"][1] == pytest.approx(together[1]["scores"][0], abs=1e-6)
    assert together[2]["scores"][0] == pytest.approx(together[0]["scores"][0], abs=1e-6)


def test_a_group_that_cannot_be_scored_fails_alone(tmp_path: Path) -> None:
    server = ModelServer(load(save_classifier(tmp_path)))
    scores = server._scorer.scores

    def runs_out_of_memory(texts: Any) -> Any:
        if any(len(text.ids) > 30 for text in texts):
            raise RuntimeError("can't allocate memory: too much")
        return scores(texts)

    server._scorer.scores = runs_out_of_memory  # type: ignore[method-assign]
    good, long, wrong = server.answers([group(1, "2"), group(2, "3" * 40), group(3, {"role": "assistant"})])
    assert len(good["scores"]) == 1
    assert long == {"id": 2, "raised": "RuntimeError: can't allocate memory: too much"}
    assert wrong["id"] == 3
    assert "raised" in wrong


def test_other_weights_are_taken_between_two_batches(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model")
    server = ModelServer(load(folder, refresh_s=0.01))
    (before,) = server.answers([group(1, "2")])
    loaded = threading.Event()
    load_scorer = server._load

    def note(settings: Any) -> Any:
        found = load_scorer(settings)
        loaded.set()
        return found

    server._load = note
    server.start_refreshing()
    save_classifier(folder, seed=1)
    assert loaded.wait(60)
    deadline = threading.Event()
    for _ in range(600):
        (after,) = server.answers([group(2, "2")])
        if after["version"] != before["version"]:
            break
        deadline.wait(0.1)
    server.stop_refreshing()
    assert after["version"] != before["version"]
    assert after["scores"] != before["scores"]
