"""What the pages of the documentation say: commands and options that exist, names of other libraries that mean what they say."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from paceline.migration.writing import import_config
from paceline.spec.foreign.names import table
from services.cli.main import main as paceline

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "commands.md"),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.md")),
    *sorted((ROOT / "deploy").glob("*.md")),
]
FROM = {
    "from_trl.md": "trl",
    "from_nemo_rl.md": "nemo_rl",
    "from_verl.md": "verl",
    "from_prime_rl.md": "prime_rl",
}


def commands_of(page: Path) -> list[list[str]]:
    """Return the words of each `paceline` command in the page's shell blocks."""
    found = []
    for block in re.findall(
        r"^```(?:bash|console|sh)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S
    ):
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"^(?:\$ |[A-Z_]+=\S+ )*(paceline .*)$", line.strip()):
                found.append(
                    re.split(
                        r"[\s']+",
                        re.sub(r"\$\(.*\)", "VALUE", match[1]).partition(" #")[0].partition(" | ")[0].strip(),
                    )
                )
    return found


def fault(words: list[str]) -> str:
    """Return what is wrong with a command: a name or an option that does not exist; empty for none."""
    command: click.Command = paceline
    context = click.Context(command)
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        if "show" in command.list_commands(context) and rest[0] not in command.list_commands(context):
            rest = ["show", *rest]  # `paceline samples RUN`
        try:
            _, found, rest = command.resolve_command(context, rest)
        except click.UsageError as error:
            return f"{error.message} in {shlex.join(words)}"
        assert found is not None
        command = found
    options = {
        name
        for param in command.params
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }
    unknown = [
        word
        for word in rest
        if re.match(r"--?[a-zA-Z]", word) and word.partition("=")[0] not in {*options, "--help"}
    ]
    return f"no option {unknown[0]} in {shlex.join(words)}" if unknown else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_of_a_page_exists(page: Path) -> None:
    assert [wrong for words in commands_of(page) if (wrong := fault(words))] == []


def test_commands_are_found_and_faults_are_seen() -> None:
    assert len([words for page in PAGES for words in commands_of(page)]) > 100
    assert "trian" in fault(["paceline", "trian"])
    assert "no option --stpe" in fault(["paceline", "samples", "run-1", "--stpe", "5"])
    assert fault(["paceline", "samples", "export", "run-1", "x.parquet", "--coordinator", "h:1"]) == ""


@pytest.mark.parametrize("page", FROM)
def test_the_names_of_a_library_mean_what_its_page_says(page: str) -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| (?:`([^`]+)`|–) \|", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.M
    )
    named = [(name, key) for name, key in rows if name in table(FROM[page])]
    assert len(named) >= 25
    assert [(name, key) for name, key in named if table(FROM[page])[name].key != key] == []
    unknown = [
        name
        for name, _ in rows
        if name not in table(FROM[page]) and not name.startswith(("uv ", "run_", "convert_"))
    ]
    assert [name for name in unknown if "overrides" not in name] == []


@pytest.mark.parametrize(
    ("page", "library", "name"),
    [
        ("from_trl.md", "trl", "train_grpo.py"),
        ("from_nemo_rl.md", "nemo", "grpo_math.yaml"),
        ("from_verl.md", "verl", "run_qwen.sh"),
        ("from_prime_rl.md", "prime-rl", "rl.toml"),
    ],
)
def test_a_librarys_file_and_the_spec_beside_it_are_one_run(
    tmp_path: Path, page: str, library: str, name: str
) -> None:
    """The file of the page is imported, and gives every value of the spec below it."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w+\n(# .*?)^```$", text, flags=re.M | re.S)
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
        for part in (
            [block] if block.lstrip().startswith(("{\n", "[")) else block.splitlines()
        ):  # JSON, or JSON lines
            json.loads(part)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    shell = "\n".join(re.findall(r"^```(?:bash|console|sh)\n(.*?)^```$", text, flags=re.M | re.S))
    assert set(re.findall(r"^make ([a-z][\w-]*)", shell, flags=re.M)) - targets == set()


def flat(tree: object, prefix: str = "") -> dict[str, object]:
    if isinstance(tree, dict):
        return {
            key: value for name, each in tree.items() for key, value in flat(each, f"{prefix}{name}.").items()
        }
    return {prefix.rstrip("."): tree}
