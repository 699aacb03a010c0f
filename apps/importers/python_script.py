"""Reads the settings of a TRL script from its syntax tree, without running it.

Literals, and names with one literal value in the script, become values; any other expression is reported as its text. A
script that parses its command line (TrlParser) gets its settings from the command that is given, else from the first
command in its docstring.

The script's reward functions become a file with the definitions, constants and imports that they use. Promise: the file
imports nothing else, so a reward worker can load it without the training library.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.apps.importers import shell
from paceline.apps.importers.conversion import plain, scalar
from paceline.apps.importers.trl import BUILT_IN, CLASSES
from paceline.errors import SpecError

TRAINER_ARGUMENTS = (
    "model", "args", "train_dataset", "eval_dataset", "reward_funcs", "processing_class", "tokenizer", "peft_config",
    "callbacks", "data_collator", "compute_metrics", "ref_model",
)  # fmt: skip
"""Arguments of a trainer that are read, or need no counterpart."""
PARSERS = ("TrlParser", "HfArgumentParser")
"""Classes that read the settings from the command line."""
SCRIPTS = {
    "grpo": "GRPOConfig", "rloo": "RLOOConfig", "sft": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig",
    "reward": "RewardConfig",
}  # fmt: skip
"""Configuration class of each of TRL's commands (`trl grpo --…`)."""
IMAGES = ("image", "images", "AutoModelForImageTextToText", "AutoProcessor")
"""Columns and classes of samples with images."""
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Unread:
    """An expression whose value is known only by running the script."""

    text: str


@dataclass(frozen=True)
class Script:
    config: str
    """Configuration class, one of CLASSES; empty if the settings decide."""
    settings: dict[str, Any]
    notes: list[str]
    files: dict[str, str] = field(default_factory=dict)


def read_command(text: str, about: str) -> Script:
    """Return the settings of the first command of TRL in `text`, such as `trl grpo --model_name_or_path …`. Raises
    SpecError without one; `about` names the text in the message."""
    command = _first_command(text)
    if not command:
        raise SpecError(f"{about} has no command such as `trl grpo --model_name_or_path …`")
    name = Path(command[0]).stem
    if name == "trl":
        name = command[1]
        if name not in SCRIPTS:
            raise SpecError(f"{about} runs trl {name}, which has no counterpart; {', '.join(SCRIPTS)} can be imported")
    settings, notes = _known(_options(command[1:]))
    if "config" in settings:
        raise SpecError(f"{about} reads --config {settings['config']}; import that file instead")
    return Script(SCRIPTS.get(name, ""), settings, notes)


def _first_command(text: str) -> list[str]:
    """Return the first command of TRL or of a Python file with options, from that word on; empty if there is none."""
    for command in shell.commands(text):
        at = next((index for index, word in enumerate(command) if word == "trl" or word.endswith(".py")), None)
        if at is not None and any(word.startswith("--") for word in command[at:]):
            return command[at:]
    return []


def _known(settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings whose values do not depend on a run of the script, and a note for each other setting."""
    unknown = {name: shell.unresolved(str(value)) for name, value in settings.items()}
    notes = [
        f"{name} is {settings[name]}, and only a run of the script knows {found}; set it by hand"
        for name, found in unknown.items()
        if found
    ]
    return {name: value for name, value in settings.items() if not unknown[name]}, notes


def _options(words: list[str]) -> dict[str, Any]:
    """Return a mapping from name to value of the options `--name value …`. An option without a value is true."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word.rstrip(","))
    values: dict[str, Any] = {}
    for name, given in found.items():
        if not given and name.startswith("no_"):
            values[name[3:]] = False
        else:
            read = [plain(scalar(each)) for each in given]
            values[name] = read if len(read) > 1 else read[0] if read else True
    return values


def read_script(path: Path, command: str = "") -> Script:
    """Return the settings that a script would have if `command` ran it. Raises SpecError if it is not Python, or has no
    configuration of TRL that has a counterpart."""
    if path.stat().st_size > MAX_BYTES:
        raise SpecError(f"{path} has more than {MAX_BYTES} bytes; name the script that makes the configuration")
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"{path} is not valid Python: {error}") from None
    return _Reader(path, text, tree).read(command)


