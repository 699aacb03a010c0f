"""Extracts text and answer of a completion for reward functions, evaluations, traces and shown samples. The text is the
model's output without the chat's marks. Marks are the special tokens that frame messages: those that the tokenizer
names (begin and end of sequence, padding, …), those that the chat template writes around messages, and the one that
ended the completion. Other special tokens (`<think>`, `</answer>`, `<tool_call>`) are text. The answer is the text
after the reasoning, which `<think>` and `</think>` enclose."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from paceline.chat.call_formats import CLOSE, OPEN
from paceline.errors import InvalidInput
from paceline.groups import Completion, IntArray

THINK, END_THINK = "<think>", "</think>"

ANSWER_TAG = re.compile(r"<answer>.*</answer>", re.DOTALL)
TAG = re.compile(r"<(/?)([^<>|/\s]+)>|\[(/?)([^\[\]/\s]+)\]")
"""A tag, `<x>` or `[x]`; with a slash, `</x>` or `[/x]`, it closes."""
CONTENTS = {role: f"{role} 4711 says" for role in ("system", "user", "assistant", "tool")}
"""Maps a role to the content of the role's messages in a probe of a template."""
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Names of special tokens for which all tokenizers have an attribute: `bos` for `bos_token`."""
TAIL = 32
"""Number of tokens at the end of a prompt that are searched for an opening `<think>`."""


class SpecialTokens(NamedTuple):
    """A tokenizer's special tokens by their role in a completion's text."""

    template: Any
    """Chat template from which the marks were derived."""
    marks: dict[int, str]
    """Ids of the special tokens that are marks of the chat, each with its text."""
    written: dict[int, str]
    """Ids of the special tokens that count as text if the model writes them, each with this text."""


_special_tokens: WeakKeyDictionary[Any, SpecialTokens] = WeakKeyDictionary()


def text_of(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of tokens without the chat's marks."""
    special = special_tokens(tokenizer)
    ids, skips = list(token_ids), special.written.keys().isdisjoint(token_ids)
    if not skips:
        ids = [each for each in ids if each not in special.marks]
    return str(tokenizer.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False))


def completion_text(
    tokenizer: Any,
    completion: Completion,
    end_of: Callable[[IntArray], str | None] | None = None,
    *,
    in_reasoning: bool = False,
) -> str:
    """Return the text of a completion. If a stop string ended the completion, `end_of` returns the text up to and with
    the string, else None. With `in_reasoning`, the chat template opened the reasoning: if the completion does not
    close the reasoning, the text begins with `<think>`, so that nobody mistakes it for an answer; else the text has
    `</think>` alone, as the model wrote it."""
    ids, special = completion.token_ids, special_tokens(tokenizer)
    text = None
    if completion.finish_reason == "stop" and len(ids):
        text = None if end_of is None else end_of(ids)
        ends = special.written.get(int(ids[-1]))
        if text is None and ends is not None and not _closes(ends):
            ids = ids[:-1]
    text = text_of(tokenizer, ids.tolist()) if text is None else text
    return f"{THINK}\n{text}" if in_reasoning and END_THINK not in text else text


def answer_of(text: str) -> str:
    """Return the text after the last `</think>`, or the whole text without reasoning. If reasoning begins and does not
    end, return the text before it, and the `<answer>…</answer>` in it if there is one."""
    _, mark, rest = text.rpartition(END_THINK)
    answer = rest.lstrip("\n") if mark else rest
    before, opened, reasoning = answer.partition(THINK)
    if not opened:
        return answer
    stated = ANSWER_TAG.search(reasoning)
    return (before if before.strip() else "") + (stated[0] if stated else "")


