"""`paceline serve model --traces` as a process: the version in its traces, one process for a folder, an end by SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from registry_place import make_place
from service_processes import PACELINE, environment, wait_for

LIMIT_S = 60.0


def post(url: str, **content: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(content).encode(), headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


@pytest.mark.merge
@pytest.mark.slow
def test_a_fetched_model_is_served_and_its_traces_name_its_version(tmp_path: Path) -> None:
    place, champion, traces = make_place(tmp_path), tmp_path / "champion", tmp_path / "traces"
    place.passed()
    place.done("models", "promote", "sums:1")
    fetched = place.run(
        *("models", "fetch", "sums@champion", champion, "--stage", "passed", "--verify"),
        *("--public-key", place.public),
    )
    assert fetched.exit_code == 0, fetched.output
    ready = tmp_path / "ready"
    options = ["serve", "model", str(champion), "--port", "0", "--device", "cpu", "--traces", str(traces)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*PACELINE, *options, "--ready-file", str(ready)], stdout=log, stderr=log, env=environment()
        )
    try:
        wait_for(ready, process)
        url = ready.read_text().strip()
        answer = post(f"{url}/completions", model="champion", prompt="1+1=", max_tokens=4, min_tokens=2)
        assert post(f"{url}/feedback", completion_id=answer["id"], score=1)["duplicate"] is False
        second = place.run(*options)
        assert second.exit_code == 1
        assert f"another model server (process {process.pid}) works in {traces}" in second.stderr
        assert "use another --traces" in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait(LIMIT_S)
    assert "Loading weights" not in (tmp_path / "log").read_text()
    (row,) = (json.loads(line) for line in (traces / "rated-000001.jsonl").read_text().splitlines())
    assert (row["model"], row["prompt"], row["final_reward"]) == ("sums:1", "1+1=", 1)


def test_a_registered_model_that_does_not_verify_is_not_served(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    path = place.passed()["path"]
    unkeyed = place.run("serve", "model", "sums:1")
    assert (unkeyed.exit_code, "name it with --public-key" in unkeyed.stderr) == (2, True)
    (Path(path) / "config.json").write_text("{}")
    refused = place.run("serve", "model", "sums:1", "--port", "0", "--public-key", place.public)
    assert refused.exit_code == 1
    assert "config.json was changed after the model was registered" in refused.stderr
