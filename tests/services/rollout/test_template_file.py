"""The chat template on disk: a corrected one is loaded, a damaged one is not."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.data.tokens import load_tokenizer
from paceline.services.demo.task import make_tokenizer
from paceline.services.rollout.group_sampler import TemplateFile
from paceline.spec import PolicySection


def test_a_template_that_was_corrected_is_read_anew(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    policy = PolicySection(model_name=str(tmp_path))
    tokenizer, file = load_tokenizer(policy), TemplateFile(policy)
    before = tokenizer.chat_template
    assert not file.reload(tokenizer)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "{{ messages }} corrected"}))
    assert file.reload(tokenizer)
    assert tokenizer.chat_template == "{{ messages }} corrected" != before
    assert not file.reload(tokenizer)
    config.write_text("{")
    assert not file.reload(tokenizer)
    assert file.reloads == 1
    assert tokenizer.chat_template == "{{ messages }} corrected"
