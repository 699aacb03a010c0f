"""`paceline chat` and `generate --export`: a folder or a run's export, in this process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.errors import InvalidInput, NotFound
from paceline.services.cli import chat
from paceline.services.cli.main import main
from paceline.services.demo.task import make_model

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, seed=0, hidden=32, layers=1, heads=2)
    return folder


def test_a_model_folder_answers_and_the_same_seed_answers_the_same(folder: Path, tmp_path: Path) -> None:
    arguments = ["generate", "1+1=", "--export", str(folder), "--n", "2", "--max-new-tokens", "5", "--json"]
    runs = [CliRunner().invoke(main, [*arguments, "--directory", str(tmp_path)]) for _ in range(2)]
    assert runs[0].exit_code == 0, runs[0].output
    answers = [json.loads(line) for line in runs[0].stdout.splitlines()]
    assert len(answers) == 2
    assert all(0 < len(answer["token_ids"]) <= 5 for answer in answers)
    assert runs[1].stdout == runs[0].stdout


def test_a_talk_remembers_its_turns_and_shows_each_piece_once(folder: Path) -> None:
    async def talk() -> None:
        spec = chat.changed(chat.spec_of_model(str(folder), Path("nowhere")), 1e-4, 6, "12")
        opened = await chat.open_talk(spec, seed=0)
        opened.tokenizer.chat_template = TEMPLATE
        pieces: list[str] = []
        first = await opened.answer("3+4", pieces.append)
        assert "".join(pieces) == first
        await opened.answer("5")
        assert [message["role"] for message in opened.messages] == ["user", "assistant"] * 2
        assert opened.messages[1]["content"] == first
        with pytest.raises(InvalidInput, match="the prompt has"):
            await opened.answer("1" * 5000)
        assert len(opened.messages) == 4
        await opened.engine.close()

    asyncio.run(talk())


def test_what_cannot_be_talked_to_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no ledger at"):
        chat.spec_of_model("nosuch-1", tmp_path)
    spec = chat.spec_of_model(str(folder), tmp_path)
    with pytest.raises(InvalidInput, match=r"--temperature is 0, but must be above 0"):
        chat.changed(spec, 0.0, None)
    with pytest.raises(InvalidInput, match=r"--max-new-tokens is 100000, but must be from 1"):
        chat.changed(spec, None, 100_000)
