"""Files of the coordinator's host that a submitter names: secrets are not opened, and no error quotes content."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from control_plane import Plane, refusal
from exchange_drivers import write_prompts
from tiny_chat import save_tiny_chat

from paceline.bundle.collecting import collect
from paceline.calls.bundle_transfer import send
from paceline.data.tokens import encode_prompt, load_tokenizer
from paceline.errors import InvalidInput, SpecError, Unreadable
from paceline.files.model_source import model_source
from paceline.files.storage import open_url
from paceline.reward.endpoints.settings import EndpointSettings
from paceline.spec import PolicySection
from paceline.spec.reading import load_spec, parse_spec, spec_to_yaml
from paceline.v1 import run_pb2

CANARY = "canary5ecret0001"


@pytest.fixture
async def plane(tmp_path: Path) -> Any:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "token").write_text("ab" * 32)
    plane = await Plane.started(tmp_path / "runs")
    yield plane
    await plane.stop()


async def said(plane: Plane, tmp_path: Path, **sections: Any) -> str:
    """Submit a run of somebody without a bundle; return the refusal."""
    write_prompts(tmp_path / "prompts.jsonl")
    tree: dict[str, Any] = {
        "policy": {"model_name": "none", "generation": {"max_new_tokens": 4}},
        "data": {"train": str(tmp_path / "prompts.jsonl")},
        "rewards": [{"function": "think_answer_format"}],
        "logger": {"tensorboard": False},
    }
    spec = parse_spec(tree | sections)
    return (await refusal(plane.runs.Submit(run_pb2.SubmitRequest(spec_yaml=spec_to_yaml(spec)))))[1]


@pytest.mark.parametrize(
    "name",
    ["token.jsonl", "token.csv", "token.parquet", "token.json", "linked/token", "*.jsonl", "file://{}/token.jsonl"],
)
async def test_a_link_to_the_token_is_refused_whatever_its_name(plane: Plane, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "ann"
    folder.mkdir()
    (folder / Path(name).name.replace("*", "token")).symlink_to(tmp_path / "runs" / "token")
    (folder / "linked").symlink_to(tmp_path / "runs")
    path = name.format(folder) if "://" in name else str(folder / name)
    text = await said(plane, tmp_path, data={"train": path})
    assert "which no run may name" in text
    assert "abab" not in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", CANARY),
        ("a.jsonl", f'{{"{CANARY}": 1}}'),
        ("a.jsonl", f'{{"prompt": {{"{CANARY}": "{CANARY}"}}}}'),
        ("a.jsonl", f'{{"prompt": "x", "y": 1}}\n{{"prompt": "{CANARY}"}}'),
        ("a.json", f'[{{"prompt": "a"}}, {CANARY}]'),
        ("a.json", f'[{{"prompt": "a", "{CANARY}": 1}}, {{"prompt": "a"}}]'),
        ("a.csv", f"{CANARY},b\n1,2\n"),
        ("a.csv", f"{CANARY},{CANARY}\n1,2\n"),
        ("a.tsv", f"{CANARY}\n{CANARY}\n"),
        ("a.parquet", CANARY * 10),
        ("a.arrow", CANARY * 10),
        ("folder/a.csv", f"{CANARY}\n{CANARY}\n"),
        ("folder/a.txt", f"{CANARY}\n"),
    ],
)
async def test_no_error_quotes_a_file_that_came_in_no_bundle(
    plane: Plane, tmp_path: Path, name: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    path = tmp_path / "theirs" / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    named = path.parent if path.parent.name == "folder" else path
    text = await said(plane, tmp_path, data={"train": str(named)})
    assert CANARY not in text
    assert str(named) in text


async def test_no_error_names_what_a_file_of_code_defines(plane: Plane, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(f"def {CANARY}(): ...\n")
    code = f"{tmp_path}/theirs.py:canary5ecret000"
    for kind, named in (("class", {"environment": {"class": code}}), ("function", {"rewards": [{"function": code}]})):
        text = await said(plane, tmp_path, **named)
        assert f"has no {kind}" in text
        assert CANARY not in text


async def test_errors_still_quote_a_bundles_files(plane: Plane, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "bad.csv").write_text(f"{CANARY},b\n1,2\n")
    spec = parse_spec({"policy": {"model_name": "none"}, "data": {"train": str(tmp_path / "bad.csv")},
                       "rewards": [{"function": "think_answer_format"}]})  # fmt: skip
    bundle = collect(spec)
    with grpc.insecure_channel(f"127.0.0.1:{plane.server.port}") as channel:
        await asyncio.to_thread(send, channel, bundle)
    request = run_pb2.SubmitRequest(spec_yaml=spec_to_yaml(spec), bundle=bundle.manifest.digest)
    assert CANARY in (await refusal(plane.runs.Submit(request)))[1]


async def test_a_model_a_function_and_a_card_that_lead_to_secrets_are_refused(plane: Plane, tmp_path: Path) -> None:
    token = tmp_path / "runs" / "token"
    model, card = tmp_path / "model", tmp_path / "card"
    for folder in (model, card):
        folder.mkdir()
    (model / "config.json").write_text("{}")
    (model / "vocab.txt").symlink_to(token)
    (tmp_path / "reward.py").symlink_to(token)
    (card / "a.jsonl").write_text('{"prompt": "a"}')
    log = tmp_path / "runs" / "logs" / "a.jsonl"
    log.parent.mkdir(exist_ok=True)
    log.write_text('{"prompt": "abab"}')
    data_files = [{"split": "train", "path": str(log)}]
    (card / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: " + json.dumps(data_files) + "\n---\n"
    )
    for sections in (
        {"policy": {"model_name": str(model), "generation": {"max_new_tokens": 4}}},
        {"rewards": [{"function": f"{tmp_path}/reward.py:f"}]},
        {"data": {"train": str(card)}},
        {"checkpointing": {"checkpoint_dir": str(tmp_path / "runs" / "audit" / "mine")}},
        {"weights": {"store": f"file://{tmp_path}/runs/blobs"}},
    ):
        text = await said(plane, tmp_path, **sections)
        assert "which no run may name" in text
        assert "abab" not in text
    with pytest.raises(Unreadable, match="which no run may name"):
        model_source(str(model))


def test_a_url_that_leads_to_another_file_system_is_refused(tmp_path: Path) -> None:
    for url in (f"simplecache::file://{tmp_path}/model", f"zip://a::file://{tmp_path}/x.zip", f"git://{tmp_path}:a"):
        with pytest.raises(InvalidInput, match="leads to another file system"):
            model_source(url)
    for scheme in ("asyncwrapper", "async_wrapper", "cached", "blockcache", "filecache", "simplecache"):
        with pytest.raises(SpecError, match="leads to another file system"):
            open_url(f"{scheme}://{tmp_path}", "data.train")


def test_a_judges_key_is_no_link_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("ab" * 32)
    link = tmp_path / "openai.api_key"
    link.symlink_to(tmp_path / "token")
    settings = EndpointSettings(base_url="http://judge/v1", model="m", api_key_file=str(link))
    with pytest.raises(Unreadable, match="name the key's file itself") as caught:
        settings.key()
    assert "abab" not in str(caught.value)
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "openai.api_key").write_text("sk-1\n")
    link.unlink()
    link.symlink_to(tmp_path / "mounted" / "openai.api_key")
    assert settings.key() == "sk-1"


def test_a_submitters_own_token_is_in_no_bundle(tmp_path: Path) -> None:
    write_prompts(tmp_path / "train.jsonl")
    (tmp_path / "my.token").write_text("plt_" + "ab" * 16)
    (tmp_path / "spec.yaml").write_text(
        "policy: {model_name: none}\ndata: {train: train.jsonl}\nrewards: [{function: think_answer_format}]\n"
        "bundle: {include: ['*']}\n"
    )
    with pytest.raises(SpecError, match="holds a private key or a token"):
        collect(load_spec(tmp_path / "spec.yaml"))
    os.remove(tmp_path / "my.token")
    collect(load_spec(tmp_path / "spec.yaml"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", f"{CANARY}"),
        ("tokenizer.json", f"{CANARY}"),
        ("chat_template.jinja", "{% " + CANARY + " %}"),
        ("chat_template.jinja", "{{ " + CANARY + "( }}"),
    ],
)
def test_no_error_quotes_a_models_files(name: str, content: str, tmp_path: Path, chat_folder: Path) -> None:
    shutil.copytree(chat_folder, tmp_path / "model")
    (tmp_path / "model" / name).write_text(content)

    def use() -> None:
        model_source(str(tmp_path / "model"))
        tokenizer = load_tokenizer(PolicySection(model_name=str(tmp_path / "model")))
        encode_prompt(tokenizer, [{"role": "user", "content": "hello"}], "auto")

    with pytest.raises(InvalidInput) as caught:
        use()
    assert CANARY not in str(caught.value)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat(tmp_path_factory.mktemp("chat"))
