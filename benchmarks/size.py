"""How large the product is, and what of it breaks the goals of CONTRIBUTING.md: `make size`.

    python benchmarks/size.py [FOLDER] [--json]

FOLDER is another checkout to measure. The product is what the wheel installs, without generated stubs.
"""

from __future__ import annotations

import ast
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("paceline", "weights", "services", "learner", "rollout", "reward", "environment", "apps")
MAX_LINES, MAX_APPS, MAX_MODULES, MAX_IN_FOLDER, MAX_FILE, MIN_MEDIAN = 100_000, 13_000, 640, 15, 500, 120
ONLY_A_NAME = 10
"""An `__init__.py` of at most this many lines counts as no module."""


def sources(root: Path, package: str) -> dict[Path, str]:
    """Return the text of a package's files. Links to other packages are not followed."""
    found = (root / package).rglob("*.py")
    return {path: path.read_text() for path in sorted(found) if "_pb2" not in path.name}


def functions(text: str) -> list[int]:
    """Return the lines of each function, decorators not counted."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        1 + (node.end_lineno or node.lineno) - node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds)
    ]


def is_module(path: Path, text: str) -> bool:
    """Return whether a file is one that a reader has to know."""
    return path.name != "__init__.py" or text.count("\n") > ONLY_A_NAME


def folded(files: Mapping[Path, str], root: Path) -> list[str]:
    """Return the modules below MIN_MEDIAN lines that one other module imports, with it: would they be better inside it?"""
    names = {}
    for path in files:
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts if parts[0] == "paceline" else ("paceline", *parts)).removesuffix(".__init__")] = path
    importers: dict[str, set[Path]] = {name: set() for name in names}
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                for each in node.names:
                    whole = f"{node.module}.{each.name}"
                    importers.get(whole if whole in names else node.module or "", set()).add(path)
    return [
        f"{path.relative_to(root)} in {next(iter(users)).relative_to(root)}"
        for name, users in importers.items()
        if len(users) == 1 and is_module(path := names[name], files[path]) and files[path].count("\n") < MIN_MEDIAN
    ]


def measured(root: Path) -> dict[str, Any]:
    """Return all figures of the tree in `root`."""
    texts = {package: sources(root, package) for package in PACKAGES if (root / package).is_dir()}
    files = {path: text for each in texts.values() for path, text in each.items()}
    lines = {path: text.count("\n") for path, text in files.items()}
    modules = [path for path, text in files.items() if is_module(path, text)]
    lengths = sorted(length for text in files.values() for length in functions(text))
    folders = Counter(path.parent.relative_to(root).as_posix() for path in modules)
    return {
        "files": len(files),
        "modules": len(modules),
        "lines": sum(lines.values()),
        "median_file": round(statistics.median(lines[path] for path in modules)),
        "longest_file": max(lines.values()),
        "functions": len(lengths),
        "median_function": round(statistics.median(lengths)),
        "over_40": sum(length > 40 for length in lengths) / len(lengths),
        "over_80": sum(length > 80 for length in lengths),
        "longest_function": lengths[-1],
        "packages": {name: [len(each), sum(lines[path] for path in each)] for name, each in texts.items()},
        "full_folders": {name: number for name, number in folders.most_common() if number > MAX_IN_FOLDER},
        "long_files": {
            path.relative_to(root).as_posix(): number for path, number in lines.items() if number > MAX_FILE
        },
        "one_importer": folded(files, root),
        "tests": [len(tests := sources(root, "tests")), sum(text.count("\n") for text in tests.values())],
    }


def missed(size: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each goal that the tree misses."""
    goals = [
        ("lines of the product", size["lines"], MAX_LINES),
        ("lines of apps", size["packages"].get("apps", [0, 0])[1], MAX_APPS),
        ("modules", size["modules"], MAX_MODULES),
    ]
    found = [f"{number:,} {what}, the goal is at most {most:,}" for what, number, most in goals if number > most]
    if size["median_file"] < MIN_MEDIAN:
        found.append(f"a median module of {size['median_file']} lines, the goal is at least {MIN_MEDIAN}")
    found += [f"{name}: {number} modules, at most {MAX_IN_FOLDER}" for name, number in size["full_folders"].items()]
    return found + [f"{name}: {number} lines, at most {MAX_FILE}" for name, number in size["long_files"].items()]


def table(size: Mapping[str, Any]) -> str:
    """Return the figures as Markdown."""
    head = "files | modules | lines | median / max file | functions | median | > 40 lines | > 80 | longest"
    row = (
        f"{size['files']} | {size['modules']} | {size['lines']:,} | {size['median_file']} / {size['longest_file']} | "
        f"{size['functions']:,} | {size['median_function']} | {size['over_40']:.1%} | {size['over_80']} | "
        f"{size['longest_function']}"
    )
    parts = ((*pair, name) for name, pair in (*size["packages"].items(), ("tests", size["tests"])))
    packages = [f"| {name}/ | {number} | {lines:,} |" for number, lines, name in parts]
    rule = "---|" * (head.count("|") + 1)
    return "\n".join(
        [f"| {head} |", f"|{rule}", f"| {row} |", "", "| part | files | lines |", "|---|---|---|", *packages]
    )


def main() -> None:
    """Print the table, and the goals that are missed."""
    arguments = [each for each in sys.argv[1:] if each not in ("--json", "--short")]  # it is always short
    size = measured(Path(arguments[0]).resolve() if arguments else ROOT)
    if "--json" in sys.argv:
        print(json.dumps(size, indent=1))
        return
    print(table(size))
    for sentence in missed(size):
        print(f"- {sentence}")
    print(f"\nModules below {MIN_MEDIAN} lines with one importer (a look, no goal): {'; '.join(size['one_importer'])}")


if __name__ == "__main__":
    main()
