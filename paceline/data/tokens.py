"""Converts prompts and texts to token ids, in the same way for sampling, supervised training and requests. Texts are
tokenised once. Sampled tokens are never decoded and tokenised again."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from paceline.data.messages import for_template, plain
from paceline.errors import InvalidInput, PacelineError, Unreadable, error_text, is_about_input
from paceline.files.model_source import tokenizer_source
from paceline.groups import IntArray
from paceline.models.loading import fault_of_load
from paceline.spec import DataSection, PolicySection

Kwargs = Mapping[str, Any]
"""Arguments of the chat template (`data.chat_template_kwargs`)."""
Tools = Sequence[Mapping[str, Any]] | None
NO_KWARGS: Kwargs = MappingProxyType({})

ANCHORS = ("\n", "a", ".", "0")
"""Texts that are put before an encoded text, to find the text's tokens within a longer text."""


class _Ends(NamedTuple):
    ids: frozenset[int]
    """Ids of the tokens that end sampling, in addition to the tokenizer's end of sequence."""
    by_text: bool


_ends: WeakKeyDictionary[Any, _Ends] = WeakKeyDictionary()
"""The conditions for each tokenizer that was loaded for a policy."""


def load_tokenizer(policy: PolicySection) -> Any:
    """Return the policy's tokenizer. Raises InvalidInput for an unusable tokenizer, Unreadable for a missing one."""
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
    num_special = len(tokenizer.all_special_ids)
    if len(tokenizer) <= num_special:  # created by transformers for a folder without its files
        raise InvalidInput(
            f"policy.tokenizer_name (or model_name) {name!r} has no tokenizer files, so its vocabulary is empty; put "
            "tokenizer.json into the folder, or name another one in policy.tokenizer_name"
        )
    generation = policy.generation
    ids = frozenset((*_ends_of_model(policy.model_name), *generation.stop_token_ids))
    _ends[tokenizer] = _Ends(ids, bool(generation.stop_strings))
    return tokenizer


def _ends_of_model(name: str) -> set[int]:
    """Return the end-of-sequence tokens that the sampler reads from the model's config files."""
    from transformers.utils.hub import cached_file

    found: set[int] = set()
    for file in ("config.json", "generation_config.json"):
        try:
            path = cached_file(tokenizer_source(name), file, _raise_exceptions_for_missing_entries=False)
            ids = json.loads(Path(path).read_bytes())["eos_token_id"] if path else []
        except (OSError, ValueError, LookupError, TypeError, PacelineError):
            continue  # the sampler reports what is wrong with the model
        found.update(token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int))
    return found


