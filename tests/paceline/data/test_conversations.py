"""Masks of conversations: every answer with the token that ends it, and nothing outside of answers."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import KINDS, tokenizer_of

from paceline.data.conversations import encode_conversation
from paceline.data.tokens import encode_exchange, load_tokenizer
from paceline.errors import InvalidInput
from paceline.spec import PolicySection

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}<|{{ m.role }}|>{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Leaves earlier answers out once later messages follow, as templates of reasoning models do."""

TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3+3?"},
    {"role": "assistant", "content": "6"},
]


def made(template: str | None, kind: str = "byte_level") -> Any:
    return tokenizer_of(kind, template=template)


def trained(tokenizer: Any, messages: list[Any]) -> list[str]:
    """The texts that train."""
    ids, mask = encode_conversation(tokenizer, messages)
    runs = groupby(zip(ids.tolist(), mask.tolist(), strict=True), key=lambda pair: pair[1])
    return [str(tokenizer.decode([token for token, _ in run])) for trains, run in runs if trains]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prefixes", "marks"])
def test_every_answer_of_a_conversation_is_the_assistants(template: str) -> None:
    tokenizer = made(template)
    ids, mask = encode_conversation(tokenizer, TURNS)
    assert tokenizer.decode(ids[mask]) == "4<|im_end|>6<|im_end|>"
    assert mask[-1]
    whole = tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=False)
    assert ids.tolist() == whole[: len(ids)]


@pytest.mark.parametrize("opening", ["{%- generation %}", "{%-generation%}", "{%  generation -%}"])
def test_marks_are_found_however_they_are_written(opening: str) -> None:
    tokenizer = made(MARKED.replace("{% generation %}", opening))
    ids, mask = encode_conversation(tokenizer, TURNS)
    assert tokenizer.decode(ids[mask]) == "4<|im_end|>6<|im_end|>"


def test_marks_around_nothing_of_the_assistants_are_refused() -> None:
    wrong = MARKED.replace("m.role == 'assistant'", "m.role == 'tool'")
    with pytest.raises(InvalidInput, match=r"generation %} marks enclose no such message"):
        encode_conversation(made(wrong), TURNS)


def test_a_tokenizer_that_cannot_tell_marked_tokens_is_refused() -> None:
    class SlowTokenizer:
        chat_template, is_fast = MARKED, False

    with pytest.raises(InvalidInput, match=r"SlowTokenizer cannot find.*tokenizer\.json"):
        encode_conversation(SlowTokenizer(), TURNS)


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    tokenizer = made(FORGETFUL)
    with pytest.raises(InvalidInput, match=r"changes the messages .* once later messages follow.*loss_mask=completion"):
        encode_conversation(tokenizer, TURNS)
    _, completion = encode_exchange(tokenizer, TURNS[:3], TURNS[3:], "auto")
    assert tokenizer.decode(completion) == "6<|im_end|>"


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no chat template"):
        encode_conversation(made(None), TURNS)


def test_arguments_of_the_template_reach_it() -> None:
    ids, mask = encode_conversation(made(MARKED + "{{ enable_thinking }}"), TURNS, {"enable_thinking": True})
    assert mask.any()
    assert len(ids) == len(mask)


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"


def chat(answer: str, turn: str = TURN, opening: str = "<|im_start|>assistant\n") -> str:
    """A template that writes answers in its own way."""
    return (
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{answer}{{% else %}}{turn}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    )


MARKS = {
    "closed before the stop": ANSWER,  # trl#5988, trl#7230
    "closed behind the stop": ANSWER.replace("{% endgeneration %}<|im_end|>", "<|im_end|>{% endgeneration %}"),
    "closed behind the line": ANSWER.replace("{% endgeneration %}<|im_end|>\n", "<|im_end|>\n{% endgeneration %}"),
    "none": TURN,
    "white space before the stop": ANSWER.replace("<|im_end|>", "\n<|im_end|>"),
    "white space within a token": ANSWER.replace("assistant\n{% generation %}", "assistant {% generation %}"),
    "trimmed": ANSWER.replace("m.content", "m.content | trim"),
}


