"""Checks of a submitted spec against its data and files, for faults that every group or episode of the run would have.
A check passes if it needs a file that is not on this machine. User code is parsed and never run."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from paceline.data.messages import tools_of_prompt
from paceline.data.prompts import PromptSource
from paceline.data.tokens import changed_text, reads_tools
from paceline.errors import DataError, InvalidInput, PacelineError, SpecError, Unreadable
from paceline.files.storage import Folder, check_readable, is_url
from paceline.host.regular_file import read_named
from paceline.models.architectures import check_architecture, check_local_models
from paceline.services.coordinator.lifecycle.run_data import RunData, open_data
from paceline.spec import PolicySection, RewardFunctionSection, RunSpec
from paceline.spec.reading import MODEL_FIELDS
from paceline.user_code.definitions import (
    Definition,
    Function,
    check_code,
    defined,
    definition_of,
    parsed,
    required,
)
from paceline.weights.hosts.transport import check_store
from paceline.wire import MAX_MESSAGE_BYTES

SUPPLIED = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra", "args", "kwargs"}
)
"""Arguments of reward functions that are never columns."""
CHECKED_ROWS = 32
"""Number of rows whose tests and other inputs of built-in functions are read at submission."""
ARRAY_BYTES = 8
"""Bytes of a token in a payload frame: its id and its log-probability."""


def checked_data(spec: RunSpec) -> tuple[RunData, list[str]]:
    """Check the model and open the data sets; return them with warnings. Raises DataError, Unreadable, InvalidInput."""
    from paceline.reward.builtin import check_rewards

    check_rewards(spec.rewards)
    check_code(spec)
    warnings = _check_models(spec)
    _check_template_kwargs(spec)
    data = open_data(spec)
    for field, source in (("data.train", data.prompts), ("data.validation", data.validation)):
        if source is not None:
            _check_reward_columns(spec, field, source)
            check_environment(spec, field, source)
            _check_reward_settings(spec, source)
            _check_template(spec, source)
            warnings += _shadowed(field, source)
            warnings += _gold_warnings(spec, field, source)
    return data, warnings + _changed_texts(spec.policy, data.first)


def _changed_texts(policy: PolicySection, first: Sequence[Any]) -> list[str]:
    """Return a warning if the tokenizer, when it is on this machine, does not preserve the texts of the first rows."""
    from tokenizers import Tokenizer

    path = Path(policy.tokenizer_name or policy.model_name).expanduser() / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
    except Exception:  # the library raises no narrower error; the workers report it
        return []
    if tokenizer is None or (found := changed_text(tokenizer, first)) is None:
        return []
    return [
        f"the tokenizer of policy.model_name {policy.model_name!r} does not preserve every text of the data: {found[0]!r:.80} "
        f"becomes {found[1]!r:.80}; the model reads and writes such texts only in this form"
    ]


def refuse_large_groups(spec: RunSpec) -> None:
    """Raise SpecError if the run's groups are too large for a message."""
    if not spec.samples:
        return
    sizes = {
        "grpo.num_generations_per_prompt": spec.grpo.num_generations_per_prompt,
        "grpo.val_samples_per_prompt": spec.grpo.val_samples_per_prompt,
    }
    name = max(sizes, key=lambda name: sizes[name])
    completions, tokens = sizes[name], spec.policy.generation.max_new_tokens
    size_bytes = completions * tokens * ARRAY_BYTES + spec.policy.max_total_sequence_length * ARRAY_BYTES
    if size_bytes > MAX_MESSAGE_BYTES:
        raise SpecError(
            f"{name} {completions} x policy.generation.max_new_tokens {tokens} make groups of up to "
            f"{size_bytes >> 20} MiB, but a message carries {MAX_MESSAGE_BYTES >> 20} MiB; lower one of the two"
        )


def check_network(spec: RunSpec, store: str) -> None:
    """Raise InvalidInput unless the run's object stores and the coordinator's root `store` are reached over TLS."""
    allowed = spec.weights.allow_plaintext_network
    for url in (spec.weights.store, spec.checkpointing.checkpoint_dir, store):
        check_store(url or "", os.environ, allowed=allowed)


