"""Requests in the shape of the OpenAI API, checked before anything is generated. Unsupported fields are refused by
name, because a client would not notice the missing effect; fields that change nothing about the completion (`user`,
`metadata` …) are ignored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.chat.messages import MAX_MESSAGES, Json, Message, Unsupported
from paceline.errors import InvalidInput
from paceline.spec.sections.data import RESERVED_TEMPLATE_KWARGS

MAX_STOPS = 16
MAX_CHOICES = 128
GREEDY = 1e-4
"""Temperature that replaces 0."""

IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "verbosity", "cache_salt", "priority",
}  # fmt: skip
"""Fields that do not affect the tokens."""

NEUTRAL: dict[str, Sequence[Any]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "include_stop_str_in_output": (False,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
}
"""Unsupported fields, each with the values that are accepted because they have no effect."""

MAX_IDS = 1 << 20
MAX_PROMPTS = 1024

AskKind = TypeVar("AskKind", bound=BaseModel)
Stops = tuple[str, ...]
# Stop at the first error: a list of millions would otherwise give an error for each of its values.
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_IDS, fail_fast=True)]
Prompts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
IdPrompts = Annotated[list[Ids], Field(max_length=MAX_PROMPTS, fail_fast=True)]


class _StreamOptions(BaseModel):
    include_usage: bool = False


class Ask(BaseModel):
    """Fields that all kinds of request have. If a field is None, the run's value is used."""

    model_config = ConfigDict(extra="allow")

    model: str
    """Model: `<run>` or `<run>@<version>`."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Completions of each prompt."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Number of likeliest tokens to sample among; -1 and 0 mean all tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Ids | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    """True if the answer includes the token ids of prompt and completion."""

    @model_validator(mode="after")
    def _check(self) -> Ask:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED or value in NEUTRAL.get(name, ()):
                continue
            why = "is not supported" if name in NEUTRAL else "is unknown"
            raise Unsupported(f"{name} {why}; remove it (it is {value!r:.60})", name)
        if len(self.stops) > MAX_STOPS or "" in self.stops:
            raise Unsupported(f"stop must be 1 to {MAX_STOPS} strings that are not empty", "stop")
        if self.stream_options is not None and not self.stream:
            raise Unsupported("stream_options is possible only with stream=true; remove it", "stream_options")
        return self

    @property
    def stops(self) -> Stops:
        """Return the stop strings of the request, empty without any; `engine_requests.py` takes the run's if `stop` is
        None."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionAsk(Ask):
    """Request of `POST /v1/completions`."""

    prompt: str | Ids | Prompts | IdPrompts
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    """True if the answer begins with the prompt; with `logprobs` it has the log-probabilities of the prompt too."""

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionAsk:
        if self.logprobs and not (self.logprobs == 1 and self.echo and self.temperature == 0):
            raise Unsupported(
                f"logprobs {self.logprobs} asks for other likely tokens, which the engine does not report; logprobs=0 "
                "gives the log-probabilities of the sampled tokens, and logprobs=1 with echo=true and "
                "temperature=0 also the likeliest token at each position",
                "logprobs",
            )
        if self.echo and (self.stream or (self.n or 1) > 1):
            raise Unsupported("echo is possible only without stream and with n=1; remove echo, or stream and n", "echo")
        if self.best_of not in (None, self.n or 1):
            raise Unsupported(f"best_of {self.best_of} must equal n {self.n or 1}; remove best_of", "best_of")
        if not self.prompt or (not isinstance(self.prompt, str) and [] in self.prompt):
            raise Unsupported("prompt is empty; give at least one token", "prompt")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def prompts(self) -> list[Any]:
        """Return the prompts, each as text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatAsk(Ask):
    """Request of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Json] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    """False if an answer may have at most one call."""
    reasoning_effort: str | None = None
    chat_template_kwargs: Json | None = None
    """Arguments of the chat template, besides the run's."""
    separate_reasoning: bool | None = None
    """False if reasoning stays in the content."""
    continue_final_message: bool | None = None
    """Field of other servers. It must be true if the last message is the assistant's, because such a message is always
    continued; otherwise it must be false."""
    add_generation_prompt: bool | None = None
    """Opposite of `continue_final_message`."""

    @model_validator(mode="after")
    def _check_chat(self) -> ChatAsk:
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise Unsupported(
                    f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} differ; "
                    "give only one of the two",
                    "max_completion_tokens",
                )
            self.max_tokens = self.max_completion_tokens
        if taken := sorted(set(self.chat_template_kwargs or {}) & {*RESERVED_TEMPLATE_KWARGS, "tools"}):
            raise Unsupported(
                f"chat_template_kwargs has {taken[0]!r}, which is not an argument of the template; remove it",
                "chat_template_kwargs",
            )
        for message in self.messages:
            message.rendered()
        continues = self.messages[-1].role == "assistant"
        for name, only in (("continue_final_message", continues), ("add_generation_prompt", not continues)):
            if getattr(self, name) is (not only):
                raise Unsupported(
                    f"{name} is {not only}, but must be {only} with a last message of the {self.messages[-1].role}; remove it",
                    name,
                )
        self.tools = read_tools(self.tools)
        self.tool_choice = read_choice(self.tool_choice, self.tools)
        return self

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    def rendered(self) -> list[Json]:
        return [message.rendered() for message in self.messages]


