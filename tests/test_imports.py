"""The import rules of CONTRIBUTING.md, read from the source and tried in a fresh interpreter."""

import ast
import functools
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "paceline",
    "apps",
    "services",
    "rollout",
    "reward",
    "learner",
    "environment",
    "weights",
    "protos",
)
"""Folders of the repository. Those but `paceline` are its subpackages, by links within it; that of protos is `paceline.v1`."""
MAY_IMPORT = {
    "protos": {"protos"},
    "paceline": {"paceline", "protos"},
    "weights": {"weights", "paceline", "protos"},
    "rollout": {"rollout", "weights", "paceline", "protos"},
    "reward": {"reward", "weights", "paceline", "protos"},
    "learner": {"learner", "weights", "paceline", "protos"},
    "environment": {"environment", "weights", "paceline", "protos"},
    "services": set(PACKAGES) - {"apps"},
    "apps": set(PACKAGES),
}
HEAVY = {"torch", "transformers", "vllm", "datasets", "grpc"}
READS_PICKLE = "paceline.learner.checkpoints.metadata"
"""Decodes torch's checkpoint metadata, with a list of the classes that it may name."""
PICKLING = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def sources(package: str) -> list[Path]:
    found = [path for path in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in path.name]
    assert found, package
    return found


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if name.startswith("protos."):
        return name.removeprefix("protos.")
    return f"paceline.{name}" if name.partition(".")[0] in PACKAGES[1:] else name


def folder_of(module: str) -> str | None:
    """Return the folder in which a module of ours stands; None for one of another project."""
    first, _, rest = module.partition(".")
    second = rest.partition(".")[0]
    if first != "paceline":
        return None
    return "protos" if second == "v1" else second if second in PACKAGES else "paceline"


STATEMENTS = ast.stmt | ast.ExceptHandler | ast.match_case
"""Nodes that may have an import; an expression has none."""


@functools.cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """Each imported module, and whether that happens when `path` itself is imported."""

    def visit(node: ast.AST, top: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        match node:
            case ast.Import():
                yield from ((alias.name, top) for alias in node.names)
            case ast.ImportFrom():
                assert node.level == 0, f"{path}: a relative import"
                yield node.module or "", top
        inner = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, STATEMENTS):
                yield from visit(child, inner)

    return tuple(visit(parsed(path), True))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def dotted(node: ast.expr) -> str:
    """Return a name with dots as it stands in the source; the part before a call or subscript is missing."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
    return ""


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_point_one_way(package: str) -> None:
    wrong = []
    for path in sources(package):
        for name, _ in imports(path):
            if folder_of(name) not in (None, *MAY_IMPORT[package]):
                wrong.append(f"{module_name(path)} imports {name}")
    assert not wrong


def test_ours_are_imported_by_the_one_name_that_is_installed() -> None:
    """A user's own `services/` or `reward.py` is another module than ours."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], check=True, capture_output=True, text=True, cwd=ROOT)
    wrong = [
        f"{path} imports {name}"
        for path in tracked.stdout.splitlines()
        for name, _ in imports(ROOT / path)
        if name.partition(".")[0] in PACKAGES[1:]
    ]
    assert not wrong


def test_every_folder_of_ours_is_a_subpackage() -> None:
    for package in PACKAGES[1:]:
        name = "v1" if package == "protos" else package
        there = ROOT / ("protos/paceline/v1" if package == "protos" else package)
        assert Path(paceline.__path__[0], name).resolve() == there


def test_the_shared_core_imports_nothing_heavy_at_module_level() -> None:
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in sources("paceline")
        for name, top in imports(path)
        if top and name.split(".")[0] in HEAVY
    ]
    assert not wrong


@pytest.mark.parametrize("statement", ["import paceline", "import paceline.spec.reading", "import paceline.client"])
def test_importing_the_core_loads_nothing_heavy(statement: str) -> None:
    loaded = fresh_interpreter(f"{statement}; import sys; print(*sys.modules)").split()
    assert not {name.split(".")[0] for name in loaded} & HEAVY