def _shadowed(field: str, source: PromptSource) -> list[str]:
    """Return a warning for columns with the name of an argument that reward functions always get."""
    named = sorted(SUPPLIED.intersection(source.columns) & {"prompts", "completions", "completion_ids"})
    if not named:
        return []
    return [
        f"reward functions cannot read {' and '.join(f'the column {name!r}' for name in named)} of {field}, because the argument "
        "of that name has the prompts or the completions of the group; rename the column"
    ]


def _check_reward_columns(spec: RunSpec, field: str, source: PromptSource) -> None:
    """Raise DataError for a reward function that needs a column which the data set lacks."""
    for index, reward in enumerate(spec.rewards):
        try:
            needed = _columns_of(reward)
        except InvalidInput as error:
            raise DataError(f"rewards.{index}.kwargs: {error}") from None
        missing = [name for name in needed if name not in source.columns]
        if missing:
            is_builtin = ":" not in reward.function
            remedy = "correct the name in the reward's kwargs" if is_builtin else "give the argument a default"
            raise DataError(
                f"rewards.{index}: {reward.label!r} needs the column {missing[0]!r}, but the columns of {field} besides the prompt "
                f"are: {', '.join(source.columns) or 'none'}; {remedy}, or add the column"
            )


def _check_reward_settings(spec: RunSpec, source: PromptSource) -> None:
    """Raise DataError for settings of a built-in function that do not fit the first rows or the size of groups."""
    from paceline.reward.builtin import SETTINGS

    for index, reward in enumerate(spec.rewards):
        if reward.function in SETTINGS:
            settings = SETTINGS[reward.function](reward.kwargs)
            for draw in range(min(max(1, len(source)), CHECKED_ROWS)):
                try:
                    settings.check_submitted(
                        source.draw(draw)[1], spec.grpo.num_generations_per_prompt, reward.timeout_s
                    )
                except InvalidInput as error:
                    of_row = f", row {source.index(draw)} of the data" if draw else ""
                    raise DataError(f"rewards.{index}{of_row}: {error}") from None


def _gold_warnings(spec: RunSpec, field: str, source: PromptSource) -> list[str]:
    """Return warnings about gold answers in the run's first rows (of a stream: in its first block) that get no
    score."""
    from paceline.reward.builtin.mathematics import MAX_CHECKED, gold_warnings

    number = min(len(source) or spec.data.streaming_block_rows, MAX_CHECKED)
    return gold_warnings(spec.rewards, field, (source.draw(cursor)[1] for cursor in range(number)))


def _columns_of(reward: RewardFunctionSection) -> list[str]:
    path, colon, name = reward.function.rpartition(":")
    if colon:
        return [argument for argument in _required(Path(path), name) if argument not in reward.kwargs]
    from paceline.reward.builtin import BUILTIN_FUNCTIONS, SETTINGS

    if reward.function in SETTINGS:
        return sorted(SETTINGS[reward.function](reward.kwargs).columns)
    function = BUILTIN_FUNCTIONS.get(reward.function)
    if function is None:
        return []
    column = inspect.signature(function).parameters.get("answer_column")
    if column is None:
        return []
    return [str(reward.kwargs.get("answer_column", column.default))]


def _required(path: Path, name: str) -> list[str]:
    """Return the arguments of a file's function that have no default, except those that every function gets."""
    module = parsed(path)
    found = None if module is None else definition_of(module.body, name)
    if found is None or isinstance(found, ast.ClassDef):
        return []
    return [argument for argument in required(found) if argument not in SUPPLIED]