def stop_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens at which sampling stops. Raises InvalidInput if there are none."""
    own = tokenizer.eos_token_id
    ids = _ends[tokenizer].ids if tokenizer in _ends else frozenset()
    ids |= frozenset(() if own is None else (own,))
    if not ids:
        raise InvalidInput(
            "the tokenizer has no end-of-sequence token, so no completion ends; set eos_token in tokenizer_config.json"
        )
    return ids


def ends_by_text(tokenizer: Any) -> bool:
    """Return whether stop strings of the policy end sampling too."""
    return tokenizer in _ends and _ends[tokenizer].by_text


def end_id(tokenizer: Any) -> int:
    """Return the token to end a text that has no end yet."""
    stops, own = stop_ids(tokenizer), tokenizer.eos_token_id
    return min(stops) if own is None else int(own)


def check_same_tokenizer(policy: PolicySection, teacher: PolicySection) -> None:
    """Raise InvalidInput unless the tokenizers of policy and teacher give every token the same number."""
    own, theirs = load_tokenizer(policy).get_vocab(), load_tokenizer(teacher).get_vocab()
    if own != theirs:
        differing = sorted(token for token in own.keys() | theirs.keys() if own.get(token) != theirs.get(token))
        raise InvalidInput(
            f"distillation.teacher_model_name {teacher.model_name!r} has another tokenizer than the student (first "
            f"differing token {differing[0]!r}); the probabilities of the teacher would be of other tokens. Take a "
            "teacher of the student's family"
        )


def check_vocabulary(tokenizer: Any, num_rows: int, what: str) -> None:
    """Raise InvalidInput if a token that texts may contain has no row in the embedding. Added tokens that nothing
    writes (images, padding) may lack a row, as in some models."""
    outside = {token: token_id for token, token_id in tokenizer.get_vocab().items() if token_id >= num_rows}
    written = f"{tokenizer.chat_template or ''}{tokenizer.bos_token or ''}{tokenizer.eos_token or ''}"
    added = tokenizer.get_added_vocab() if outside else {}
    for token, token_id in sorted(outside.items(), key=lambda item: item[1]):
        if token not in added or token in written:
            raise InvalidInput(
                f"{what}: the tokenizer gives {token!r} the id {token_id}, but the model's embedding has {num_rows} "
                "rows; use the model's tokenizer, or add rows by transformers' resize_token_embeddings and save it"
            )


def encode_prompt(
    tokenizer: Any, prompt: Any, template: str, template_kwargs: Kwargs = NO_KWARGS, tools: Tools = None
) -> IntArray:
    """Return [P] token ids of a prompt: messages by the chat template, text unchanged. A prompt that ends with the
    assistant is continued, as by transformers' `continue_final_message`. `template` is data.apply_chat_template,
    `template_kwargs` data.chat_template_kwargs, `tools` the definitions of tools for the template. Raises InvalidInput
    if a template is needed and missing, if there are no tokens, and for any error of tokenizer or template."""
    text = _prompt_text(tokenizer, prompt, template, template_kwargs, tools)
    return np.array(_prompt_ids(tokenizer, prompt, template, text), np.int32)


def _prompt_text(tokenizer: Any, prompt: Any, template: str, template_kwargs: Kwargs, tools: Tools) -> str:
    """Return a prompt as the text that the model reads: messages with the opening of the answer."""
    if isinstance(prompt, str):
        if template != "always":
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if template == "never" or not tokenizer.chat_template:
        raise InvalidInput(
            "the prompt is a list of messages, but the tokenizer has no chat template (or "
            "data.apply_chat_template is 'never'); use text prompts or another tokenizer"
        )
    if prompt and prompt[-1].get("role") == "assistant":
        return _continued(tokenizer, prompt, template_kwargs, tools)
    return render_chat(tokenizer, prompt, template_kwargs, tools, add_generation_prompt=True)


def _prompt_ids(tokenizer: Any, prompt: Any, template: str, text: str) -> list[int]:
    """Return the tokens of a prompt's text. Text outside a chat begins with the tokenizer's special tokens, once."""
    is_text = isinstance(prompt, str) and template != "always"
    with refusals("the tokenizer", f"the prompt {prompt!r:.60}"):
        ids = _begun(tokenizer, text) if is_text else ids_of(tokenizer, text)
    if not ids:
        raise InvalidInput(f"the tokenizer has no tokens for the prompt {prompt!r:.60}")
    return ids


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text at the beginning of a sequence, without added special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _begun(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, preceded by the special tokens that the tokenizer puts before every text. If the
    text itself begins with these special tokens, they are not repeated. Special tokens behind a text are left out."""
    ids = ids_of(tokenizer, text)
    probe = "a" if ids_of(tokenizer, "a") else text
    alone, whole = ids_of(tokenizer, probe), list(tokenizer(probe)["input_ids"])
    begin = next(i for i in range(len(whole) + 1) if whole[i : i + len(alone)] == alone)
    return ids if ids[:begin] == whole[:begin] else whole[:begin] + ids


def changed_text(tokenizer: Any, parts: Iterable[Any]) -> tuple[str, str] | None:
    """Return the first text that a tokenizer of the package `tokenizers` changes, and the decoded text. A space at the
    beginning may be added or lost. `parts` are texts, lists of messages, or None."""
    tokenizer.no_truncation()
    for part in parts:
        for text in [each.get("content") for each in part] if isinstance(part, list) else [part]:
            if isinstance(text, str):
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                kept = str(tokenizer.decode(ids, skip_special_tokens=False))
                if kept.removeprefix(" ") != text.removeprefix(" "):
                    return text, kept
    return None


def encode_continuation(tokenizer: Any, before: Sequence[int] | IntArray, text: str) -> IntArray:
    """Return [K] tokens of a text that continues the tokens `before`. Tokenizers may add white space at the beginning
    of a text (SentencePiece's dummy prefix, `add_prefix_space`), which is wrong within a sequence. So the text is
    encoded behind the last token if that token is a mark, else behind a text whose tokens the tokenizer keeps. Only the
    tokens after this beginning are returned."""
    anchors: Sequence[str] = ANCHORS
    last = None if len(before) == 0 else tokenizer.added_tokens_decoder.get(int(before[-1]))
    if last is not None:
        anchors = (str(last), *ANCHORS)
    with refusals("the tokenizer", f"the text {text!r:.60}"):
        for anchor in anchors:
            begin, whole = ids_of(tokenizer, anchor), ids_of(tokenizer, anchor + text)
            if begin and whole[: len(begin)] == begin:
                return np.array(whole[len(begin) :], np.int32)
        return np.array(ids_of(tokenizer, text), np.int32)