def read_ask(kind: type[AskKind], body: Any) -> AskKind:
    """Return the request in `body`, a parsed JSON document. Raises InvalidInput that names the field."""
    if not isinstance(body, dict):
        raise InvalidInput("the body must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        raise Unsupported(f"{field}: {first['msg']} (it is {first['input']!r:.60})", field) from None
    except RecursionError:
        raise InvalidInput("the body is nested too deeply") from None


def read_plain_ask(body: Any, run_id: str) -> ChatAsk | CompletionAsk:
    """Return the request in the body of `POST /generate`: a chat if it has messages, else raw prompts. The model may be
    missing, and max_tokens may have transformers' name. Raises InvalidInput that names the field."""
    body = {"model": run_id, **body} if isinstance(body, dict) else body
    if isinstance(body, dict) and "max_new_tokens" in body:
        body["max_tokens"] = body.pop("max_new_tokens")
    is_chat = isinstance(body, dict) and "messages" in body
    ask: ChatAsk | CompletionAsk = read_ask(ChatAsk, body) if is_chat else read_ask(CompletionAsk, body)
    for name, value in (("stream", ask.stream), ("logprobs", ask.logprobs), ("echo", getattr(ask, "echo", None))):
        if value:
            raise Unsupported(f"/generate has no {name}; use /v1/completions or /v1/chat/completions", name)
    return ask


MAX_TOOLS = 512
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class ToolChoice(NamedTuple):
    """The calls that `tool_choice` allows."""

    kind: str
    """`auto`, `none` (no tools in the prompt, no calls in the answer), `required` (at least one call) or `function` (a call of `name`)."""
    name: str = ""


AUTO, NONE, REQUIRED = ToolChoice("auto"), ToolChoice("none"), ToolChoice("required")


def read_tools(tools: Sequence[Json] | None) -> list[Json]:
    """Return the definitions in the API's form, `{"type": "function", "function": {...}}`, as templates take them.
    Raises Unsupported for another type of tool, a missing or repeated name, or parameters that are not an object."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise Unsupported(f"`tools` has {len(tools)} entries; at most {MAX_TOOLS} are possible", "tools")
    seen: set[str] = set()
    for tool in tools or ():
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise Unsupported(f"`tools` has an entry that is not a function: {tool!r:.80}", "tools")
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Unsupported(
                f"`tools` has a function with the invalid name {name!r:.80}; use 1 to 128 of the "
                "characters A-Z a-z 0-9 _ . : -",
                "tools",
            )
        if name in seen:
            raise Unsupported(f"`tools` has two functions with the name {name!r}; rename one", "tools")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise Unsupported(f"`tools` has a function {name!r} whose parameters are not a JSON schema", "tools")
        seen.add(name)
    return list(tools or ())


def read_choice(choice: Any, tools: Sequence[Json]) -> ToolChoice:
    """Return the calls that `tool_choice` allows. Raises Unsupported for an unknown choice, or a tool not in `tools`."""
    if choice is None:
        return AUTO if tools else NONE
    if choice in ("auto", "none"):
        return ToolChoice(choice) if tools else NONE
    if not tools:
        raise Unsupported(f"tool_choice is {choice!r:.80}, but the request has no tools", "tool_choice")
    if choice == "required":
        return REQUIRED
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if name not in (tool["function"]["name"] for tool in tools):
            raise Unsupported(f"tool_choice names the function {name!r:.80}, which is not in `tools`", "tool_choice")
        return ToolChoice("function", str(name))
    raise Unsupported(
        f"tool_choice is {choice!r:.80}; it can be 'auto', 'none', 'required' or a function", "tool_choice"
    )
