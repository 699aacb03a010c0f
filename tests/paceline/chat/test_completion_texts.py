"""The text of a completion has the model's output without marks of the chat, for every tokenizer; its answer has no
reasoning."""

from __future__ import annotations

from functools import partial
from typing import Any

import chat_templates
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from paceline.chat.answer_reader import AnswerReader, content_of, read_answer
from paceline.chat.completion_texts import (
    answer_of,
    completion_text,
    message_text,
    opens_reasoning,
    special_tokens,
    text_of,
)
from paceline.chat.rendering import AnswerFormat, ChatTemplate
from paceline.groups import Completion
from paceline.rollout.stop_strings import StopStrings
from paceline.services.rollout.openai.sampling import TextStream

TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>")
HEADERS = (
    "<|begin|>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
"""The form of Llama 3."""
INST = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    '{% elif m.tool_calls %}[TOOL_CALLS][{"name": "{{ m.tool_calls[0].function.name }}", "arguments": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}]<|im_end|>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
"""The form of Mistral, which refuses nothing and ignores a system message."""
OPENED = (
    "{% for m in messages %}<|user|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|><think>\n{% endif %}"
)
"""The form of a model that always reasons."""
ASKS_FOR_TAGS = "Write <think> and <answer> </answer>." + chat_templates.PLAIN.replace("<a>", "<|bot|>")
REASONS_WITHOUT_TOOLS = (
    "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {
    "hermes": chat_templates.HERMES,
    "headers": HEADERS,
    "inst": INST,
    "opened": OPENED,
    "asks": ASKS_FOR_TAGS,
    "none": None,
}
MARKS = {
    "hermes": ("<|im_start|>",),
    "headers": ("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"),
    "inst": ("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
    "opened": ("<|user|>", "<|bot|>"),
    "asks": ("<|bot|>",),
    "none": ("<|eot|>",),
}


def metaspace_tokenizer(template: str | None) -> Any:
    """A tokenizer with white space as `▁` within tokens, as Llama 2 and Gemma have it."""
    symbols = ["▁", "▁a", "▁b", *map(chr, range(33, 127)), "\n"]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, [("▁", "a"), ("▁", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", chat_template=template)


def unigram_tokenizer(template: str | None) -> Any:
    """A tokenizer as T5's and XLNet's, with a clean-up of spaces that is meant for another kind."""
    symbols = [
        ("<unk>", 0.0),
        ("▁", -1.0),
        *((symbol, -2.0) for symbol in map(chr, range(33, 127))),
        ("\n", -2.0),
    ]
    tokenizer = Tokenizer(models.Unigram(symbols, unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Metaspace(prepend_scheme="first"),
        decoders.Metaspace(prepend_scheme="first"),
    )
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<|im_end|>",
        chat_template=template,
        clean_up_tokenization_spaces=True,
    )


KINDS = {
    "bytes": chat_templates.character_tokenizer,
    "metaspace": metaspace_tokenizer,
    "unigram": unigram_tokenizer,
}


def make(kind: str, template: str, special: bool = True) -> Any:
    """Return a tokenizer that knows the tags, special or plain, and the marks of the template."""
    tokenizer = KINDS[kind](TEMPLATES[template])
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in TAGS])
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS[template]])
    return tokenizer


def completed(tokenizer: Any, text: str, finish_reason: str = "stop") -> Completion:
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    return Completion(ids, np.zeros(len(ids), np.float32), (), finish_reason)


