"""From a data set's prompt to token ids, the same way wherever it is needed: sampling, supervised training, asking.

Texts are tokenised once. Sampled tokens are never decoded and tokenised again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from paceline.data.messages import plain
from paceline.data.template_messages import for_template
from paceline.error_texts import error_text, is_about_input
from paceline.errors import InvalidInput, Unreadable
from paceline.files.model_source import tokenizer_source
from paceline.groups import IntArray
from paceline.models.loading import fault_of_load
from paceline.spec import DataSection, PolicySection

GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")
"""Mark of a chat template at the beginning of the assistant's tokens."""

NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


def load_tokenizer(policy: PolicySection) -> Any:
    """Return the policy's tokenizer. Raises InvalidInput when there is none that works, Unreadable when it is not
    there now."""
    from transformers import AutoTokenizer

    name = policy.tokenizer_name or policy.model_name
    if name.startswith(("/", "./", "../")) and not Path(name).is_dir():
        raise Unreadable(f"policy.tokenizer_name (or model_name): no folder {name!r}; check the path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_source(name))
    except BaseException as error:
        fault = fault_of_load("the tokenizer of policy.tokenizer_name (or model_name)", name, error)
        if fault is None:
            raise
        raise fault from None
    if len(tokenizer) <= len(
        tokenizer.all_special_ids
    ):  # what transformers makes of a folder without its files
        raise InvalidInput(
            f"policy.tokenizer_name (or model_name) {name!r} has no tokenizer files, so its vocabulary is empty; put "
            "tokenizer.json into the folder, or name another one in policy.tokenizer_name"
        )
    return tokenizer


def check_same_tokenizer(policy: PolicySection, teacher: PolicySection) -> None:
    """Raises InvalidInput unless both give every token the same number."""
    own, theirs = load_tokenizer(policy).get_vocab(), load_tokenizer(teacher).get_vocab()
    if own != theirs:
        differing = sorted(
            token for token in own.keys() | theirs.keys() if own.get(token) != theirs.get(token)
        )
        raise InvalidInput(
            f"distillation.teacher_model_name {teacher.model_name!r} has another tokenizer than the student (first "
            f"differing token {differing[0]!r}); its probabilities would be of other tokens. Take a teacher of the same "
            "family"
        )


def check_vocabulary(tokenizer: Any, num_rows: int, what: str) -> None:
    """Raise InvalidInput where a token that texts come to has no row in the embedding. A token that was added, as for images or as
    padding, has none in some models, and is no fault where nothing writes it."""
    outside = {token: token_id for token, token_id in tokenizer.get_vocab().items() if token_id >= num_rows}
    written = f"{tokenizer.chat_template or ''}{tokenizer.bos_token or ''}{tokenizer.eos_token or ''}"
    added = tokenizer.get_added_vocab() if outside else {}
    for token, token_id in sorted(outside.items(), key=lambda item: item[1]):
        if token not in added or token in written:
            raise InvalidInput(
                f"{what}: its tokenizer gives {token!r} the id {token_id}, and its embedding has {num_rows} rows; name the "
                "model's own tokenizer, or add rows with transformers' resize_token_embeddings and save the model again"
            )


def encode_prompt(
    tokenizer: Any,
    prompt: Any,
    template: str,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> IntArray:
    """Return [P] token ids of a prompt: messages by the chat template, text as it is.

    `template` is data.apply_chat_template, `template_kwargs` data.chat_template_kwargs, `tools` the definitions of tools
    that the template gets. Raises InvalidInput: no template where one is needed, no tokens, or whatever
    tokenizer or template raise.
    """
    if isinstance(prompt, str) and template == "always":
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        with _refusals("the tokenizer", f"the prompt {prompt!r:.60}"):
            ids = tokenizer(prompt)["input_ids"]
        if ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]  # some tokenizers end every text; a prompt goes on
    else:
        if template == "never" or not tokenizer.chat_template:
            raise InvalidInput(
                "the prompt is a list of messages, but the tokenizer has no chat template (or "
                "data.apply_chat_template is 'never'); use text prompts or another tokenizer"
            )
        ids = _by_template(tokenizer, prompt, template_kwargs, add_generation_prompt=True, **_of_tools(tools))
    if not ids:
        raise InvalidInput(f"the tokenizer has no tokens for the prompt {prompt!r:.60}")
    return np.array(ids, np.int32)


def render_chat(
    tokenizer: Any,
    messages: Any,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Return messages as the text that the chat template makes of them. Raises InvalidInput as `encode_prompt` does."""
    return str(
        _by_template(
            tokenizer,
            messages,
            template_kwargs,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **_of_tools(tools),
        )
    )


def _by_template(
    tokenizer: Any,
    messages: Any,
    template_kwargs: Mapping[str, Any],
    *,
    tokenize: bool = True,
    return_dict: bool = False,
    **options: Any,
) -> Any:
    """Return the chat template's output for messages: token ids, a text, or a dict with more. Raises InvalidInput with the
    template's error, because templates refuse conversations that their model does not know (two turns of the user in
    a row), and for an argument that the template does not read."""
    source = str(tokenizer.chat_template)
    for name in template_kwargs:
        if re.search(rf"\b{re.escape(name)}\b", source) is None:
            raise InvalidInput(
                f"data.chat_template_kwargs has {name!r}, which the chat template of the tokenizer does not read; "
                "remove it, or correct its name"
            )
    if options.get("tools") and not reads_tools(source):
        raise InvalidInput(
            "the row has tools, which the chat template of the tokenizer does not read; take a model whose template does, or "
            "rename the column 'tools'"
        )

    def write(chat: Any) -> str | None:
        try:
            return str(tokenizer.apply_chat_template(chat, tokenize=False, **template_kwargs))
        except BaseException as error:
            if not is_about_input(error):
                raise
            return None

    messages = for_template(messages, source, write)
    with _refusals("the chat template", f"the messages {messages!r:.60}"):
        return tokenizer.apply_chat_template(
            messages, tokenize=tokenize, return_dict=return_dict, **template_kwargs, **options
        )


def _of_tools(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return the argument of the chat template for tools; none where there are none."""
    return {} if tools is None else {"tools": list(tools)}


def reads_tools(template: str) -> bool:
    """Return whether a chat template has tools at all."""
    return re.search(r"\btools\b", template) is not None


@contextlib.contextmanager
def _refusals(source: str, about: str) -> Iterator[None]:
    """Turn whatever a tokenizer or its template raises into InvalidInput, with the exception's type and text: it is about
    the text. The excerpt comes last, so that equal faults begin alike."""
    try:
        yield
    except BaseException as error:
        if not is_about_input(error):
            raise
        raise InvalidInput(f"{source} raised {error_text(error)}, for {about}") from error


def encode_completion(tokenizer: Any, completion: str) -> IntArray:
    """Return [T] token ids of a target text, the end of sequence included."""
    with _refusals("the tokenizer", f"the completion {completion!r:.60}"):
        ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
    return np.array([*ids, tokenizer.eos_token_id], np.int32)


def encode_text(tokenizer: Any, text: str) -> IntArray:
    """Return [T] token ids of a whole text, the tokenizer's own special tokens and the end of sequence included."""
    with _refusals("the tokenizer", f"the text {text!r:.60}"):
        ids = tokenizer(text)["input_ids"]
    return _ended(tokenizer, ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id])


