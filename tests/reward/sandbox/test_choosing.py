"""The choice of a backend and its probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidInput
from paceline.reward.sandbox import choosing
from paceline.reward.sandbox.choosing import AUTO, NoSandbox, make_sandbox, probe
from paceline.reward.sandbox.protocol import Limits, Outcome, SandboxFailed
from paceline.reward.sandbox.readable import Readable

PATHS = Readable.of_interpreter()


def absent(readable: Readable) -> Any:
    raise SandboxFailed("it is not installed")


def test_auto_takes_the_first_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = [name for name in AUTO if not isinstance(probe(name, PATHS), str)]
    assert make_sandbox().name == holding[0]
    for name in holding[:-1]:
        monkeypatch.setattr(choosing, "LOCAL", {**choosing.LOCAL, name: absent})
    assert make_sandbox().name == holding[-1]


def test_where_nothing_holds_it_is_refused_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "LOCAL", dict.fromkeys(AUTO, absent))
    with pytest.raises(InvalidInput) as refused:
        make_sandbox("auto")
    for name in AUTO:
        assert f"{name}: it is not installed" in str(refused.value)
    assert "sandbox: none" in str(refused.value)


def test_none_has_to_be_written_out() -> None:
    assert make_sandbox("none").name == "none"


def test_a_backend_that_does_not_isolate_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Open(NoSandbox):
        def run(self, argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b"") -> Outcome:
            return super().run(argv, files, replace(limits, processes=4), stdin)

    monkeypatch.setattr(choosing, "LOCAL", {"landlock": lambda readable: Open()})
    reason = probe("landlock", PATHS)
    assert isinstance(reason, str)
    for what in ("files outside", "the network", "signals to other processes", "starting processes"):
        assert f"not held: {what}" in reason


def test_a_backend_that_runs_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        name = "landlock"

        def run(self, argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b"") -> Outcome:
            return Outcome("exited", 0, None, b"", b"", 0.1)

    monkeypatch.setattr(choosing, "LOCAL", {"landlock": lambda readable: Silent()})
    assert "the probe exited with status 0" in str(probe("landlock", PATHS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "docker"}, "'docker' is none of auto, bwrap, landlock, remote, none"),
        ({"name": "remote"}, "needs the setting url"),
        ({"name": "auto", "url": "http://sandbox"}, "sandbox is auto"),
        ({"name": "remote", "url": "ftp://sandbox"}, "http:// or https://"),
        ({"readable": ["/"]}, "too wide"),
        ({"readable": ["relative"]}, "absolute"),
        ({"readable": ["/no/such/folder"]}, "exist"),
    ],
)
def test_what_cannot_be_chosen_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_sandbox(**arguments)


def test_further_folders_can_be_read(any_sandbox: Any, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("shared")
    program = {"main.py": f"print(open({str(tmp_path / 'data')!r}).read())".encode()}
    sandbox = make_sandbox(any_sandbox.name, readable=[] if any_sandbox.name == "none" else [str(tmp_path)])
    assert sandbox.run(["python", "main.py"], program, Limits()).stdout == b"shared\n"