class _Reader:
    def __init__(self, path: Path, text: str, tree: ast.Module):
        self._path = path
        self._text = text
        self._tree = tree
        self._calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self._values = self._assigned()
        self._functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        self._imported = {alias.asname or alias.name for node in imports for alias in node.names}
        self._rewards_file = f"{path.stem}_rewards.py"
        self._notes: list[str] = []

    def read(self, command: str) -> Script:
        """Return the settings of the first configuration, and of the trainer and adapter beside it."""
        if any(
            (isinstance(node, ast.Constant) and node.value in IMAGES)
            or (isinstance(node, ast.Name) and node.id in IMAGES)
            for node in ast.walk(self._tree)
        ):
            raise SpecError(
                f"{self._path} loads images or a model that takes them; samples with images cannot be trained"
            )
        config, name = self._config()
        settings = self._keywords(config) if config else {}
        for call in self._calls:
            called = _name(call.func)
            if called.endswith("Trainer"):
                settings |= self._of_trainer(call)
            elif called == "LoraConfig":
                settings |= self._of_adapter(call)
        if "dataset_name" not in settings:
            settings |= self._of_data()
        if config is None:
            settings |= self._command_line(command)
        elif command:
            raise SpecError(
                f"{self._path} makes its {name} itself; --command is only for a script that parses its command line"
            )
        files = self._reward_files(settings.get("reward_funcs", ()))
        unread = {name: value.text for name, value in settings.items() if isinstance(value, Unread)}
        for unknown, text in unread.items():
            self._notes.append(f"{unknown} is {text} in the script, which was not run; set it by hand")
        kept = {name: value for name, value in settings.items() if name not in unread}
        return Script(name, kept, self._notes, files)

    def _config(self) -> tuple[ast.Call | None, str]:
        """Return the call that makes the configuration, None if a parser makes it, and the configuration's class."""
        config = next((call for call in self._calls if _name(call.func) in CLASSES), None)
        if config is not None:
            return config, _name(config.func)
        is_parsed = any(_name(call.func) in PARSERS for call in self._calls)
        parsed = [
            part for node in ast.walk(self._tree) if isinstance(node, ast.Tuple) for part in node.elts if is_parsed
        ]
        names = [_name(part) for part in parsed if _name(part).endswith("Config")]
        names += [_name(call.func) for call in self._calls if _name(call.func).endswith("Config")]
        own = [name for name in names if name not in ("ModelConfig", "LoraConfig", "BitsAndBytesConfig")]
        if known := [name for name in own if name in CLASSES]:
            return None, known[0]
        if own:
            raise SpecError(f"{self._path}: {own[0]} has no counterpart; only {', '.join(CLASSES)} can be imported")
        if not self._tree.body:
            raise SpecError(f"{self._path} has only comments; name the script that they point to")
        raise SpecError(f"{self._path} has none of {', '.join(CLASSES)}; name the script or the recipe that has one")

    def _command_line(self, command: str) -> dict[str, Any]:
        if command:
            settings, notes = _known(_options([word for each in shell.commands(command) for word in each]))
            self._notes += notes
            return settings
        pattern = r"^[ \t]*(?:[A-Z_]+=\S+ )*(?:accelerate launch|python|uv run|trl) .*(?:\\\n.*)*"
        regions = re.findall(pattern, ast.get_docstring(self._tree) or "", re.M)
        first = next(filter(None, map(_first_command, regions)), None)
        if first is None:
            raise SpecError(
                f"{self._path} takes its settings from the command line, and its docstring has none: add --command "
                "'--model_name_or_path … --dataset_name …'"
            )
        settings, notes = _known(_options(first))
        self._notes += ["the settings are those of the first command in the docstring; --command gives others", *notes]
        return settings

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        return {word.arg: self._value(word.value) for word in call.keywords if word.arg}

    def _of_trainer(self, call: ast.Call) -> dict[str, Any]:
        given = {word.arg: word.value for word in call.keywords if word.arg}
        found: dict[str, Any] = {}
        self._notes += [
            f"{_name(call.func)} has {name}={_text(node)}, which was not read; see docs/use/migration.md"
            for name, node in given.items()
            if name not in TRAINER_ARGUMENTS
        ]
        if "model" in given:
            found["model_name_or_path"] = self._model(given["model"])
        if "reward_funcs" in given:
            found["reward_funcs"] = self._rewards(given["reward_funcs"])
        return found

    def _model(self, node: ast.expr) -> Any:
        """Return the model's name: a text, or the first argument of a `from_pretrained`."""
        value = self._value(node)
        if not isinstance(value, Unread):
            return value
        loads = [call for call in self._calls if isinstance(call.func, ast.Attribute) and call.args]
        for call in loads:
            if _name(call.func) == "from_pretrained" and "Tokenizer" not in _text(call.func):
                return self._value(call.args[0])
        return value

    def _rewards(self, node: ast.expr) -> list[Any]:
        parts = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        rewards: list[Any] = []
        for part in parts:
            name, value = _name(part), self._value(part)
            if isinstance(value, str):
                rewards.append({"function": "reward_model", "kwargs": {"path": value}})
            elif name in self._functions:
                rewards.append({"function": f"{self._rewards_file}:{name}"})
            elif name in self._imported or name in BUILT_IN:
                rewards.append(name)
            elif name:
                self._notes.append(f"reward_funcs is {name} in the script, which was not run; name the functions")
                rewards.append(None)
            else:
                self._notes.append(f"reward {_text(part)} has no name; define it as a function in a file")
                rewards.append(None)
        return rewards

    def _of_adapter(self, call: ast.Call) -> dict[str, Any]:
        found = self._keywords(call)
        given = (name for name in ("r", "lora_alpha", "lora_dropout", "target_modules") if name in found)
        return {"use_peft": True} | {f"lora_{name.removeprefix('lora_')}": found[name] for name in given}

    def _of_data(self) -> dict[str, Any]:
        call = next((each for each in self._calls if _name(each.func) == "load_dataset"), None)
        if call is None or not call.args:
            return {}
        words = self._keywords(call)
        name = words.get("data_files", self._value(call.args[0]))
        splits = words.get("split", "train")
        split = splits[0] if isinstance(splits, list) and splits else splits
        found = {"dataset_name": name, "dataset_train_split": split}
        if len(call.args) > 1 or "name" in words:
            found["dataset_config"] = words.get("name", self._value(call.args[1]) if len(call.args) > 1 else None)
        maps = [each for each in self._calls if _name(each.func) in ("map", "filter", "rename_column", "select")]
        if maps:
            self._notes.append(
                f"the script changes the rows ({', '.join(sorted({_name(each.func) for each in maps}))}); save the changed data set "
                "with its method to_json(...), and name that file in data.train"
            )
        return found

    def _reward_files(self, rewards: Any) -> dict[str, str]:
        named = [reward["function"].partition(":") for reward in rewards if isinstance(reward, dict)]
        functions = [function for file, _, function in named if file == self._rewards_file]
        if not functions:
            return {}
        text, missing = reward_source(self._text, self._tree, functions)
        if missing:
            self._notes.append(
                f"{self._rewards_file} uses {', '.join(missing)}, which the script does not define at its top; define it there"
            )
        return {self._rewards_file: text}

    def _assigned(self) -> dict[str, Any]:
        """Return the literal value of each name that the whole script assigns exactly once."""
        found: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, []).append(node.value)
        values = {}
        for name, nodes in found.items():
            value = _literal(nodes[0])
            if len(nodes) == 1 and not isinstance(value, Unread):
                values[name] = value
        return values

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in self._values:
            return self._values[node.id]
        return _literal(node)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Unread(_text(node))