def _check_template(spec: RunSpec, source: PromptSource) -> None:
    """Raise DataError if the prompts need a chat template (messages, or `data.apply_chat_template: always`), but the
    template is missing, is switched off by `never`, or cannot render their tools."""
    prompt = source.draw(0)[0]
    setting = spec.data.apply_chat_template
    if isinstance(prompt, str) and setting != "always":
        return
    if not isinstance(prompt, str) and setting == "never":
        raise DataError(
            "data.apply_chat_template is 'never', but the prompts are chat messages; set it to auto, or use text prompts "
            "without data.system_prompt"
        )
    template = _template_source(spec.policy)
    if source.has_tools and tools_of_prompt(*source.draw(0)) and template and not reads_tools(template):
        raise DataError(
            "the prompts have tools, which the chat template of the tokenizer does not read; choose a model whose template does, "
            "or rename the column 'tools'"
        )
    if _lacks_template(spec.policy):
        name = spec.policy.tokenizer_name or spec.policy.model_name
        raise DataError(
            f"the prompts are chat messages, but the tokenizer of policy.model_name {name!r} has no chat template; use text "
            "prompts without data.system_prompt, or a tokenizer with a template (policy.tokenizer_name)"
        )


def _check_template_kwargs(spec: RunSpec) -> None:
    """Raise DataError for an argument that the chat template does not read, if the template is on this machine."""
    source = _template_source(spec.policy) if spec.data.chat_template_kwargs else ""
    for name in spec.data.chat_template_kwargs if source else ():
        if re.search(rf"\b{re.escape(name)}\b", source) is None:
            raise DataError(
                f"data.chat_template_kwargs has {name!r}, which the chat template of the tokenizer does not read; remove it, "
                "or correct its name"
            )


