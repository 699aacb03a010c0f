"""Recognises the formats of data sets by the columns of a row: those of TRL, of NeMo RL, and traces. The style of a
format is *standard* if prompts and completions are texts, *conversational* if they are chat messages. Promise: formats
are named by the same rules by which rows are read, so a description of a data set matches what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from paceline.data.row_prompts import conversation_key, has_text, is_made, with_keys_of_row
from paceline.data.traces import format_of, is_trace
from paceline.spec import DataSection

Kind = Literal[
    "language modeling", "prompt-only", "prompt-completion", "preference", "ranked completions",
    "unpaired preference", "stepwise supervision", "traces",
]  # fmt: skip
FORMS = {
    "demonstration": ("language modeling", "prompt-completion"),
    "preference": ("preference", "ranked completions"),
    "labeled_completion": ("unpaired preference", "preference"),
    "traces": ("traces",),
}
"""For each form of an algorithm's examples, the kinds of rows that can be read."""
READERS = {
    "language modeling": "sft reads this format",
    "prompt-only": "algorithms that sample, such as grpo, read this format",
    "prompt-completion": "sft reads this format",
    "preference": "dpo, orpo, rm and kto read this format",
    "ranked completions": "dpo, orpo and rm read this format",
    "unpaired preference": "kto reads this format",
    "stepwise supervision": "no algorithm reads this format: write a row with one label for each completion (kto)",
    "traces": "offline_grpo reads traces",
}
"""For each kind of rows, a clause with the algorithms that read it, or with the remedy if no algorithm reads it."""

PLAIN = {
    "language modeling": "texts or chats",
    "prompt-only": "prompts",
    "prompt-completion": "prompts with completions",
    "preference": "better and worse completions",
    "ranked completions": "ranked completions",
    "unpaired preference": "completions with labels",
    "stepwise supervision": "completions with a label for each step",
    "traces": "recorded completions",
}
"""Names of the rows of each kind, without the name of a library's format."""


class Format(NamedTuple):
    kind: Kind
    name: str
    """Name for people, with the library that defines it."""
    conversational: bool | None = None
    """True for the conversational style, false for the standard one; None if the format has only one style."""
    tools: bool = False
    """True if rows have definitions of tools for the chat template."""
    note: str = ""
    """Description of the conversion of the rows; empty if the rows are read unchanged."""

    def __str__(self) -> str:
        styles = {None: "", False: ", standard", True: ", conversational"}
        tools = ", with tools" if self.tools else ""
        return f"{self.name}{styles[self.conversational]}{tools}" + (f" ({self.note})" if self.note else "")


def format_of_row(row: Mapping[str, Any], data: DataSection) -> Format | None:
    """Return the format of a row with the columns that `data` names; None for an unknown format."""
    has_tools = bool(row.get("tools"))

    def of(kind: Kind, name: str, key: str, note: str = "") -> Format:
        conversational = not isinstance(row.get(key), str)
        return Format(kind, name, conversational, has_tools and conversational, note)

    prompt, completion = data.prompt_key, data.completion_key
    if is_trace(row, prompt, completion):
        return Format("traces", f"traces ({format_of(row)})")
    if "completions" in row and data.chosen_key not in row:
        if prompt in row and "labels" in row:
            return Format("stepwise supervision", "TRL's stepwise supervision")
        return Format("ranked completions", "NeMo RL's ranked completions")
    if data.chosen_key in row and data.rejected_key in row:
        if data.preference_key in row:
            name = f"pairs, with the better completion in {data.preference_key!r}"
            return of("preference", name, data.chosen_key)
        if prompt in row:
            return of("preference", "TRL's preference, explicit prompt", data.chosen_key)
        note = "the common beginning of both completions is the prompt"
        return of("preference", "TRL's preference, implicit prompt", data.chosen_key, note)
    if prompt in row and completion in row:
        if data.label_key in row:
            return of("unpaired preference", "TRL's unpaired preference", completion)
        return of("prompt-completion", "TRL's prompt-completion", completion)
    if (messages := conversation_key(row, data)) is not None:
        name = "TRL's language modeling" if messages == "messages" else "conversations"
        return of("language modeling", name, messages)
    if has_text(row, data):
        return Format("language modeling", "TRL's language modeling", False, note="every token trains")
    if prompt in row:
        return of("prompt-only", "TRL's prompt-only", prompt)
    return None


def explain_form(row: Mapping[str, Any], data: DataSection, form: str, algorithm: str) -> str:
    """Return a sentence about a row whose format the algorithm does not read; empty for other rows and unknown formats."""
    found = format_of_row(row, data)
    if found is None or found.kind in FORMS.get(form, ()):
        return ""
    return (
        f"the columns {', '.join(map(repr, sorted(row)))} are {found.name.split(' (')[0]}, which {algorithm} does not read; "
        f"{READERS[found.kind]}"
    )


def describe(row: Mapping[str, Any], data: DataSection, form: str | None) -> str:
    """Describe a data set's format by its first row. `form` is the algorithm's; None for an algorithm that samples."""
    if form is None and is_made(data):
        named = "data.prompt_template" if data.prompt_template is not None else "data.choices"
        return f"prompts by {named}, from rows with the columns {', '.join(sorted(row))}"
    if not data.prompt_key:
        return f"rows without prompts, which the environment gives; columns: {', '.join(sorted(row)) or 'none'}"
    keys = with_keys_of_row(row, data)
    found = format_of_row(row, keys)
    if found is None:
        return f"columns of no known format: {', '.join(sorted(row))}"
    text = str(found)
    if keys is not data:
        text = text.replace("TRL's prompt-completion", "NeMo RL's prompt-response (input, output)")
    if form == "labeled_completion" and found.kind == "preference":
        text += "; each pair becomes two examples: the chosen completion as good, and the rejected completion as bad"
    text = f"{PLAIN[found.kind]}, in the format {text}"
    if form is None and found.kind != "prompt-only":
        text += f"; completions are sampled for {keys.prompt_key!r}, and reward functions get the other columns"
    return text