def encode_exchange(
    tokenizer: Any,
    prompt: Any,
    completion: Any,
    template: str,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[IntArray, IntArray]:
    """Return ([P], [T]) token ids of a prompt and what follows it, which ends where sampling would: at the end of
    sequence.

    A completion of messages is what the chat template adds to the prompt. Raises InvalidInput where the template writes
    the prompt otherwise once an answer follows, since the trained prompt would then not be the sampled one.
    """
    prompt_ids = encode_prompt(tokenizer, prompt, template, template_kwargs, tools)
    if isinstance(completion, str):
        return prompt_ids, encode_completion(tokenizer, completion)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    prompt_ids = encode_prompt(tokenizer, messages, template, template_kwargs, tools)
    whole = _by_template(tokenizer, [*messages, *completion], template_kwargs, **_of_tools(tools))
    if list(whole[: len(prompt_ids)]) != prompt_ids.tolist():
        raise InvalidInput(
            f"the chat template writes the prompt {messages!r:.60} in another way once an answer follows, so prompt and "
            "completion cannot be told apart; give completions as text, or use another template"
        )
    return prompt_ids, _ended(tokenizer, list(whole[len(prompt_ids) :]))


def encode_conversation(
    tokenizer: Any,
    messages: list[Any],
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[IntArray, np.ndarray]:
    """Return ([T] token ids, [T] bool: written by the assistant) of a whole conversation, ended after the last answer.

    The assistant's tokens are those that the template marks (`{% generation %}`). In a template without marks they are
    found by prefixes: the tokens that each assistant message adds to the conversation before it, opened for an answer,
    up to and with the end of sequence. Raises InvalidInput for a template for which that is not exact, because it writes
    earlier messages differently once later ones follow.
    """
    if not tokenizer.chat_template:
        raise InvalidInput(
            "the tokenizer has no chat template, which conversations need; use another tokenizer"
        )
    if GENERATION_MARK.search(str(tokenizer.chat_template)):
        if not tokenizer.is_fast:
            raise InvalidInput(
                f"the chat template marks the assistant's tokens, which {type(tokenizer).__name__} cannot tell: it has no "
                "fast form that keeps the places of characters; use a tokenizer with a tokenizer.json"
            )
        marked = _by_template(
            tokenizer,
            messages,
            template_kwargs,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **_of_tools(tools),
        )
        ids, mask = list(marked["input_ids"]), np.array(marked["assistant_masks"], bool)
    else:
        ids = list(_by_template(tokenizer, messages, template_kwargs, **_of_tools(tools)))
        mask = np.zeros(len(ids), bool)
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = _span_by_prefixes(tokenizer, messages, place, ids, template_kwargs, tools)
                mask[start:end] = True
    if not mask.any():
        raise InvalidInput(
            f"no token of the conversation {messages!r:.60} is the assistant's: it has no message of the assistant, or the "
            "chat template's {% generation %} marks enclose none of them"
        )
    length = int(mask.nonzero()[0][-1]) + 1
    return np.array(ids[:length], np.int32), mask[:length]


def _span_by_prefixes(
    tokenizer: Any,
    messages: list[Any],
    place: int,
    ids: list[int],
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
) -> tuple[int, int]:
    """Return the begin and the end of message `place`, the assistant's, in `ids`, the whole conversation."""
    options = _of_tools(tools)
    opened = _by_template(tokenizer, messages[:place], template_kwargs, add_generation_prompt=True, **options)
    closed = _by_template(tokenizer, messages[: place + 1], template_kwargs, **options)
    start, end = len(opened), len(closed)
    if list(opened) != ids[:start] or list(closed) != ids[:end] or start >= end:
        raise InvalidInput(
            f"the chat template writes the messages before {messages[place]!r:.60} in another way once later ones follow, "
            "so the assistant's tokens cannot be told exactly; use a template with {% generation %} marks, or "
            "sft.loss_mask=completion"
        )
    own = _ended(tokenizer, ids[start:end])
    return start, start + min(len(own), end - start)


def _ended(tokenizer: Any, ids: list[int]) -> IntArray:
    """Up to and with the last end of sequence; one is added where there is none."""
    eos = tokenizer.eos_token_id
    if eos in ids:
        last = len(ids) - 1 - ids[::-1].index(eos)
        return np.array(ids[: last + 1], np.int32)
    return np.array([*ids, eos], np.int32)


def padding_token_id(tokenizer: Any) -> int:
    """Return the padding token, else the end of sequence, as transformers' sequence classification does."""
    pad = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if pad is None else pad)


def encode_for_scoring(
    tokenizer: Any,
    prompt: Any,
    completion: Any,
    template: str,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> IntArray:
    """Return [T] token ids of a whole text that a reward model scores at its last token.

    Trailing padding tokens are cut off, as transformers does when it looks for the last token: where the end of
    sequence is also the padding, the score is read at the token before it.
    """
    ids = np.concatenate(encode_exchange(tokenizer, prompt, completion, template, template_kwargs, tools))
    kept = (ids != padding_token_id(tokenizer)).nonzero()[0]
    if len(kept) == 0:
        raise InvalidInput(f"the text {prompt!r:.60} consists of padding; there is nothing to score")
    return ids[: int(kept[-1]) + 1]


def with_system_prompt(prompt: Any, data: DataSection) -> Any:
    """Return the prompt, its text parts joined, with data.system_prompt put before it, if there is one. A chat that begins
    with that very message, as of a run's exported samples, stays as it is."""
    prompt = plain(prompt)
    if data.system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    first = messages[0] if messages else {}
    if first.get("role") == "system" and first.get("content") == data.system_prompt:
        return messages
    return [{"role": "system", "content": data.system_prompt}, *messages]
