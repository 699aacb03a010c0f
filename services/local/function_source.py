"""Writes a function object to a file with everything that it uses of its module, for reward functions of a notebook or
script. Nothing is pickled. The file has the function, the functions and classes that it uses and that were defined
beside it, the imports that they use, and constants. A function that needs more, such as a variable of an enclosing
function, is refused, and the error names what is missing."""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from paceline.errors import InvalidInput
from paceline.files.whole_file import write_whole

CLASS_NAMES = {"__name__", "__module__", "__qualname__"}
"""Names that the body of a class sets and reads itself."""
PLAIN = (str, bytes, int, float, bool, type(None))


def named_function(function: Callable[..., Any], folder: Path) -> str:
    """Return `path/to/file.py:function` for a function object: its own file if that can be imported, else a new file in
    `folder`. Raises InvalidInput for a lambda, a method, a built-in, a function that uses variables of another
    function, and an object without source."""
    if not isinstance(function, FunctionType):
        raise InvalidInput(
            f"{_name(function)} is {type(function).__name__}; a reward function must be a function that was defined with "
            "`def`, or a name (`math_accuracy`, `file.py:function`)"
        )
    own_file = _importable_file(function)
    if own_file is not None:
        return f"{own_file}:{function.__name__}"
    source = _Source()
    source.add(inspect.unwrap(function))
    text = source.text()
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = folder.resolve() / f"{function.__name__}_{digest}.py"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())
    return f"{path}:{function.__name__}"


def _importable_file(function: FunctionType) -> Path | None:
    """Return the file of a function at the top of a module that is not a script; None for any other function."""
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    at_top = getattr(module, function.__name__, None) is function
    return Path(file).resolve() if file and at_top and function.__module__ != "__main__" else None