RIGHT = "<think>why</think><answer>42</answer>"
WRITTEN = [
    # what the model writes, its text, its answer
    (RIGHT + "<|im_end|>", RIGHT, "<answer>42</answer>"),
    ("<think>\nwhy\n</think>\n\n42<|im_end|>", "<think>\nwhy\n</think>\n\n42", "42"),
    ("42<|im_end|>", "42", "42"),
    ("<|im_end|>", "", ""),
    ("", "", ""),
    ("a b<|im_end|>", "a b", "a b"),
    ("it is n't a , b .<|im_end|>", "it is n't a , b .", "it is n't a , b ."),
    ("why</think>42<|im_end|>", "why</think>42", "42"),
    ("<think>a</think>b</think>\nc<|im_end|>", "<think>a</think>b</think>\nc", "c"),
    ("<think>a</think><think>b</think>c<|im_end|>", "<think>a</think><think>b</think>c", "c"),
    ("<think>a</think>b <think>c", "<think>a</think>b <think>c", "b "),
    ("<think>a</think><think>b", "<think>a</think><think>b", ""),
    ("<think>perhaps 42, let me", "<think>perhaps 42, let me", ""),
    ("<think>a<answer>42</answer><|im_end|>", "<think>a<answer>42</answer>", "<answer>42</answer>"),
    (
        "<answer>1</answer><answer>2</answer>",
        "<answer>1</answer><answer>2</answer>",
        "<answer>1</answer><answer>2</answer>",
    ),
    (
        '<tool_call>\n{"x": 1}\n</tool_call><|im_end|>',
        '<tool_call>\n{"x": 1}\n</tool_call>',
        '<tool_call>\n{"x": 1}\n</tool_call>',
    ),
]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("written", "text", "answer"), WRITTEN)
def test_tags_are_text_whether_special_or_plain(kind: str, special: bool, written: str, text: str, answer: str) -> None:
    tokenizer = make(kind, "hermes", special)
    found = completion_text(tokenizer, completed(tokenizer, written, "stop" if "<|im_end|>" in written else "length"))
    assert found == text
    assert answer_of(text) == answer
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    stream = TextStream(partial(text_of, tokenizer))
    assert stream.push(ids) + stream.finish() == text_of(tokenizer, ids)


@pytest.mark.parametrize(
    ("template", "written", "text"),
    [
        ("hermes", "a<|im_end|>\n<|im_start|>user\nb", "a\nuser\nb"),
        ("hermes", "a<|im_start|>", "a"),
        ("headers", "42<|eot|>", "42"),
        ("headers", "4<|head|>2<|/head|>", "42"),
        ("headers", "<|begin|><think>4</think>2<|eot|>", "<think>4</think>2"),
        ("inst", "42 [/INST] [INST]", "42  "),
        ("inst", '[TOOL_CALLS][{"name": "f"}]<|im_end|>', '[TOOL_CALLS][{"name": "f"}]'),
        ("inst", "4[/TOOL_RESULTS]2", "42"),
        ("opened", "why</think>42<|im_end|>", "why</think>42"),
        ("opened", "why</think>42<|bot|>", "why</think>42"),
        ("asks", RIGHT, RIGHT),
        ("none", RIGHT + "<|im_end|>", RIGHT),
        ("none", "42<|eot|>", "42"),
        ("none", "4<|eot|>2", "4<|eot|>2"),
    ],
)
def test_marks_are_those_that_the_template_writes_around_messages(template: str, written: str, text: str) -> None:
    tokenizer = make("bytes", template)
    assert completion_text(tokenizer, completed(tokenizer, written)) == text


def test_tokenizers_without_such_tokens_decode_as_before() -> None:
    tokenizer = chat_templates.character_tokenizer(chat_templates.HERMES)
    ids = tokenizer("<think>é</think> 1 , 2<|im_end|>", add_special_tokens=False)["input_ids"]
    for end in range(len(ids) + 1):
        assert text_of(tokenizer, ids[:end]) == tokenizer.decode(ids[:end], skip_special_tokens=True)


def test_a_changed_template_is_noticed() -> None:
    tokenizer = make("bytes", "none")
    tokenizer.add_tokens([AddedToken("<|head|>", special=True)])
    ids = tokenizer("<|head|>a", add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids) == "<|head|>a"
    tokenizer.chat_template = HEADERS
    assert text_of(tokenizer, ids) == "a"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("stops", "written", "num_tokens_left", "text"),
    [
        (("</answer>",), RIGHT + "<answer>", 1, RIGHT),
        (("</answer>", "42"), RIGHT, 1, RIGHT.removesuffix("</answer>")),
        (("</think>",), RIGHT, 4, "<think>why</think>"),
        (("<|im_start|>",), "42<|im_start|>user", 4, "42"),
        (("42<",), RIGHT + "a", 1, RIGHT.removesuffix("/answer>")),
        (("<|im_start|>user",), "42\n<|im_start|>user\n43", 3, "42\n"),
        (("2<|im_start|>",), "42<|im_start|>user", 4, "4"),
    ],
)
def test_a_stop_string_may_be_a_special_token(
    special: bool, stops: tuple[str, ...], written: str, num_tokens_left: int, text: str
) -> None:
    tokenizer = make("bytes", "hermes", special)
    stop = StopStrings.of(tokenizer, stops)
    assert stop is not None
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    scanner = stop.scanner()
    assert scanner.push(ids)
    assert scanner.num_tokens == len(ids) - num_tokens_left
    ended = np.array(ids[: scanner.num_tokens], np.int32)
    assert completion_text(tokenizer, Completion(ended, ended, (), "stop"), stop.end) == text