def _continued(tokenizer: Any, messages: Any, template_kwargs: Kwargs, tools: Tools) -> str:
    """Return the template's text of messages, the last to be continued. Raises InvalidInput if that message changes."""
    last, options = messages[-1], {"continue_final_message": True, **of_tools(tools)}
    content = last.get("content")
    if last.get("tool_calls") or not isinstance(content, str):
        raise InvalidInput(
            f"the prompt ends with an assistant's message that has no text to continue ({last!r:.80}); end it with a "
            "message of the user or a tool, or with the beginning of the answer as text"
        )
    rewritten = InvalidInput(
        f"the prompt ends with the message {content!r:.60} of the assistant, which the chat template changes, so that "
        "message cannot be continued; end the prompt with the message before it, or use another template"
    )
    kept = content.strip()
    if not kept:  # nothing shows where the message ends: the opening of an answer
        opened = render_chat(tokenizer, messages[:-1], template_kwargs, tools, add_generation_prompt=True)
        return opened + content
    try:
        text = _by_template(tokenizer, messages, template_kwargs, options)
    except InvalidInput as error:
        raise rewritten if "continue_final_message" in str(error) else error from None
    header, found, rest = text.rpartition(kept)
    opened = text
    with contextlib.suppress(InvalidInput):  # from a template that does not accept a shorter chat
        opened = render_chat(tokenizer, messages[:-1], template_kwargs, tools, add_generation_prompt=True)
    added = header.removeprefix(opened).split() if header.startswith(opened) else []
    # Some templates close `<think>` before it.
    is_doubled = bool(added) and kept.startswith(added[0])
    if found != kept or rest.strip() or is_doubled:
        raise rewritten
    return text


def render_chat(
    tokenizer: Any,
    messages: Any,
    template_kwargs: Kwargs = NO_KWARGS,
    tools: Tools = None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Return the chat template's text for messages. Raises InvalidInput as `encode_prompt` does."""
    options = {"add_generation_prompt": add_generation_prompt, **of_tools(tools)}
    return _by_template(tokenizer, messages, template_kwargs, options)


def _by_template(tokenizer: Any, messages: Any, template_kwargs: Kwargs, options: Kwargs) -> str:
    """Return the template's text for messages. Raises InvalidInput for the template's error or an unread argument."""
    source = str(tokenizer.chat_template)
    for name in template_kwargs:
        if re.search(rf"\b{re.escape(name)}\b", source) is None:
            raise InvalidInput(
                f"data.chat_template_kwargs has {name!r}, which the chat template of the tokenizer does not read; "
                "remove it, or correct its name"
            )
    if options.get("tools") and not reads_tools(source):
        raise InvalidInput(
            "the row or its environment has tools, which the chat template of the tokenizer does not read; take a model whose "
            "template does, set environment.tool_parser, or rename the column 'tools'"
        )
    messages = shown_to(tokenizer, messages, template_kwargs)
    with refusals("the chat template", f"the messages {messages!r:.60}"):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs, **options))


def shown_to(tokenizer: Any, messages: Any, template_kwargs: Kwargs) -> Any:
    """Return messages as the tokenizer's chat template takes them."""

    def write(chat: Any) -> str | None:
        try:
            return str(tokenizer.apply_chat_template(chat, tokenize=False, **template_kwargs))
        except BaseException as error:
            if not is_about_input(error):
                raise
            return None

    return for_template(messages, str(tokenizer.chat_template), write)


def of_tools(tools: Tools) -> dict[str, Any]:
    """Return the chat template's argument for tools; empty if there are no tools."""
    return {} if tools is None else {"tools": list(tools)}


def reads_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


@contextlib.contextmanager
def refusals(source: str, about: str) -> Iterator[None]:
    """Turn every error of a tokenizer or its template into InvalidInput with its type and text, because the error
    concerns the text. The excerpt comes last, so that equal faults begin alike."""
    try:
        yield
    except BaseException as error:
        if not is_about_input(error):
            raise
        line = getattr(error, "lineno", None)  # jinja's errors of syntax quote the template's file
        said = error_text(error) if line is None else f"{type(error).__name__} at its line {line}"
        raise InvalidInput(f"{source} raised {said}, for {about}") from error


def encode_text(tokenizer: Any, text: str) -> IntArray:
    """Return [T] token ids of a whole text, with the tokenizer's own special tokens and the end of sequence."""
    with refusals("the tokenizer", f"the text {text!r:.60}"):
        ids = _begun(tokenizer, text)
    return _ended(tokenizer, ids)