def test_help_loads_neither_torch_nor_grpc() -> None:
    code = "import sys; from paceline.services.cli.main import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    *_, loaded = fresh_interpreter(code).splitlines()
    assert "click" in loaded.split()
    assert not {name.split(".")[0] for name in loaded.split()} & HEAVY


RUNS_CODE = re.compile(r"exec|eval|__import__|(.*\.)?(exec_module|spec_from_file_location|run_path|run_module)")
"""Calls that run code which is no module of the packages."""


def test_the_coordinator_reaches_nothing_that_runs_user_code() -> None:
    modules = {module_name(path).removesuffix(".__init__"): path for package in PACKAGES for path in sources(package)}
    reached = reachable([name for name in modules if name.startswith("paceline.services.coordinator")], modules)
    assert "paceline.spec.reading" in reached
    assert not {name for name in reached if runs_code(modules[name])}
    assert runs_code(modules["paceline.user_code.loading"])


def reachable(start: list[str], modules: dict[str, Path]) -> set[str]:
    """Return the modules that any code of `start` imports, also within functions, and those that these import."""
    reached: set[str] = set()
    left = list(start)
    while left:
        name = left.pop()
        if name in reached:
            continue
        reached.add(name)
        for node in ast.walk(parsed(modules[name])):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for each in named:
                parts = each.split(".")
                prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
                left += [prefix for prefix in prefixes if prefix in modules]
    return reached


def runs_code(path: Path) -> bool:
    calls = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))
    return any(RUNS_CODE.fullmatch(dotted(call.func)) for call in calls)


def test_no_pickle_in_our_code() -> None:
    wrong = []
    for package in (*PACKAGES, "tests", "examples", "benchmarks"):
        for path in sources(package):
            wrong += [
                f"{module_name(path)} imports {name}"
                for name, _ in imports(path)
                if name.split(".")[0] in PICKLING and module_name(path) != READS_PICKLE
            ]
            wrong += [f"{module_name(path)} calls {call}" for call in unpickling_calls(path)]
    assert not wrong


def unpickling_calls(path: Path) -> list[str]:
    """Calls that unpickle what they read: torch.load, numpy with allow_pickle, object collectives, recv_pyobj."""
    found = []
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        arguments = {keyword.arg: keyword.value for keyword in node.keywords}
        pickles = isinstance(arguments.get("allow_pickle"), ast.Constant) and ast.unparse(arguments["allow_pickle"])
        if (
            (name == "torch.load" and ast.unparse(arguments.get("weights_only", node)) != "True")
            or name == "torch.save"
            or name.split(".")[-1] in ("recv_pyobj", "send_pyobj", "read_pickle", "to_pickle")
            or (name.startswith(("dist.", "torch.distributed.")) and "_object" in name)
            or pickles == "True"
        ):
            found.append(name)
    return found


def test_the_check_itself_sees_what_it_looks_for(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "import torch, numpy as np\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import grpc\n"
        "def f():\n    import transformers\n"
        "class C:\n    import datasets\n"
        "torch.load('x'); torch.load('x', weights_only=True); np.load('x', allow_pickle=True); np.load('y', allow_pickle=False)\n"
        "dist.all_gather_object([], 1)\n"
    )
    found = dict(imports(path))
    assert found == {"torch": True, "numpy": True, "typing": True, "transformers": False, "datasets": True}
    assert unpickling_calls(path) == ["torch.load", "np.load", "dist.all_gather_object"]


def fresh_interpreter(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60, cwd=ROOT
    ).stdout


def test_the_least_versions_that_are_asked_for_can_import_the_stubs() -> None:
    low_floors = runpy.run_path(str(ROOT / "protos" / "generate.py"))["low_floors"]
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    stubs = [path.read_text() for path in (ROOT / "protos").rglob("*_pb2*.py")]
    assert not low_floors(asked, stubs)
    assert low_floors(["grpcio>=1.85", "protobuf>=99"], stubs).keys() == {"grpcio"}
    assert low_floors(["grpcio", "grpcio-reflection>=99"], stubs).keys() == {"grpcio", "protobuf"}