def _template_source(policy: PolicySection) -> str:
    """Return the tokenizer's one chat template; empty if it is not on this machine, or if there are several."""
    folder = Path(policy.tokenizer_name or policy.model_name).expanduser()
    try:
        if (folder / "chat_template.jinja").is_file():
            return read_named(folder / "chat_template.jinja").decode()
        template: Any = json.loads(read_named(folder / "tokenizer_config.json"))["chat_template"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return template if isinstance(template, str) else ""


def _check_models(spec: RunSpec) -> list[str]:
    """Check the models as far as their files can be read on this machine; return warnings about unreadable URLs. Raises
    InvalidInput for a model that cannot be used, Unreadable for a URL without a model."""
    warnings = []
    for index, reward in enumerate(spec.rewards):
        argument = reward.PATH_ARGUMENTS.get(reward.function, "")
        if isinstance(name := reward.kwargs.get(argument), str):
            check_readable(name, f"rewards.{index}.kwargs.{argument}")
    for section, key in MODEL_FIELDS:
        name, field = getattr(getattr(spec, section), key), f"{section}.{key}"
        if name is None:
            continue
        check_readable(name, field)
        if not is_url(name):
            continue
        try:
            config = _config_at(name, field)
        except OSError as error:
            warnings.append(
                f"{field} {name!r} could not be checked by the coordinator ({error}); the workers read it with the "
                "credentials in their environment"
            )
            continue
        if key == "model_name" and isinstance(config, dict):
            check_architecture(config, f"{field} {name!r}")
    check_local_models(spec)
    return warnings


def _config_at(name: str, field: str) -> Any:
    """Return the config.json of a model at a URL; None if it cannot be read. Raises Unreadable for a URL without a
    model, OSError for an object store that cannot be read."""
    try:
        folder = Folder(name)
        is_there = bool(folder.files()) if field == "policy.tokenizer_name" else folder.exists("config.json")
        if is_there:
            return json.loads(folder.read("config.json")) if folder.exists("config.json") else None
    except FileNotFoundError:
        pass
    except PacelineError as error:
        raise InvalidInput(f"{field}: {error}") from None
    except ValueError:
        return None  # the workers report the fault of the file
    except Exception as error:  # the clients of object stores raise errors without a common base
        raise OSError(f"{type(error).__name__}: {error}") from error
    raise Unreadable(f"{field} {name!r}: there is no such folder with a config.json; correct the URL")


def _json_of(path: Path) -> Any:
    try:
        return json.loads(read_named(path))
    except (OSError, ValueError, RecursionError):
        return None


def _lacks_template(policy: PolicySection) -> bool:
    """Return whether the tokenizer's folder is on this machine and has no chat template."""
    folder = Path(policy.tokenizer_name or policy.model_name).expanduser()
    config = _json_of(folder / "tokenizer_config.json")
    if not isinstance(config, dict) or config.get("chat_template"):
        return False
    others = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")
    return not any((folder / name).exists() for name in others)


NAME_COLUMN = "environment"
"""Column that names the class of a row, if the spec has several classes."""

PROMPT = "prompt"
"""Name by which user code gets the prompt, beside the columns."""

NO_TOOLS = frozenset({"reset", "get_reward", "save", "load"})
PLACEHOLDER = re.compile(r"\{(\w+)\}")


def check_environment(spec: RunSpec, field: str, source: PromptSource) -> None:
    """Check the run's environment with one of its data sets, named `field`. Raises InvalidInput, DataError."""
    section = spec.environment
    if not section.is_used:
        return
    columns, tools = [PROMPT, *source.columns], [tool.rpartition(":")[2] for tool in section.tools]
    if section.class_:
        _check_names(section.classes, field, source)
        has_names = "" not in section.classes
        for name, code in section.classes.items():
            key = f"environment.class.{name}" if name else "environment.class"
            definition = defined(key, code, "class")
            _check_reset(key, definition, field, [c for c in columns if not has_names or c != NAME_COLUMN])
            tools += _tools_of(definition)
    if tools:
        _check_tools(spec, source, tools)
    for name in (name for argument in section.command for name in PLACEHOLDER.findall(argument)):
        if name not in columns:
            raise DataError(
                f"environment.command names {{{name}}}, which is not a column of {field}; the columns are "
                f"{', '.join(columns)}"
            )


def _tools_of(definition: Definition | None) -> list[str]:
    """Return the methods of an environment's class that are tools; a class that has or inherits `step` has none."""
    if not isinstance(definition, ast.ClassDef) or definition.bases:
        return []
    methods = [node.name for node in definition.body if isinstance(node, Function)]
    return [] if "step" in methods else [name for name in methods if name[0] != "_" and name not in NO_TOOLS]


def _check_tools(spec: RunSpec, source: PromptSource, tools: Sequence[str]) -> None:
    """Raise DataError if the prompts are rendered by a chat template on this machine that does not read tools."""
    is_chat = not isinstance(source.draw(0)[0], str) or spec.data.apply_chat_template == "always"
    template = _template_source(spec.policy)
    by_template = spec.environment.tool_parser == "auto" and spec.environment.renderer in ("auto", "template")
    if is_chat and by_template and template and not reads_tools(template):
        raise DataError(
            f"the environment has tools ({', '.join(tools[:5])}), which the chat template of policy.model_name does not read; "
            "choose a model whose template does, describe the tools in data.system_prompt and set environment.tool_parser, "
            "or take a class with `step`"
        )


def _check_names(names: Collection[str], field: str, source: PromptSource) -> None:
    """Raise DataError unless the data set has the column that names a row's class, and the first row has one of `names`
    in it."""
    if "" in names:
        return
    listed = ", ".join(map(repr, names))
    if NAME_COLUMN not in source.columns:
        raise DataError(
            f"environment.class maps the names {listed} to classes, but {field} has no column {NAME_COLUMN!r} that names one "
            f"in each row; its columns besides the prompt are: {', '.join(source.columns) or 'none'}"
        )
    value = source.draw(0)[1].get(NAME_COLUMN)
    if value not in names:
        raise DataError(
            f"the column {NAME_COLUMN!r} of {field} has {value!r:.60}, which environment.class does not name; "
            f"the names in environment.class are {listed}"
        )


def _check_reset(key: str, definition: Definition | None, field: str, columns: Collection[str]) -> None:
    """Raise DataError for a `reset` that needs a column which the data set lacks."""
    if not isinstance(definition, ast.ClassDef):
        return
    reset = definition_of(definition.body, "reset")
    if reset is None or isinstance(reset, ast.ClassDef):
        return
    missing = [name for name in required(reset)[1:] if name not in columns]
    if missing:
        raise DataError(
            f"{key}: `reset` of {definition.name} needs the column {missing[0]!r}, but it gets {', '.join(columns)} of {field}; "
            "give the argument a default, or add the column"
        )