@pytest.mark.parametrize("answer", MARKS.values(), ids=MARKS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_trains_with_its_stop_and_nothing_else(kind: str, answer: str) -> None:
    turns = [
        {"role": "user", "content": "say 42"},
        {"role": "assistant", "content": "The answer is 42"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "yes"},
    ]
    texts = trained(made(chat(answer), kind), turns)
    assert ["".join(text.split()) for text in texts] == ["Theansweris42<|im_end|>", "yes<|im_end|>"]


@pytest.mark.parametrize("content", [" yes", "yes ", "\nyes\n", "", "yes\n\n", "é", "☃ 漢字", "\U0001f600"])
@pytest.mark.parametrize("kind", ["byte_level", "metaspace_first", "legacy_llama", "unigram", "strips"])
def test_answers_of_any_text_are_masked_as_a_whole(kind: str, content: str) -> None:
    """transformers' own mask runs on to the end of the text where the last character has no token (transformers#47325)."""
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": content}, *TURNS[2:]]
    first, second = trained(made(chat(ANSWER), kind), turns)
    assert first.endswith("<|im_end|>")
    assert "".join(second.split()) == "6<|im_end|>"
    if content.isascii() or kind not in ("unigram", "strips"):  # which have no token for other characters
        assert "".join(first.split()) == "".join(content.split()) + "<|im_end|>"
    else:
        assert "user" not in first


def test_a_stop_within_an_answer_ends_it() -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "yes<|im_end|>"}]
    assert trained(made(chat(ANSWER)), turns) == ["yes<|im_end|>"]


def test_marks_that_end_in_the_first_token_leave_the_rest_alone() -> None:
    template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    tokenizer = made(template + "<|im_end|>{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}")
    turns = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "The answer"}]
    assert trained(tokenizer, turns) == ["yes<|im_end|>"]


def test_the_last_answer_gets_an_end_where_the_template_writes_none() -> None:
    endless = chat("A:{% generation %}{{ m.content }}{% endgeneration %}\n", "Q:{{ m.content }}\n", "A:")
    for template in (endless, endless.replace("{% generation %}", "").replace("{% endgeneration %}", "")):
        (text,) = trained(made(template), TURNS[:2])
        assert "".join(text.split()) == "4<|im_end|>"
        with pytest.raises(InvalidInput, match=r"writes no token at which sampling stops \('<\|im_end\|>'\)"):
            trained(made(template), TURNS)


def test_a_text_between_an_answer_and_its_stop_is_refused() -> None:
    template = chat(ANSWER.replace("<|im_end|>", "no<|im_end|>"))
    for turns in (TURNS[:2], TURNS):
        with pytest.raises(InvalidInput, match="never learn to stop; put the template's end of a turn within"):
            trained(made(template), turns)


def test_several_spans_of_one_answer_have_one_stop() -> None:
    parts = "<|im_start|>assistant\n{% generation %}{{ m.content }}{% endgeneration %} is {% generation %}42{% endgeneration %}"
    texts = trained(made(chat(f"{parts}<|im_end|>\n")), TURNS[:2])
    assert [text.strip() for text in texts] == ["4", "42<|im_end|>"]


def test_stops_and_stop_strings_of_the_policy_count(tmp_path: Path) -> None:
    """Qwen 2.5's base model: its end of sequence is not the end of a turn that its template writes."""
    tokenizer = made(chat(TURN))
    tokenizer.eos_token = "<|user|>"
    tokenizer.save_pretrained(tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def loaded(**generation: Any) -> Any:
        return load_tokenizer(PolicySection.model_validate({"model_name": str(tmp_path), "generation": generation}))

    for answer in (
        TURN,
        MARKS["closed behind the stop"],
    ):  # the last answer trains what follows the end of a turn
        tokenizer.chat_template = chat(answer)
        tokenizer.save_pretrained(tmp_path)
        texts = ["".join(text.split()) for text in trained(loaded(), TURNS)]
        assert texts == ["4<|im_end|>", "6<|im_end|><|user|>"]
    tokenizer.chat_template = chat(ANSWER)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=r"at which sampling stops \('<\|user\|>'\).*stop_token_ids"):
        trained(loaded(), TURNS)
    tokenizer.chat_template = chat(TURN)
    tokenizer.save_pretrained(tmp_path)
    assert trained(loaded(stop_token_ids=[end]), TURNS) == ["4<|im_end|>", "6<|im_end|>"]
    assert trained(loaded(stop_strings=["<|im_end|>"]), TURNS)[0].startswith("4<|im_end|>")


def test_a_template_that_always_opens_a_turn_trains_none_of_it() -> None:
    """As Llama 3's first template did (meta-llama/llama3#104)."""
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}<|assistant|>"
    assert trained(made(template), TURNS[:2]) == ["4<|im_end|>"]
    assert made(template).decode(encode_exchange(made(template), TURNS[:1], TURNS[1:2], "auto")[1]) == "4<|im_end|>"


def test_the_next_roles_mark_trains_where_sampling_stops_at_it() -> None:
    """GLM's templates write no end of a turn; the model stops at the mark of the next one."""
    tokenizer = made(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.eos_token = "<|user|>"
    assert trained(tokenizer, TURNS) == ["4<|user|>", "6<|user|>"]
