"""Scores of a model on a server equal those of the same model in the worker; what the server does wrong is told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from pooling_server import pooling_server
from reward_models import save_classifier

from paceline.errors import InvalidInput, Unreadable
from paceline.reward.endpoints.client import EndpointUnavailable
from paceline.reward.models.pooled import PooledScorer, open_scorer
from paceline.reward.models.scorer import load_scorer
from paceline.reward.models.settings import ModelSettings, ProcessModelSettings, model_settings
from paceline.reward.runner import RewardRunner
from paceline.spec import RewardFunctionSection

PROMPTS = ["1+1=", "12+34=", "7+8=", "1+1=", "99+99="]
COMPLETIONS = ["2", "640", "", "2" * 40, "891"]


def scores(scorer: Any) -> list[Any]:
    texts = [scorer.encode(*pair) for pair in zip(PROMPTS, COMPLETIONS, strict=True)]
    found: list[Any] = scorer.scores(texts)
    return found


def same(settings: ModelSettings, endpoint: dict[str, Any]) -> None:
    pooled = open_scorer(type(settings).model_validate({**settings.model_dump(), "endpoint": endpoint}))
    assert isinstance(pooled, PooledScorer)
    for here, there in zip(scores(load_scorer(settings)), scores(pooled), strict=True):
        assert there == pytest.approx(here, abs=1e-5)


@pytest.mark.parametrize("max_batch_tokens", [1, 60, 10_000])
def test_scores_are_those_of_the_model_in_the_worker(tmp_path: Path, max_batch_tokens: int) -> None:
    save_classifier(tmp_path)
    with pooling_server(tmp_path) as server:
        same(ModelSettings(path=str(tmp_path), max_batch_tokens=max_batch_tokens), server.endpoint)
        assert all(body["use_activation"] is False for body in server.requests)
        assert len(server.requests) == {1: 5, 60: 2, 10_000: 1}[max_batch_tokens]


def test_steps_are_those_of_the_model_in_the_worker(tmp_path: Path) -> None:
    save_classifier(tmp_path, labels=2, by_token=True)
    with pooling_server(tmp_path, by_token=True) as server:
        same(ProcessModelSettings(path=str(tmp_path), step_separator="2"), server.endpoint)


def test_the_url_may_have_the_version(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    with pooling_server(tmp_path) as server:
        same(
            ModelSettings(path=str(tmp_path)),
            {**server.endpoint, "base_url": f"{server.endpoint['base_url']}/v1"},
        )


def test_a_text_that_the_server_does_not_take_has_no_score(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    with pooling_server(tmp_path, longest=20) as server:
        found = scores(open_scorer(ModelSettings(path=str(tmp_path), endpoint=server.endpoint)))
    assert [value is None for value in found] == [False, False, False, True, False]


def test_a_server_without_the_model_is_told_at_the_set_up(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    with pooling_server(tmp_path) as server:
        with pytest.raises(Unreadable, match=r"serves rm, not 'other'; correct endpoint\.model"):
            open_scorer(ModelSettings(path=str(tmp_path), endpoint={**server.endpoint, "model": "other"}))
        endpoint = server.endpoint
    with pytest.raises(Unreadable, match=r"the reward model server does not answer as expected: .* --runner pooling"):
        open_scorer(ModelSettings(path=str(tmp_path), endpoint=endpoint))


def test_answers_of_another_form_are_no_scores(tmp_path: Path) -> None:
    save_classifier(tmp_path / "one")
    save_classifier(tmp_path / "two", labels=2)
    with pooling_server(tmp_path / "one") as server:
        scorer = open_scorer(ModelSettings(path=str(tmp_path / "one"), endpoint=server.endpoint))
        server.turned = True
        with pytest.raises(InvalidInput, match="does not have one result for each of 5 texts"):
            scores(scorer)
        server.broken = 400
        with pytest.raises(InvalidInput, match="answered 400: no"):
            scores(scorer)
        server.broken = 503
        with pytest.raises(EndpointUnavailable, match="answered 503"):
            scores(scorer)
    with pooling_server(tmp_path / "two") as server:
        scorer = open_scorer(ModelSettings(path=str(tmp_path / "one"), endpoint=server.endpoint))
        with pytest.raises(InvalidInput, match=r"shape \[2\], not \[1\]"):
            scores(scorer)


async def test_a_group_waits_for_a_server_that_gives_no_answer(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    with pooling_server(tmp_path) as server:
        kwargs = {"path": str(tmp_path), "endpoint": server.endpoint}
        section = RewardFunctionSection(function="reward_model", kwargs=kwargs, memory_mb=1 << 17, timeout_s=120.0)
        async with RewardRunner([section]) as runner:
            server.broken = 503
            away = await runner.score(["1+1="], ["2"], [[1]], {})
            server.broken = 0
            there = await runner.score(["1+1="], ["2"], [[1]], {})
    assert away.failure is not None
    assert (away.failure.kind, away.rewards_CF) == ("unavailable", None)
    assert there.failure is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"refresh_s": 5.0}, r"refresh_s 5.0 is for a model that the worker loads"),
        ({"device": "cuda"}, "device 'cuda' is for"),
        ({"endpoint": {"base_url": "ftp://x", "model": "rm"}}, "not an http or https URL"),
    ],
)
def test_settings_that_belong_to_the_server_are_refused(changes: dict[str, Any], said: str) -> None:
    endpoint = {"base_url": "http://h:8000", "model": "rm"}
    with pytest.raises(InvalidInput, match=said):
        model_settings("reward_model", {"path": "x", "endpoint": endpoint, **changes})


@contextmanager
def vllm_server(folder: Path, *options: str, **variables: str) -> Iterator[dict[str, Any]]:
    """The real vLLM's server on this machine's CPUs, until the end."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += [
        "--served-model-name",
        "rm",
        "--runner",
        "pooling",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--dtype", "float32", "--max-model-len", "64", "--enforce-eager", *options]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **variables}
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)  # until it listens; a server that ends is found above
        yield {"base_url": f"http://127.0.0.1:{port}", "model": "rm"}
    finally:
        process.terminate()
        process.wait()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_are_those_of_the_real_vllm(tmp_path: Path, ranks: int) -> None:
    """With two ranks the model is divided among two processes."""
    folder = save_classifier(tmp_path / "rm", hidden_size=64, head_dim=32)
    cores = "|".join(map(str, range(ranks)))  # one for each rank
    with vllm_server(folder, "--tensor-parallel-size", str(ranks), VLLM_CPU_OMP_THREADS_BIND=cores) as endpoint:
        same(ModelSettings(path=str(folder)), endpoint)


@pytest.mark.vllm
@pytest.mark.slow
def test_steps_are_those_of_the_real_vllm(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "prm", labels=2, by_token=True, hidden_size=64, head_dim=32)
    with vllm_server(folder) as endpoint:
        same(ProcessModelSettings(path=str(folder), step_separator="2"), endpoint)