def test_a_completion_within_the_reasoning_that_the_template_opened_begins_with_the_mark() -> None:
    tokenizer = make("bytes", "opened")
    prompt = ChatTemplate(tokenizer).encode([{"role": "user", "content": "6*7?"}])
    assert opens_reasoning(tokenizer, prompt)
    assert not opens_reasoning(tokenizer, prompt[:-3])
    cut_off, whole = completed(tokenizer, "6*7", "length"), completed(tokenizer, "6*7</think>42<|im_end|>")
    assert completion_text(tokenizer, cut_off, in_reasoning=True) == "<think>\n6*7"
    assert answer_of("<think>\n6*7") == ""
    assert completion_text(tokenizer, whole, in_reasoning=True) == "6*7</think>42"


CALL = {"function": {"name": "add", "arguments": '{"x": 1}'}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("message", "text", "answer"),
    [
        ({"content": "42"}, "42", "42"),
        ({"content": None}, "", ""),
        ({"content": "42", "reasoning_content": "why"}, "<think>\nwhy\n</think>\n\n42", "42"),
        ({"content": "42", "reasoning": "\nwhy\n"}, "<think>\nwhy\n</think>\n\n42", "42"),
        ({"content": None, "reasoning_content": "why, let me"}, "<think>\nwhy, let me", ""),
        ({"content": "", "reasoning": "why"}, "<think>\nwhy", ""),
        ({"content": "42", "reasoning_content": ""}, "42", "42"),
        ({"content": "<think>why</think>42", "reasoning": "why"}, "<think>why</think>42", "42"),
        ({"content": "So:", "tool_calls": [CALL]}, f"So:\n{CALLED}", f"So:\n{CALLED}"),
        ({"content": None, "tool_calls": [CALL, CALL]}, f"{CALLED}\n{CALLED}", f"{CALLED}\n{CALLED}"),
        (
            {"content": None, "reasoning": "why", "tool_calls": [CALL]},
            f"<think>\nwhy\n</think>\n\n{CALLED}",
            CALLED,
        ),
        ({"content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}, "42", "42"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": {"x": 1}}}]}, CALLED, CALLED),
    ],
)
def test_a_message_becomes_the_text_that_the_model_wrote(message: dict[str, Any], text: str, answer: str) -> None:
    assert message_text(message) == text
    assert answer_of(text) == answer
    opened = message_text(message, in_reasoning=True)
    assert opened == (text.removeprefix("<think>\n") if "\n</think>" in text else text)


@pytest.mark.parametrize("special", [True, False])
def test_a_template_that_renders_reasoning_and_no_tools_reasons(special: bool) -> None:
    tokenizer = make("bytes", "hermes", special)
    tokenizer.chat_template = REASONS_WITHOUT_TOOLS
    assert ChatTemplate(tokenizer).answer_format == AnswerFormat("none", reasons=True)


@pytest.mark.parametrize("special", [True, False])
def test_calls_and_reasoning_are_read_where_their_marks_are_special(special: bool) -> None:
    chat = ChatTemplate(make("bytes", "hermes", special))
    assert chat.answer_format == AnswerFormat("hermes", True, '<tool_call>\n{"name": "', '", "arguments": ')
    assert ChatTemplate(make("bytes", "inst", special)).answer_format.calls == "json"


def test_the_mark_before_calls_as_json_is_no_content() -> None:
    written = '[TOOL_CALLS][{"name": "add", "arguments": {"x": 1}}]'
    for text in (written, written.removeprefix("[TOOL_CALLS]")):
        (call,) = read_answer(text, AnswerReader("json", tools=[{"name": "add"}]))
        assert (call.name, call.arguments) == ("add", '{"x": 1}')  # type: ignore[union-attr]
    for text in ("[TOOL_CAL", "[TOOLS] are", "[42]"):
        assert content_of(read_answer(text, AnswerReader("json"))) == text


def test_special_tokens_are_classified_once() -> None:
    tokenizer = make("bytes", "hermes")
    found = special_tokens(tokenizer)
    assert special_tokens(tokenizer) is found
    assert set(found.marks.values()) == {"<|im_end|>", "<|im_start|>"}
    assert set(found.written.values()) == set(TAGS)
