"""Which rendering a run has: by `environment.renderer`, `environment.tool_parser` and the prompts of its data set."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from paceline.chat.call_formats import CallFormat
from paceline.environment.rendering.family import FamilyRendering, family_of
from paceline.environment.rendering.protocol import Conversation, Rendering
from paceline.environment.rendering.template import TemplateRendering
from paceline.environment.rendering.texts import TextRendering
from paceline.errors import InvalidInput
from paceline.spec import RunSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Renderings:
    """The renderings of a run."""

    chat: Rendering
    """Of messages."""
    text: TextRendering
    """Of text prompts without a template."""
    wraps_texts: bool
    """Text prompts are messages of the user (`data.apply_chat_template` is `always`)."""

    def begin(self, prompt: Any) -> tuple[Rendering, Conversation]:
        """Return the rendering of a data set's prompt, and the conversation that it begins."""
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
            return (self.chat if self.wraps_texts else self.text), Conversation(messages)
        return self.chat, Conversation(list(prompt))


def choose_renderings(spec: RunSpec, tokenizer: Any) -> Renderings:
    """Return the renderings of a run. Raises InvalidInput for a renderer that cannot be used."""
    environment, kwargs = spec.environment, spec.data.chat_template_kwargs
    parser = environment.tool_parser
    calls: CallFormat | None = None if parser == "auto" else parser
    name = environment.renderer
    chat: Rendering
    if name == "auto":
        chat = _automatic(spec, tokenizer, calls)
    elif name != "template":
        if calls is not None:
            raise InvalidInput(
                f"environment.renderer {name!r} reads tool calls by itself, but environment.tool_parser is {parser!r}; set one "
                "of them to auto"
            )
        chat = FamilyRendering(tokenizer, name, kwargs)
    else:
        chat = TemplateRendering(tokenizer, kwargs, calls)
    return Renderings(
        chat, TextRendering(tokenizer, calls or "none"), spec.data.apply_chat_template == "always"
    )


def _automatic(spec: RunSpec, tokenizer: Any, calls: CallFormat | None) -> Rendering:
    kwargs = spec.data.chat_template_kwargs
    name = family_of(spec.policy.tokenizer_name or spec.policy.model_name) if calls is None else ""
    if name:
        try:
            rendering = FamilyRendering(tokenizer, name, kwargs)
        except InvalidInput as error:
            log.warning("conversations are rendered by the chat template: %s", error)
        else:
            log.info("conversations are rendered by the family %r of renderers", name)
            return rendering
    return TemplateRendering(tokenizer, kwargs, calls)
