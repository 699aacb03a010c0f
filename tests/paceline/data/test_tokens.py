"""From prompts, completions and conversations to tokens: where a completion begins, and which tokens are whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.data.conversations import encode_conversation
from paceline.data.tokens import (
    encode_exchange,
    encode_for_scoring,
    encode_prompt,
    encode_text,
    load_tokenizer,
)
from paceline.errors import InvalidInput
from paceline.spec import PolicySection

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}<|{{ m.role }}|>{{ m.content }}<|end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Leaves earlier answers out once later messages follow, as templates of reasoning models do."""

TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3+3?"},
    {"role": "assistant", "content": "6"},
]


def tokenizer_with(template: str | None, pad: str = "<|pad|>") -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token=pad)
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    if template:
        fast.chat_template = template
    return fast


def test_a_text_completion_ends_with_the_end_of_sequence() -> None:
    tokenizer = tokenizer_with(None)
    prompt, completion = encode_exchange(tokenizer, "2+2=", "4", "auto")
    assert tokenizer.decode(prompt) == "2+2="
    assert tokenizer.decode(completion) == "4<|end|>"


def test_arguments_of_the_template_reach_it_wherever_it_is_applied() -> None:
    tokenizer = tokenizer_with(PLAIN + "{% if not enable_thinking %}!{% endif %}")
    for thinks, mark in ((True, ""), (False, "!")):
        kwargs = {"enable_thinking": thinks}
        asked = encode_prompt(tokenizer, TURNS[:1], "auto", kwargs)
        assert tokenizer.decode(asked).endswith(f"<|assistant|>{mark}")
        ids, mask = encode_conversation(tokenizer_with(MARKED + "{{ enable_thinking }}"), TURNS, kwargs)
        assert mask.any()
        assert len(ids) == len(mask)
    always = tokenizer_with("{{ enable_thinking }}" + PLAIN)
    for encode in (encode_exchange, encode_for_scoring):
        on = encode(always, TURNS[:1], TURNS[1:2], "auto", {"enable_thinking": True})
        assert always.decode(on[0] if isinstance(on, tuple) else on).startswith("True")


def test_an_argument_that_the_template_does_not_read_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'enable_thinkin', which the chat template"):
        encode_prompt(
            tokenizer_with(PLAIN + "{{ enable_thinking }}"), TURNS[:1], "auto", {"enable_thinkin": False}
        )


def test_a_message_is_what_the_template_adds_up_to_the_end_of_sequence() -> None:
    tokenizer = tokenizer_with(PLAIN)
    prompt, completion = encode_exchange(tokenizer, TURNS[:3], TURNS[3:], "auto")
    assert tokenizer.decode(prompt).endswith("and 3+3?<|end|>\n<|assistant|>")
    assert tokenizer.decode(completion) == "6<|end|>"
    as_text = encode_exchange(tokenizer, TURNS[:3], "6", "auto")
    assert as_text[1].tolist() == completion.tolist()


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prefixes", "marks"])
def test_every_answer_of_a_conversation_is_the_assistants(template: str) -> None:
    tokenizer = tokenizer_with(template)
    ids, mask = encode_conversation(tokenizer, TURNS)
    assert tokenizer.decode(ids[mask]) == "4<|end|>6<|end|>"
    assert mask[-1]
    whole = tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=False)
    assert ids.tolist() == whole[: len(ids)]


@pytest.mark.parametrize("opening", ["{%- generation %}", "{%-generation%}", "{%  generation -%}"])
def test_marks_are_found_however_they_are_written(opening: str) -> None:
    tokenizer = tokenizer_with(MARKED.replace("{% generation %}", opening))
    ids, mask = encode_conversation(tokenizer, TURNS)
    assert tokenizer.decode(ids[mask]) == "4<|end|>6<|end|>"


def test_marks_around_nothing_of_the_assistants_are_refused() -> None:
    wrong = MARKED.replace("m.role == 'assistant'", "m.role == 'tool'")
    with pytest.raises(InvalidInput, match=r"generation %} marks enclose none"):
        encode_conversation(tokenizer_with(wrong), TURNS)


def test_a_tokenizer_that_cannot_tell_marked_tokens_is_refused() -> None:
    class SlowTokenizer:
        chat_template, is_fast = MARKED, False

    with pytest.raises(InvalidInput, match=r"SlowTokenizer cannot tell.*tokenizer\.json"):
        encode_conversation(SlowTokenizer(), TURNS)


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    tokenizer = tokenizer_with(FORGETFUL)
    with pytest.raises(InvalidInput, match=r"in another way once later ones follow.*loss_mask=completion"):
        encode_conversation(tokenizer, TURNS)
    _, completion = encode_exchange(tokenizer, TURNS[:3], TURNS[3:], "auto")
    assert tokenizer.decode(completion) == "6<|end|>"


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no chat template"):
        encode_conversation(tokenizer_with(None), TURNS)


@pytest.mark.parametrize(("pad", "read"), [("<|pad|>", "2+2=4<|end|>"), ("<|end|>", "2+2=4")])
def test_a_score_is_read_at_the_last_token_that_is_no_padding(pad: str, read: str) -> None:
    tokenizer = tokenizer_with(None, pad)
    ids = encode_for_scoring(tokenizer, "2+2=", "4", "auto")
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == read


def test_a_template_that_raises_is_the_prompts_fault_with_the_exceptions_text() -> None:
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    )
    prompts = [[{"role": "system", "content": text}] for text in ("short", "a long one " * 20)]
    causes = set()
    for prompt in prompts:
        with pytest.raises(InvalidInput, match="chat template raised TemplateError: System role") as raised:
            encode_prompt(tokenizer_with(strict + PLAIN), prompt, "auto")
        causes.add(str(raised.value).partition(", for the messages ")[0])
    assert len(causes) == 1  # the excerpt comes last


@pytest.mark.parametrize(
    "encode", [encode_text, lambda tokenizer, text: encode_prompt(tokenizer, text, "auto")]
)
def test_a_tokenizer_that_panics_is_the_texts_fault(encode: Any) -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    class Panicking:
        eos_token_id = 0

        def __call__(self, *_: Any, **__: Any) -> None:
            raise panic("index out of bounds")

    with pytest.raises(
        InvalidInput, match="the tokenizer raised PanicException: index out of bounds, for the"
    ):
        encode(Panicking(), "text")


def test_a_folder_without_tokenizer_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(InvalidInput, match=r"policy\.tokenizer_name .* has no tokenizer files"):
        load_tokenizer(PolicySection(model_name=str(tmp_path)))


def test_a_damaged_tokenizer_is_named_with_its_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"tokenizer .*cannot be loaded: KeyError: 'added_tokens'"):
        load_tokenizer(PolicySection(model_name=str(tmp_path)))