def message_text(message: Mapping[str, Any], *, in_reasoning: bool = False) -> str:
    """Return an assistant's message as its model wrote it: reasoning, content and calls, with the usual marks around
    reasoning and calls. Raises TypeError for content that is neither text nor a list of parts. in_reasoning: the chat
    template opened the reasoning, so the text has `</think>` alone."""
    text = _content_text(message.get("content"))
    calls = "\n".join(map(_call_text, message.get("tool_calls") or ()))
    text = f"{text}\n{calls}" if text and calls else text or calls
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(reasoning, str) or text.lstrip().startswith(THINK):
        return text
    reasoning = reasoning.strip("\n")
    if not text:
        return f"{THINK}\n{reasoning}"
    return ("" if in_reasoning else f"{THINK}\n") + f"{reasoning}\n{END_THINK}\n\n{text}"


def opens_reasoning(tokenizer: Any, prompt_ids: IntArray) -> bool:
    """Return whether a prompt ends with `<think>`, so that the completion begins within the reasoning."""
    tail = str(tokenizer.decode(prompt_ids[-TAIL:].tolist(), skip_special_tokens=False))
    return tail.rstrip().endswith(THINK)


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """Return a tokenizer's special tokens. The cached result is renewed if the tokenizer's template changes."""
    template = tokenizer.chat_template
    found = _special_tokens.get(tokenizer)
    if found is None or found.template != template:
        found = _special_tokens[tokenizer] = _told_apart(tokenizer)
    return found


def _told_apart(tokenizer: Any) -> SpecialTokens:
    added = getattr(tokenizer, "added_tokens_decoder", {})  # the tokenizers of mistral-common have none
    texts = {number: str(token) for number, token in added.items() if token.special}
    texts |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    framing = {str(getattr(tokenizer, f"{name}_token")) for name in NAMES} | {"<s>", "</s>"}
    framing |= _framing(tokenizer, set(texts.values()) - framing)
    marks = {number: text for number, text in texts.items() if text in framing}
    return SpecialTokens(tokenizer.chat_template, marks, {n: t for n, t in texts.items() if n not in marks})


def _framing(tokenizer: Any, specials: set[str]) -> set[str]:
    """Return the special tokens that the chat template writes around messages. A tag counts only beside the content of
    a role other than the assistant (`[INST]`). In other positions a tag is text that the model is to write, such as
    `<think>` at the beginning of its turn or `<answer>` in a system prompt."""
    found: set[str] = set()
    for text in _probes(tokenizer) if specials and tokenizer.chat_template else ():
        for special in (each for each in specials - found if each in text):
            mark, content = (re.escape(special), "|".join(CONTENTS[role] for role in ("system", "user", "tool")))
            if not TAG.fullmatch(special) or re.search(rf"{mark}\s*(?:{content})|(?:{content})\s*{mark}", text):
                found.add(special)
    return found


def _probes(tokenizer: Any) -> list[str]:
    """Render short chats: all roles together, and a tool's result alone, because special tokens in the call before it
    belong to the model. Chats that the template refuses are left out."""
    # imported here because it is heavy and the processes of reward functions read texts only
    from paceline.data.tokens import render_chat

    system, user, assistant, tool = ({"role": role, "content": text} for role, text in CONTENTS.items())
    call = {"id": "c47134713", "type": "function", "function": {"name": "f", "arguments": {}}}
    call_chat = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answered = [*call_chat, {**tool, "tool_call_id": call["id"], "name": "f"}]
    texts = []
    for before, chat in (([], [system, user, assistant, user]), ([], [user, assistant, user]), (call_chat, answered)):
        with contextlib.suppress(InvalidInput):
            begun = render_chat(tokenizer, before) if before else ""
            texts.append(render_chat(tokenizer, chat).removeprefix(begun))
    return texts


def _closes(text: str) -> bool:
    match = TAG.fullmatch(text)
    return match is not None and bool(match[1] or match[3])


def _call_text(call: Any) -> str:
    function = call["function"]
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CLOSE}'


def _content_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    raise TypeError(f"the content of a message must be text or a list of parts, not {type(content).__name__}")
