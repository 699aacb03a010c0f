"""From prompts, completions and conversations to tokens: where a completion begins, and which tokens are whose."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_kinds import EXACT, KINDS, tokenizer_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.data.tokens import (
    check_vocabulary,
    encode_continuation,
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
    always = tokenizer_with("{{ enable_thinking }}" + PLAIN)
    for encode in (encode_exchange, encode_for_scoring):
        on = encode(always, TURNS[:1], TURNS[1:2], "auto", {"enable_thinking": True})
        assert always.decode(on[0] if isinstance(on, tuple) else on).startswith("True")


def test_an_argument_that_the_template_does_not_read_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'enable_thinkin', which the chat template"):
        encode_prompt(tokenizer_with(PLAIN + "{{ enable_thinking }}"), TURNS[:1], "auto", {"enable_thinkin": False})


def test_a_message_is_what_the_template_adds_up_to_the_end_of_sequence() -> None:
    tokenizer = tokenizer_with(PLAIN)
    prompt, completion = encode_exchange(tokenizer, TURNS[:3], TURNS[3:], "auto")
    assert tokenizer.decode(prompt).endswith("and 3+3?<|end|>\n<|assistant|>")
    assert tokenizer.decode(completion) == "6<|end|>"
    as_text = encode_exchange(tokenizer, TURNS[:3], "6", "auto")
    assert as_text[1].tolist() == completion.tolist()


@pytest.mark.parametrize(("pad", "read"), [("<|pad|>", "2+2=4<|end|>"), ("<|end|>", "2+2=4")])
def test_a_score_is_read_at_the_last_token_that_is_no_padding(pad: str, read: str) -> None:
    tokenizer = tokenizer_with(None, pad)
    ids = encode_for_scoring(tokenizer, "2+2=", "4", "auto")
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == read


def test_a_template_that_raises_is_the_prompts_fault_with_the_exceptions_text() -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    prompts = [[{"role": "system", "content": text}] for text in ("short", "a long one " * 20)]
    causes = set()
    for prompt in prompts:
        with pytest.raises(InvalidInput, match="chat template raised TemplateError: System role") as raised:
            encode_prompt(tokenizer_with(strict + PLAIN), prompt, "auto")
        causes.add(str(raised.value).partition(", for the messages ")[0])
    assert len(causes) == 1  # the excerpt comes last


@pytest.mark.parametrize("encode", [encode_text, lambda tokenizer, text: encode_prompt(tokenizer, text, "auto")])
def test_a_tokenizer_that_panics_is_the_texts_fault(encode: Any) -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    class Panicking:
        eos_token_id = 0

        def __call__(self, *_: Any, **__: Any) -> None:
            raise panic("index out of bounds")

    with pytest.raises(InvalidInput, match="the tokenizer raised PanicException: index out of bounds, for the"):
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


def test_a_token_that_texts_come_to_has_a_row_in_the_embedding() -> None:
    """Tokens that were added without `resize_token_embeddings` are beyond the embedding. Gemma 3's text models have one for images,
    which no text has."""
    tokenizer = tokenizer_with("{{ messages }}<|user|>")
    ids = tokenizer.get_vocab()
    check_vocabulary(tokenizer, len(ids), "it")
    check_vocabulary(tokenizer, ids["<|user|>"] + 1, "it")  # <|assistant|> is the last, and not in the template
    for rows, token in ((ids["<|user|>"], "<|user|>"), (ids["<|end|>"], "<|end|>"), (200, "Č")):
        with pytest.raises(InvalidInput, match=rf"it: the tokenizer gives '{re.escape(token)}' the id .* {rows} rows"):
            check_vocabulary(tokenizer, rows, "it")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHORT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SAY = [{"role": "user", "content": "say 42"}]
EXCHANGES = [
    ("The answer is", " 42"),
    ("The answer is ", "42"),
    ("The answer is:\n", "yes"),
    ("say\n\n", "\nno"),
    ("say", ""),
    ("user: 42", "42 is yes"),
    (SAY, "yes"),
    (SAY, " The answer\n"),
    (SAY, [{"role": "assistant", "content": "The answer is 42"}]),
]


def whole_text(tokenizer: Any, prompt: Any, completion: Any) -> str:
    """What a prompt and a completion are together, with the end."""
    if isinstance(prompt, str):
        return f"{prompt}{completion}<|im_end|>"
    opened = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return f"{opened}{completion if isinstance(completion, str) else completion[0]['content']}<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("added", "pad"), [("", "<pad>"), ("b", "<|im_end|>"), ("be", "<pad>")])
def test_prompt_and_completion_are_the_text(kind: str, added: str, pad: str) -> None:
    for template in (CHATML, SHORT):
        tokenizer = tokenizer_of(kind, added, pad, template)
        for prompt, completion in EXCHANGES:
            prompt_ids, completion_ids = encode_exchange(tokenizer, prompt, completion, "auto")
            assert np.array_equal(prompt_ids, encode_prompt(tokenizer, prompt, "auto"))
            ids = np.concatenate([prompt_ids, completion_ids])
            text = whole_text(tokenizer, prompt, completion)
            whole = tokenizer(text, add_special_tokens=False)["input_ids"]
            begin = ["<s>"] if "b" in added and isinstance(prompt, str) else []
            assert tokenizer.decode(ids) == tokenizer.decode([*tokenizer.convert_tokens_to_ids(begin), *whole])
            if kind in EXACT and not begin and kind != "strips":
                assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["42", " 42", "\n42", "yes is no", "\n\nuser: 42", "<|im_end|>no", "!"])
def test_a_text_goes_on_without_a_white_space_that_it_does_not_have(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind, "be")
    before = encode_prompt(tokenizer, "The answer: ", "auto")
    ids = encode_continuation(tokenizer, before, text)
    shown = str(tokenizer.decode([*before, *ids])).replace("> ", ">")  # of a mark with a white space behind it
    if kind == "strips":
        assert shown.split() == f"<s>The answer:{text}".split()  # the prompt has lost its last space
    else:
        assert shown == f"<s>The answer: {text}" if kind != "byte_level_prefix" else shown.endswith(text)


SENTENCE_PIECE = ["metaspace_first", "metaspace_always", "legacy_llama", "unigram", "byte_level_prefix"]


@pytest.mark.parametrize("kind", SENTENCE_PIECE)
def test_a_text_behind_a_mark_is_what_the_tokenizer_writes_there(kind: str) -> None:
    tokenizer = tokenizer_of(kind, template=SHORT)
    prompt, as_text = encode_exchange(tokenizer, SAY, "yes", "auto")
    _, as_message = encode_exchange(tokenizer, SAY, [{"role": "assistant", "content": "yes"}], "auto")
    assert as_text.tolist() == as_message.tolist()
    assert encode_continuation(tokenizer, prompt, "yes").tolist() == as_text[:-1].tolist()


@pytest.mark.parametrize("kind", ["byte_level", "metaspace_first", "legacy_llama"])
@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        (
            "<s><|im_start|>say",
            "yes",
            "<s><|im_start|>say|yes<|im_end|>",
        ),  # vllm-project/vllm#27486, open-r1#462
        ("<s>say", "yes<|im_end|>", "<s>say|yes<|im_end|>"),
        ("say", "yes<|im_end|>\n", "<s>say|yes<|im_end|>"),
        ("say<|im_end|>", "yes", "<s>say<|im_end|>|yes<|im_end|>"),
        ("say<|im_end|>\n", "<|im_end|>", "<s>say<|im_end|>\n|<|im_end|>"),
        ("<s><s>say", "yes<|im_end|>no", "<s><s>say|yes<|im_end|>no<|im_end|>"),
    ],
)
def test_special_tokens_are_neither_doubled_nor_taken_away(
    kind: str, prompt: str, completion: str, expected: str
) -> None:
    tokenizer = tokenizer_of(kind, "be")
    prompt_ids, ids = encode_exchange(tokenizer, prompt, completion, "auto")
    shown = "|".join(str(tokenizer.decode(part)) for part in (prompt_ids, ids))
    assert shown.replace("> ", ">") == expected  # some write a white space behind a mark
    assert encode_prompt(tokenizer, prompt, "auto").tolist() == prompt_ids.tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("say yes", "<s>say yes<|im_end|>"),
        ("<s>say yes<|im_end|>", "<s>say yes<|im_end|>"),
        ("<|im_start|>user\nsay<|im_end|>\n", "<s><|im_start|>user\nsay<|im_end|>"),
        ("say<|im_end|>yes", "<s>say<|im_end|>yes<|im_end|>"),
    ],
)
def test_a_whole_text_has_one_begin_and_one_end(text: str, expected: str) -> None:
    for added in ("b", "be"):
        tokenizer = tokenizer_of("byte_level", added)
        assert tokenizer.decode(encode_text(tokenizer, text)) == expected


BEGUN = [*SAY, {"role": "assistant", "content": "The answer is\n"}]


@pytest.mark.parametrize("template", [CHATML, SHORT], ids=["chatml", "short"])
@pytest.mark.parametrize("kind", EXACT)
def test_a_prompt_that_the_assistant_ends_goes_on(kind: str, template: str) -> None:
    tokenizer = tokenizer_of(kind, "b", template=template)
    text = tokenizer.apply_chat_template(BEGUN, tokenize=False, continue_final_message=True)
    assert text.endswith("The answer is\n")
    prompt_ids, ids = encode_exchange(tokenizer, BEGUN, "42", "auto")
    assert prompt_ids.tolist() == encode_prompt(tokenizer, BEGUN, "auto").tolist()
    assert prompt_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(tokenizer.decode(ids).split()) == "42<|im_end|>"


def test_a_prompt_may_be_the_beginning_of_an_answer_alone() -> None:
    tokenizer = tokenizer_of("byte_level", template="{% for m in messages %}{{ m.content }}{% endfor %}")
    for content in ("The answer is", "<think>\n"):
        assert (
            tokenizer.decode(encode_prompt(tokenizer, [{"role": "assistant", "content": content}], "auto")) == content
        )


@pytest.mark.parametrize("content", ["", "\n", " "])
def test_an_empty_beginning_is_the_opening_of_an_answer(content: str) -> None:
    """Templates that trim contents, as Llama 3's and Gemma's, would lose the white space of the opening with it."""
    template = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
    prompt = [*SAY, {"role": "assistant", "content": content}]
    tokenizer = tokenizer_of("byte_level", template=template)
    text = tokenizer.decode(encode_prompt(tokenizer, prompt, "auto"))
    assert text == tokenizer.decode(encode_prompt(tokenizer, SAY, "auto")) + content


def test_turns_of_the_assistant_in_a_row_stay_turns() -> None:
    tokenizer = tokenizer_of("byte_level", template=CHATML)
    prompt_ids, ids = encode_exchange(tokenizer, BEGUN, [{"role": "assistant", "content": "yes"}], "auto")
    assert tokenizer.decode(prompt_ids).endswith("The answer is\n<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(ids) == "yes<|im_end|>"


@pytest.mark.parametrize(
    ("template", "last"),
    [
        (CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"), {"content": "<think>no</think>yes"}),
        (  # Qwen 3 closes an empty reasoning before the last answer
            CHATML.replace("{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"),
            {"content": "<think>\n"},
        ),
        (CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"), {"content": "yes"}),
        (CHATML, {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}),
        (CHATML, {"content": "yes", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}),
    ],
)  # fmt: skip
def test_a_message_that_the_template_rewrites_is_not_continued(template: str, last: dict[str, Any]) -> None:
    tokenizer = tokenizer_of("byte_level", template=template)
    with pytest.raises(
        InvalidInput, match=r"prompt ends with (the message .* of the assistant|an assistant's message)"
    ):
        encode_prompt(tokenizer, [*SAY, {"role": "assistant", **last}], "auto")


def test_a_message_of_the_template_ends_at_its_own_stop(tmp_path: Path) -> None:
    """Sampling stops at the ends that a model's files name, as Llama 3's, whose tokenizer names another one."""
    tokenizer = tokenizer_of("byte_level", template=CHATML)
    tokenizer.eos_token = "<|user|>"
    tokenizer.save_pretrained(tmp_path)
    answer = [{"role": "assistant", "content": "yes"}]

    def trained() -> str:
        loaded = load_tokenizer(PolicySection(model_name=str(tmp_path)))
        return str(loaded.decode(encode_exchange(loaded, SAY, answer, "auto")[1]))

    assert trained() == "yes<|im_end|>\n<|user|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    assert trained() == "yes<|im_end|>"
    loaded = load_tokenizer(PolicySection(model_name=str(tmp_path)))
    scored = encode_for_scoring(loaded, SAY, answer, "auto")
    assert str(loaded.decode(scored)).endswith("yes<|im_end|>\n<|user|>"), "a scorer has no settings of sampling"


def test_a_tokenizer_without_an_end_is_named() -> None:
    tokenizer = tokenizer_of("byte_level")
    tokenizer.eos_token = None
    with pytest.raises(InvalidInput, match=r"no end-of-sequence token.*set eos_token"):
        encode_exchange(tokenizer, "say", "yes", "auto")