def _text(node: ast.expr) -> str:
    try:
        return ast.unparse(node)[:80]
    except RecursionError:
        return "a long expression"


def _name(node: ast.expr) -> str:
    """Return the last part of a name: `load_dataset` of `datasets.load_dataset`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def reward_source(text: str, tree: ast.Module, functions: Iterable[str]) -> tuple[str, list[str]]:
    """Return the text of functions at the top of a script (`text`, parsed: `tree`), and the names that they use but the
    script does not define at its top."""
    defined = dict(_definitions(tree))
    needed: set[int] = set()
    missing: list[str] = []
    queue, seen = list(functions), set[str]()
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in defined:
            index = defined[name]
            if index not in needed:
                needed.add(index)
                if not isinstance(tree.body[index], ast.Import | ast.ImportFrom):
                    queue += _names_read(tree.body[index])
        elif not hasattr(builtins, name):
            missing.append(name)
    parts = [
        ast.unparse(each) for each in tree.body if isinstance(each, ast.ImportFrom) and each.module == "__future__"
    ]
    for index in sorted(needed):
        node = tree.body[index]
        if isinstance(node, ast.Import | ast.ImportFrom):
            parts.append(ast.unparse(_only(node, seen)))
        else:
            parts.append(_source(text, node))
    return "\n\n".join(parts) + "\n", sorted(missing)


def _definitions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the names that the top-level statements define, with the statement's index; the last definition wins."""
    for index, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, index
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], index
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id, index


def _names_read(node: ast.AST) -> list[str]:
    """Return the names that a statement reads but does not bind as an argument or a local variable."""
    walked = list(ast.walk(node))
    read = {part.id for part in walked if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    bound = {part.id for part in walked if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    bound |= {part.arg for part in walked if isinstance(part, ast.arg)}
    bound |= {part.name for part in walked if isinstance(part, ast.ExceptHandler) and part.name}
    for part in walked:
        if isinstance(part, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in part.names}
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(part.name)
    declared = {name for part in walked if isinstance(part, ast.Global) for name in part.names}
    return sorted((read - bound) | declared)


def _only(node: ast.Import | ast.ImportFrom, used: set[str]) -> ast.Import | ast.ImportFrom:
    names = [
        alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in used or alias.name == "*"
    ]
    if isinstance(node, ast.Import):
        return ast.Import(names=names)
    return ast.ImportFrom(module=node.module, names=names, level=node.level)


def _source(text: str, node: ast.stmt) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
