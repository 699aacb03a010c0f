"""What the pages of the documentation say: commands and options that exist, names of other libraries that mean what they say."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from paceline.apps.importers.import_spec import import_config
from paceline.services.cli.main import main as paceline
from paceline.spec.foreign import table
from paceline.spec.keys import ITEM, keys

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "docs/README.md")),
    ROOT / ".github" / "pull_request_template.md",
    *sorted((ROOT / "docs").glob("[!d]*/*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.md")),
    *sorted((ROOT / "deploy").glob("*.md")),
]
MIGRATION = ROOT / "docs" / "use" / "migration.md"
FROM = {"TRL": "trl", "NeMo RL": "nemo_rl", "verl": "verl", "prime-rl": "prime_rl"}


def commands_of(page: Path) -> list[list[str]]:
    """Return the words of each `paceline` command in the page's shell blocks."""
    found = []
    for block in re.findall(
        r"^```(?:bash|console|sh)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S
    ):
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"^(?:\$ |[A-Z_]+=\S+ )*(paceline .*)$", line.strip()):
                words = shlex.split(re.sub(r"\$\(.*\)", "VALUE", match[1]), comments=True)
                ends = [index for index, word in enumerate(words) if word in ("|", "&", "&&", ">")]
                found.append(words[: min(ends, default=None)])
    return found


def named_in(page: Path) -> list[list[str]]:
    """Return the words of each `paceline` command in the page's sentences and tables; arguments are often left out there."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [shlex.split(command) for command in re.findall(r"`(paceline [^`]+)`", text)]


def fault(words: list[str], *, whole: bool = True) -> str:
    """Return what is wrong with a command, as far as its words tell: a name, an option or a choice that does not exist, an
    argument that is missing (of a `whole` command) or one too many, a key that no spec has. Empty for nothing.
    """
    command: click.Command = paceline
    context = click.Context(command)
    rest = [word for word in words[1:] if word != "…"]
    while isinstance(command, click.Group) and rest:
        if "show" in command.list_commands(context) and rest[0] not in command.list_commands(context):
            rest = ["show", *rest]  # `paceline samples RUN`
        if rest[0].startswith("-"):
            break
        try:
            _, found, rest = command.resolve_command(context, rest)
        except click.UsageError as error:
            return f"{error.message} in {shlex.join(words)}"
        assert found is not None
        command = found
    if "--help" in rest:
        return ""
    context = click.Context(command)
    try:
        given, extra, _ = command.make_parser(context).parse_args(rest)
        wrong = [f"{extra[0]!r} is one too many"] if extra else []
        for param in command.params:
            wrong += fault_of_value(param, given.get(param.name), context, whole=whole)
    except click.BadOptionUsage as error:
        wrong = [error.format_message()] if whole else []
    except click.UsageError as error:
        wrong = [error.format_message()]
    return f"{wrong[0]} in {shlex.join(words)}" if wrong else ""


def fault_of_value(param: click.Parameter, value: Any, context: click.Context, *, whole: bool) -> list[str]:
    """Return what is wrong with the value that the parser has for an option or argument."""
    if not isinstance(value, (str, list, tuple)):
        return [f"no {param.human_readable_name}"] if whole and param.required and not param.envvar else []
    values = [value] if isinstance(value, str) else list(value)
    if isinstance(param.type, click.Choice):
        for each in values:
            if not each.isupper():  # a place-holder
                param.type.convert(each, param, context)
    overrides = [match[1] for each in values if (match := re.match(r"([a-z_]\w*(?:\.\w+)*)=", each))]
    if not isinstance(param, click.Argument):
        return []
    return [f"no key {key}" for key in overrides if not is_key(key)]


def is_key(name: str) -> bool:
    """Return whether a spec has a key; of settings whose names a spec does not know, whether it has the settings."""
    parts = [ITEM if part.isdigit() else part for part in name.split(".")]
    whole = keys().get(".".join(parts))
    heads = (keys().get(".".join(parts[:end])) for end in range(1, len(parts)))
    return whole is not None or any(head is not None and head.section is None for head in heads)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_of_a_page_exists(page: Path) -> None:
    assert [wrong for words in commands_of(page) if (wrong := fault(words))] == []
    assert [wrong for words in named_in(page) if (wrong := fault(words, whole=False))] == []


def test_commands_are_found_and_faults_are_seen() -> None:
    assert len([words for page in PAGES for words in commands_of(page)]) > 100
    assert "trian" in fault(["paceline", "trian"])
    assert "No such option '--stpe'" in fault(["paceline", "samples", "run-1", "--stpe", "5"])
    assert "No such option '--stpe'" in fault(["paceline", "samples", "--stpe"], whole=False)
    assert fault(["paceline", "gate", "--max"], whole=False) == ""
    assert "no reason" in fault(["paceline", "models", "rollback", "sums"])
    assert "'b' is one too many" in fault(["paceline", "watch", "a", "b"])
    assert "'admin' is not one of" in fault(["paceline", "token", "create", "ann", "--role", "admin"])
    assert "no key grpo.steps" in fault(["paceline", "up", "spec.yaml", "grpo.steps=3"])
    assert fault(["paceline", "up", "spec.yaml", "rewards.0.kwargs.path=x", "grpo.seed=3"]) == ""
    assert fault(["paceline", "eval", "--with", "lm-eval", "--output", "x", "--", "--tasks", "a"]) == ""
    assert fault(["paceline", "samples", "export", "run-1", "x.parquet", "--coordinator", "h:1"]) == ""


def section(title: str) -> str:
    """Return what the page on migration says of a library."""
    return MIGRATION.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("title", FROM)
def test_the_names_of_a_library_mean_what_its_section_says(title: str) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", section(title), flags=re.M)
    known = table(FROM[title])
    assert len(rows) >= 5
    assert [(name, key) for name, key in rows if name not in known or known[name].key != key] == []


@pytest.mark.parametrize(
    ("title", "library", "name"),
    [
        ("TRL", "trl", "train_grpo.py"),
        ("NeMo RL", "nemo", "grpo_math.yaml"),
        ("verl", "verl", "run_qwen.sh"),
        ("prime-rl", "prime-rl", "rl.toml"),
    ],
)
def test_a_librarys_file_and_the_spec_beside_it_are_one_run(
    tmp_path: Path, title: str, library: str, name: str
) -> None:
    """The file of the section is imported, and gives every value of the spec below it."""
    blocks = re.findall(r"^```\w+\n(# .*?)^```$", section(title), flags=re.M | re.S)
    (theirs,) = (block for block in blocks if block.startswith(f"# {name}, with"))
    (ours,) = (block for block in blocks if block.startswith(f"# {name.partition('.')[0]}.paceline.yaml"))
    (tmp_path / name).write_text(theirs)
    (tmp_path / "scores.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...\n"
    )
    for data in ("train.jsonl", "train.parquet", "test.parquet"):
        (tmp_path / data).write_text("")
    imported = flat(import_config(library, tmp_path / name).tree)
    shown = flat(yaml.safe_load(ours))
    assert len(shown) >= 10
    assert {key: imported.get(key) for key in shown} == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_code_of_a_page_is_code(page: Path) -> None:
    """Python parses, YAML and JSON load, and targets of make exist."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S):
        ast.parse(block)
    for block in re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.M | re.S):
        list(yaml.safe_load_all(block))
    for block in re.findall(r"^```json\n(.*?)^```$", text, flags=re.M | re.S):
        for part in [block] if block.lstrip().startswith(("{\n", "[")) else block.splitlines():  # JSON, or JSON lines
            json.loads(part)
    shell = "\n".join(re.findall(r"^```(?:bash|console|sh)\n(.*?)^```$", text, flags=re.M | re.S))
    assert set(re.findall(r"^make ([a-z][\w-]*)", shell, flags=re.M)) - targets() == set()


def targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_target_and_campaign_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:`| {4})make ([a-z][\w-]*)", text)) - targets() == set()
    campaigns = re.findall(r"^campaign_(\w+) :=", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    assert len(campaigns) == 8
    assert set(re.findall(r"make campaign NAME=(\w+)", text)) - set(campaigns) == set()


def test_every_campaign_has_a_program_and_a_line_about_it() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in re.findall(r"^campaign_.*", makefile, flags=re.M):
        program, _, about = line.partition(" := ")[2].partition(" ## ")
        assert (ROOT / program).is_file(), line
        assert about, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_of_a_page_has_a_heading(page: Path) -> None:
    """A blank line in a table makes text of the rows behind it."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    tables = re.findall(r"(?:^\|.*\n?)+", text, flags=re.M)
    assert [table for table in tables if not re.match(r"\|.*\n\|[ :|-]+\|\n", table)] == []


def test_every_entry_of_the_changelog_is_whole() -> None:
    text = re.sub(r"^#.*", "", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    entries = re.split(r"^- ", text, flags=re.M)[1:]
    assert [entry for entry in entries if not entry.rstrip().endswith((".", ":"))] == []
    assert len({entry[:80] for entry in entries}) == len(entries)


def flat(tree: object, prefix: str = "") -> dict[str, object]:
    if isinstance(tree, dict):
        return {key: value for name, each in tree.items() for key, value in flat(each, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): tree}