class _Source:
    """Sources of functions and classes, each once, with everything that the sources use."""

    def __init__(self) -> None:
        self._imports: dict[str, str] = {}
        self._constants: dict[str, str] = {}
        self._objects: dict[str, object] = {}
        """Functions and classes by name, also those whose sources are not complete yet."""
        self._definitions: list[str] = []
        """Sources of functions and classes, each after the definitions that it uses."""
        self._folders: set[str] = set()

    def add(self, function: FunctionType) -> None:
        source = _source_of(function)
        self._objects[function.__name__] = function
        if function.__code__.co_freevars:
            raise InvalidInput(
                f"{function.__name__} uses {', '.join(function.__code__.co_freevars)} of the enclosing function, but only the source of "
                f"{function.__name__} is written; pass values as kwargs of the reward, or define them at the top of the module"
            )
        for name in sorted(_global_names(function.__code__) | _names_in_head(source)):
            if name in function.__globals__:
                self._add_global(function.__name__, name, function.__globals__[name], function.__globals__)
            elif not hasattr(builtins, name):
                raise InvalidInput(f"{function.__name__} uses {name}, which is not defined; define it first")
        self._definitions.append(source)

    def text(self) -> str:
        folders = [f"sys.path.append({folder!r})" for folder in sorted(self._folders)]
        parts = [
            "from __future__ import annotations",
            "\n".join(["import sys", *folders] if folders else []),
            "\n".join(sorted(set(self._imports.values()))),
            "\n".join(self._constants.values()),
            *self._definitions,
        ]
        return "\n\n\n".join(part for part in parts if part) + "\n"

    def _add_global(self, user: str, name: str, value: object, scope: dict[str, Any]) -> None:
        if name in self._objects:
            return
        module = getattr(value, "__module__", None)
        decorated = inspect.unwrap(value) if callable(value) else value
        if isinstance(decorated, FunctionType) and decorated.__name__ == name:
            value = decorated
        if isinstance(value, ModuleType):
            self._imports[name] = f"import {value.__name__} as {name}"
            self._folders |= _private_folder(value.__name__)
        elif isinstance(value, FunctionType | type) and module == scope.get("__name__"):
            if isinstance(value, FunctionType):
                self.add(value)
            else:
                self._add_class(value, scope)
        elif isinstance(value, re.Pattern):
            self._imports["re"] = "import re"
            self._constants[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
        elif _is_plain(value):
            self._constants[name] = f"{name} = {value!r}"
        elif module and _is_in_module(value, module):
            self._imports[name] = f"from {module} import {getattr(value, '__qualname__', name)} as {name}"
            self._folders |= _private_folder(module)
        else:
            raise InvalidInput(
                f"{user} uses {name}, a {type(value).__name__}, which cannot be written to a file; create it inside the "
                "function, or put both into a .py file and name that file (`file.py:function`)"
            )

    def _add_class(self, value: type, scope: dict[str, Any]) -> None:
        members = [getattr(member, "__func__", member) for member in vars(value).values()]
        functions = [member for member in members if isinstance(member, FunctionType)]
        source = _class_source(value, functions)
        self._objects[value.__name__] = value
        names = {base.__name__ for base in value.__bases__} | _names_in_head(source)
        for function in functions:
            names |= _global_names(function.__code__)
        for name in sorted(names - {value.__name__}):
            if name in scope:
                self._add_global(value.__name__, name, scope[name], scope)
        self._definitions.append(source)


def _private_folder(module: str) -> set[str]:
    """Return the folder of a module that only this process' script or working directory can import; else empty."""
    top = sys.modules.get(module.partition(".")[0])
    file = getattr(top, "__file__", None)
    if not file:
        return set()
    folder = Path(file).resolve().parent
    folder = folder.parent if hasattr(top, "__path__") else folder
    private = {Path(sys.path[0] or ".").resolve(), Path.cwd()} if sys.path else {Path.cwd()}
    return {str(folder)} if folder in private else set()


def _is_in_module(value: object, module: str) -> bool:
    found: object = sys.modules.get(module)
    for part in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is value and module != "__main__"


def _source_of(function: FunctionType) -> str:
    if function.__name__ == "<lambda>":
        raise InvalidInput("a lambda has no name to load it by; define the function with `def`")
    try:
        return textwrap.dedent(inspect.getsource(function)).strip()
    except (OSError, TypeError):
        raise _without_source(function) from None


def _class_source(value: type, functions: list[FunctionType]) -> str:
    """Return the source of a class, found by the source of its methods, because a notebook's classes have no file."""
    for function in functions:
        lines = linecache.getlines(function.__code__.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).strip()
    raise _without_source(value)


def _without_source(value: object) -> InvalidInput:
    return InvalidInput(
        f"{_name(value)} has no source that can be read (was it made by exec?); put it into a .py file and name that file "
        "(`file.py:function`)"
    )


def _global_names(code: CodeType) -> set[str]:
    reads = ("LOAD_GLOBAL", "LOAD_NAME")
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname in reads}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names - CLASS_NAMES


def _names_in_head(source: str) -> set[str]:
    """Return names in decorators, defaults and a class' body outside of methods, because code objects lack them."""
    definition = ast.parse(source).body[0]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    parts: list[ast.AST] = [*getattr(definition, "decorator_list", ())]
    if isinstance(definition, ast.ClassDef):
        for part in definition.body:
            parts += part.decorator_list if isinstance(part, functions) else [part]
    elif isinstance(definition, functions):
        parts += [*definition.args.defaults, *filter(None, definition.args.kw_defaults)]
    return {
        node.id
        for part in parts
        for node in ast.walk(part)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, PLAIN):
        return not isinstance(value, float) or (value == value and abs(value) != float("inf"))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value) in (list, tuple, set, frozenset) and all(map(_is_plain, value))
    return type(value) is dict and all(_is_plain(part) for item in value.items() for part in item)


def _name(value: object) -> str:
    return str(getattr(value, "__qualname__", repr(value)[:60]))
