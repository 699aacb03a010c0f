"""The pages of the reference hold everything that exists, and the pages by hand name what exists."""

from __future__ import annotations

import importlib
import re
import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline.apps.dashboard.backends import PROTOS, comments_of
from paceline.services.cli.main import main
from paceline.services.common.reporting.metric_table import PARTS
from paceline.spec.foreign import TABLES, key_for, look_up, shown_names, table
from paceline.spec.keys import keys
from paceline.spec.sections.vllm import ALLOWED, REFUSED

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REFERENCE: dict[str, Any] = runpy.run_path(str(DOCS / "site" / "reference.py"))
generated: Callable[[], dict[str, str]] = cache(REFERENCE["pages"])


def test_every_key_has_its_line() -> None:
    page = generated()["configuration.md"]
    lacking = [path for path, key in keys().items() if key.section is None and f"- `{path}` (" not in page]
    assert lacking == []
    assert [path for path, key in keys().items() if key.section is not None and f"\n## {path}\n" not in page] == []


def test_every_command_and_every_foreign_name_has_its_line() -> None:
    pages = generated()
    assert [name for name in main.entries if f"## paceline {name}" not in pages["commands.md"]] == []
    names = [name for library in TABLES for name in table(library)]
    assert [name for name in names if f"- `{name}`:" not in pages["foreign_names.md"]] == []


def test_the_names_beside_a_key_are_those_of_the_dictionary() -> None:
    """A name means the key beside it, or one of another algorithm, of which the dictionary names only one."""
    other = {
        ("dpo.preference_loss", "loss_type"),
        ("kto.precompute", "precompute_ref_log_probs"),
        ("orpo.odds_ratio_weight", "beta"),
        ("distillation.kl_type", "loss_fn.kl_type"),
    }
    wrong = []
    for key, names in shown_names().items():
        assert key in keys(), key
        for library, name in names.items():
            entry = table("nemo_rl" if library == "NeMo RL" else "trl").get(name) or look_up(name)
            same = library == "NeMo RL" and name == key
            means = entry and (entry.key == key or key_for(entry.key, key.partition(".")[0]) == key)
            below = entry and key.startswith(f"{entry.key}.")
            if not (same or means or below or (key, name) in other):
                wrong.append((key, library, name))
    assert wrong == []
    assert len(shown_names()) > 130


def test_a_key_has_the_names_of_other_libraries_beside_it() -> None:
    text = " ".join(generated()["configuration.md"].split())
    assert re.search(
        r"`policy.optimizer.lr` [^`]*`1.0e-06`\): [^`]* NeMo RL: `policy.optimizer.kwargs.lr`. TRL: `learning_rate`.",
        text,
    )
    assert re.search(r"`grpo.val_period` .*? NeMo RL: `grpo.val_period`. TRL: `eval_steps`.", text)


def test_lines_are_short() -> None:
    lines = [line for text in generated().values() for line in text.splitlines()]
    long = [line for line in lines if len(line) > 120 and not line.startswith("|")]  # a row cannot be wrapped
    assert [line for line in long if " " in line[2:]] == []


@pytest.mark.parametrize("folder", ["use", "operate", "inside"])
def test_the_index_of_a_folder_lists_its_pages(folder: str) -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / folder / "README.md").read_text(encoding="utf-8")))
    assert {path.name for path in (DOCS / folder).glob("*.md")} - listed == {"README.md"}


def test_the_keys_that_the_pages_name_exist() -> None:
    """A dotted name below one of our sections is a key of ours, or one of another library."""
    sections = {path for path, key in keys().items() if "." not in path and key.section is not None}
    wrong = []
    for page in ("use/migration.md", "use/data.md", "operate/troubleshooting.md"):
        for name in re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)\b", (DOCS / page).read_text(encoding="utf-8")):
            if name.partition(".")[0] in sections and name not in keys() and look_up(name) is None:
                wrong.append(f"{page}: {name}")
    assert wrong == []


def test_the_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    """Each quoted text is one of a module; `…` stands for a value."""
    page = (DOCS / "operate" / "troubleshooting.md").read_text(encoding="utf-8").partition("## While it runs")[0]
    quoted = [text for line in page.splitlines() for text in re.findall(r"^\| `([^`]+)` \|", line)]
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("paceline", "services")
        for path in (ROOT / folder).rglob("*.py")
    )
    lacking = [
        part
        for text in quoted
        for part in (re.sub(r"'\w+'|\bTRL's\b|GPU 0", "…", text)).split("…")
        if part.strip(" ;:") and part.strip(" ;:") not in code
    ]
    assert len(quoted) > 5
    assert lacking == []


def test_every_metric_and_every_name_in_trackers_has_its_row() -> None:
    metrics, names = generated()["metrics.md"], generated()["tracker_names.md"]
    assert [metric.name for part in PARTS for metric in part.metrics if f"| `{metric.name}` |" not in metrics] == []
    assert [each for each in REFERENCE["METRIC_NAMES"] if f"/{each.ours}` |" not in names] == []


def test_every_engine_argument_has_its_row() -> None:
    page = generated()["vllm_arguments.md"]
    assert [name for name in ALLOWED.keys() | REFUSED.keys() if page.count(f"| `{name}` |") != 1] == []


NESTED = """\
// A service.
service S {
  // A call.
  rpc Call(Q) returns (A) {
    option idempotency_level = NO_SIDE_EFFECTS;
  }
  // Another one.
  rpc Other(Q) returns (A);
}
// A message, in
// two lines.
message M {
  oneof what {
    // One.
    string one = 1;
  }
  // After it.
  map<string, double> after = 2;
}
// Empty.
message E {}
// Values.
enum V {
  // Nothing.
  V_UNSPECIFIED = 0;
}
"""


def test_comments_belong_to_what_follows_them(tmp_path: Path) -> None:
    (tmp_path / "x.proto").write_text(NESTED)
    assert comments_of(tmp_path / "x.proto") == {
        "S": "A service.",
        "S.Call": "A call.",
        "S.Other": "Another one.",
        "M": "A message, in two lines.",
        "M.one": "One.",
        "M.after": "After it.",
        "E": "Empty.",
        "V": "Values.",
        "V.V_UNSPECIFIED": "Nothing.",
    }


def test_every_rpc_message_field_and_value_is_on_the_page_with_its_comment() -> None:
    page = generated()["protos.md"]
    lacking, rows = [], 0
    for path in PROTOS.glob("*.proto"):
        descriptor = importlib.import_module(f"paceline.v1.{path.stem}_pb2").DESCRIPTOR
        comments = comments_of(path)
        for owner, members in (
            *((each.name, [m.name for m in each.methods]) for each in descriptor.services_by_name.values()),
            *((each.name, [f.name for f in each.fields]) for each in descriptor.message_types_by_name.values()),
            *((each.name, [v.name for v in each.values]) for each in descriptor.enum_types_by_name.values()),
        ):
            section = page.partition(f"\n### {owner}\n")[2].partition("\n### ")[0]
            for member in members:
                rows += 1
                comment = " ".join(comments.get(f"{owner}.{member}", "").split()).replace("|", "\\|")
                if not comment or f"| `{member}` |" not in section or comment not in section:
                    lacking.append(f"{owner}.{member}")
    assert rows > 500
    assert lacking == []
