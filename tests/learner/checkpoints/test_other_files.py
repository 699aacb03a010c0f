"""A folder written from a model folder has all of its files but weights, and its tokenizer encodes alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_qwen3
from transformers import AutoTokenizer, GenerationConfig

from paceline.errors import InvalidInput
from paceline.learner.checkpoints.conversion.folders import from_dcp, to_dcp, to_folder
from paceline.learner.checkpoints.export import export_pretrained
from paceline.learner.checkpoints.other_files import check_tokenizer
from paceline.services.demo.task import make_tokenizer

END = make_tokenizer().eos_token_id
FILES = {
    "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "additional_chat_templates/tool_use.jinja": "{{ messages[0].content }}",
    "added_tokens.json": "{}",
    "special_tokens_map.json": "{}",
    "preprocessor_config.json": '{"image_processor_type": "none"}',
    "processor_config.json": "{}",
    "modeling_mine.py": "raise RuntimeError('never run')",
    "tekken.json": "{}",
    "vocab_table.tiktoken": "YQ== 0",
    "sentencepiece.bpe.model": "not read",
    "merges.txt": "",
    "LICENSE": "of the model",
    "generation_config.json": f'{{"eos_token_id": [8, 9, {END}], "temperature": 0.6, "do_sample": false}}',
}
NOT_COPIED = {
    "optimizer.pt": "of a trainer",
    "pytorch_model.bin": "pickle",
    "original/consolidated.pth": "pickle",
    "runs/ledger.txt": "of a run",
    "tokenizer.json.index.json": "{}",
    ".cache/lock": "",
    "paceline_manifest.json": "{}",
    "paceline.json": "{}",
    "model.sig": "{}",
}


def write_source(folder: Path, **extra: str) -> Path:
    tiny_qwen3(vocab_size=len(make_tokenizer())).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    for name, text in (FILES | NOT_COPIED | extra).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def export(source: Path, out: Path) -> None:
    weights = tiny_qwen3(vocab_size=len(make_tokenizer())).state_dict()
    export_pretrained(out, weights, model_name=str(source))


def convert(source: Path, out: Path) -> None:
    to_folder(str(source), out, dtype=torch.bfloat16)


def there_and_back(source: Path, out: Path) -> None:
    to_dcp(str(source), out.parent / "dcp")
    from_dcp(out.parent / "dcp", out)


@pytest.mark.parametrize("write", [export, convert, there_and_back])
def test_all_files_but_weights_are_copied(write: Callable[[Path, Path], None], tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    write(source, tmp_path / "out")
    for name, text in FILES.items():
        assert (tmp_path / "out" / name).read_text() == text, name
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    assert found & NOT_COPIED.keys() <= {"paceline_manifest.json"}
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [8, 9, END]
    first, second = (AutoTokenizer.from_pretrained(at) for at in (source, tmp_path / "out"))
    assert first.chat_template == second.chat_template
    assert set(first.chat_template) == {"default", "tool_use"}


def test_a_tokenizer_of_another_folder_replaces_all_files_of_the_models(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    other = tmp_path / "other"
    tokenizer: Any = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.save_pretrained(other)
    weights = tiny_qwen3(vocab_size=len(tokenizer)).state_dict()
    export_pretrained(tmp_path / "out", weights, model_name=str(source), tokenizer_name=str(other))
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found.chat_template is None
    assert found.eos_token_id == 5
    ends = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert ends == [8, 9, END, 5]  # a run samples up to any of them (hiyouga/LlamaFactory#10834)
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


def edit_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("another")


def edit_end(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"eos_token": "1"}))


def edit_number(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(content))


def edit_splitting(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "1"}, "content": "2"}
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (edit_template, "chat templates"),
        (edit_end, "special tokens"),
        (edit_number, "numbers of tokens"),
        (edit_splitting, "ids of texts"),
    ],
)
def test_another_tokenizer_is_refused(edit: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    source, copy = write_source(tmp_path / "source"), write_source(tmp_path / "copy")
    check_tokenizer(str(source), copy)
    edit(copy)
    with pytest.raises(InvalidInput, match=f"has different {words}"):
        check_tokenizer(str(source), copy)
