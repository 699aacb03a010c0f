"""Reads the settings of a TRL script from its syntax tree, without running it.

Literals, and names with one literal value in the script, become values; any other expression is kept as its text
(`Unread`), for the report.

The script's reward functions become a file with the definitions, constants and imports that they use. Promise: the file
imports nothing else, so a reward worker that loads it needs neither the training library nor a guard around
`trainer.train()`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import SpecError

CONFIGS = {
    "GRPOConfig": "grpo",
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "ORPOConfig": "orpo",
    "RewardConfig": "rm",
}
"""Paceline's algorithm for each of TRL's configuration classes."""
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Unread:
    """An expression whose value is known only by running the script."""

    text: str


@dataclass(frozen=True)
class Script:
    algorithm: str
    settings: dict[str, Any]
    notes: list[str]
    files: dict[str, str] = field(default_factory=dict)
    """Files to write beside the spec, by name: the script's reward functions."""


def read_script(path: Path) -> Script:
    """Return the settings of the script at `path`. Raises SpecError if it is not Python or has no configuration of TRL."""
    if path.stat().st_size > MAX_BYTES:
        raise SpecError(f"{path} has more than {MAX_BYTES} bytes; name the script that makes the configuration")
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"{path} is not valid Python: {error}") from None
    return _Reader(path, text, tree).read()


class _Reader:
    def __init__(self, path: Path, text: str, tree: ast.Module):
        self._path = path
        self._text = text
        self._tree = tree
        self._calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self._values = self._assigned()
        self._functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        self._rewards_file = f"{path.stem}_rewards.py"
        self._notes: list[str] = []

    def read(self) -> Script:
        """Return the settings of the first configuration, and of the trainer and adapter beside it."""
        config = next((call for call in self._calls if _name(call.func) in CONFIGS), None)
        if config is None:
            raise SpecError(
                f"{self._path} has none of {', '.join(CONFIGS)}; name the script or the recipe that has one"
            )
        settings = self._keywords(config)
        for call in self._calls:
            called = _name(call.func)
            if called.endswith("Trainer"):
                settings |= self._of_trainer(call)
            elif called == "LoraConfig":
                settings |= self._of_adapter(call)
        if "dataset_name" not in settings:
            settings |= self._of_data()
        files = self._reward_files(settings.get("reward_funcs", ()))
        unread = {name: value.text for name, value in settings.items() if isinstance(value, Unread)}
        for name, text in unread.items():
            self._notes.append(f"{name} is {text} in the script, which was not run; set it by hand")
        kept = {name: value for name, value in settings.items() if name not in unread}
        return Script(CONFIGS[_name(config.func)], kept, self._notes, files)

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        return {word.arg: self._value(word.value) for word in call.keywords if word.arg}

    def _of_trainer(self, call: ast.Call) -> dict[str, Any]:
        given = {word.arg: word.value for word in call.keywords if word.arg}
        found: dict[str, Any] = {}
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
            elif name:
                rewards.append(name)
            else:
                self._notes.append(f"reward {_text(part)} has no name; define it as a function in a file")
        return rewards

    def _of_adapter(self, call: ast.Call) -> dict[str, Any]:
        names = {
            "r": "lora_r",
            "lora_alpha": "lora_alpha",
            "lora_dropout": "lora_dropout",
            "target_modules": "lora_target_modules",
        }
        found = self._keywords(call)
        return {"use_peft": True} | {ours: found[theirs] for theirs, ours in names.items() if theirs in found}

    def _of_data(self) -> dict[str, Any]:
        call = next((each for each in self._calls if _name(each.func) == "load_dataset"), None)
        if call is None or not call.args:
            return {}
        words = self._keywords(call)
        name = words.get("data_files", self._value(call.args[0]))
        found = {"dataset_name": name, "dataset_train_split": words.get("split", "train")}
        if len(call.args) > 1 or "name" in words:
            found["dataset_config"] = words.get("name", self._value(call.args[1]) if len(call.args) > 1 else None)
        maps = [each for each in self._calls if _name(each.func) in ("map", "filter", "rename_column", "select")]
        if maps:
            self._notes.append(
                f"the script changes the rows ({', '.join(sorted({_name(each.func) for each in maps}))}); write the result with "
                "its to_json(...) and name that file in data.train"
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
    """Return the file's text for functions at the top of the script, and the names that they use but the script does
    not define at its top. `text` is the script's source and `tree` its syntax tree."""
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
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    parts = [ast.unparse(node) for node in future]
    for index in sorted(needed):
        node = tree.body[index]
        if isinstance(node, ast.Import | ast.ImportFrom):
            node = _only(node, seen)
            parts.append(ast.unparse(node))
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