def encode_exchange(
    tokenizer: Any,
    prompt: Any,
    completion: Any,
    template: str,
    template_kwargs: Kwargs = NO_KWARGS,
    tools: Tools = None,
    *,
    ends: bool = True,
    stops: frozenset[int] | None = None,
) -> tuple[IntArray, IntArray]:
    """Return ([P], [T]) token ids of a prompt and its completion, which ends where sampling would (at the end of
    sequence, or one of `stops`) unless it was cut off (`ends` is false). A completion of messages is the text that the
    chat template adds to the prompt; it begins a new turn even after a turn of the assistant. Raises InvalidInput if
    the template changes the prompt once an answer follows, because the trained prompt would differ."""
    if isinstance(completion, str):
        text = _prompt_text(tokenizer, prompt, template, template_kwargs, tools)
        ids = _prompt_ids(tokenizer, prompt, template, text)
        is_text = isinstance(prompt, str) and template != "always"
        rest = _behind(tokenizer, ids, text, completion, begins=is_text)
        end = _ended(tokenizer, rest, stops=stops) if ends else np.array(rest, np.int32)
        return np.array(ids, np.int32), end
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if template == "never" or not tokenizer.chat_template:
        encode_prompt(tokenizer, messages, template)  # raises
    text = render_chat(tokenizer, messages, template_kwargs, tools, add_generation_prompt=True)
    whole = render_chat(tokenizer, [*messages, *completion], template_kwargs, tools)
    if not whole.startswith(text):
        raise InvalidInput(
            f"the chat template changes the prompt {messages!r:.60} once an answer follows, so prompt and "
            "completion cannot be separated; give completions as text, or use another template"
        )
    ids = _prompt_ids(tokenizer, messages, template, text)
    rest = _behind(tokenizer, ids, text, whole[len(text) :], begins=False)
    return np.array(ids, np.int32), _ended(tokenizer, rest, str(completion[-1].get("content") or ""), stops)


def _behind(tokenizer: Any, prompt_ids: list[int], prompt: str, text: str, *, begins: bool) -> list[int]:
    """Return the tokens of a text after a prompt: its tokens in the whole text, if the whole text begins with the
    prompt's tokens."""
    with refusals("the tokenizer", f"the completion {text!r:.60}"):
        whole = (_begun if begins else ids_of)(tokenizer, prompt + text)
    if whole[: len(prompt_ids)] == prompt_ids:
        return whole[len(prompt_ids) :]
    return [int(token) for token in encode_continuation(tokenizer, prompt_ids, text)]


def end_of(tokenizer: Any, ids: Sequence[int], message: str = "", stops: frozenset[int] | None = None) -> int | None:
    """Return the number of tokens up to and including the last one at which sampling stops; None without such a token,
    or if text follows it. White space may follow the token. If `message` (the message's text) is not empty, text that
    does not contain it may follow too."""
    stops = stop_ids(tokenizer) if stops is None else stops
    last = max((index for index, token in enumerate(ids) if token in stops), default=None)
    if last is None:
        return None
    rest = tokenizer.decode(ids[last + 1 :], skip_special_tokens=False)
    is_over = not rest.strip() or (message.strip() and message.strip() not in rest)
    return last + 1 if is_over else None


def _ended(tokenizer: Any, ids: list[int], message: str = "", stops: frozenset[int] | None = None) -> IntArray:
    """Return tokens up to the `end_of` the completion; if there is none, add the end of sequence."""
    end = end_of(tokenizer, ids, message, stops)
    return np.array([*ids, end_id(tokenizer)] if end is None else ids[:end], np.int32)


def padding_token_id(tokenizer: Any) -> int:
    """Return the padding token; without one, the end of sequence, as in transformers' sequence classification."""
    pad = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if pad is None else pad)


def encode_for_scoring(
    tokenizer: Any,
    prompt: Any,
    completion: Any,
    template: str,
    template_kwargs: Kwargs = NO_KWARGS,
    tools: Tools = None,
) -> IntArray:
    """Return [T] token ids of a whole text that a reward model scores at its last token. It ends with the tokenizer's
    end of sequence, whatever a run with that model stops at, so that trainer and scorer read the same text. Trailing
    padding tokens are removed, as transformers does to find the last token: if the end of sequence is also the
    padding, the score is read at the token before it."""
    stops = frozenset({end_id(tokenizer)})
    ids = np.concatenate(encode_exchange(tokenizer, prompt, completion, template, template_kwargs, tools, stops=stops))
    kept = (ids != padding_token_id(tokenizer)).nonzero()[0]
    if len(kept) == 0:
        raise InvalidInput(f"the text {prompt!r:.60} consists of padding alone; there is nothing to score")
    return ids[: int(kept[-1]) + 1]


def with_system_prompt(prompt: Any, data: DataSection) -> Any:
    """Return the prompt with joined text parts and data.system_prompt, if set, in front. A chat that begins with the
    same message, such as an exported sample of a run, stays unchanged."""
    prompt = plain(prompt)
    if data.system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    first = messages[0] if messages else {}
    if first.get("role") == "system" and first.get("content") == data.system_prompt:
        return messages
    return [{"role": "system", "content": data.system_prompt}, *messages]
