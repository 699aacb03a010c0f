"""The pages of the gRPC interface and of the Python client hold everything that exists, with its comment."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import paceline
from paceline import errors
from paceline.client import Client
from paceline.records import Records
from paceline.services.cli.reference import FOLDER, client, comments_of, protos

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
    page = protos()
    lacking, rows = [], 0
    for path in FOLDER.glob("*.proto"):
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


def test_every_public_method_of_the_client_is_on_the_page_with_its_docstring() -> None:
    page = client()
    for owner in (Client, Records):
        names = [name for name, value in vars(owner).items() if inspect.isfunction(value) and not name.startswith("_")]
        assert len(names) > 10
        for name in names:
            first = (inspect.getdoc(vars(owner)[name]) or "").split("\n")[0]
            assert f"#### {owner.__name__}.{name}\n" in page, name
            assert first, name
            assert first in " ".join(page.split()), name
    assert "at 0x" not in page  # the representation of an object differs from run to run


def test_every_public_name_and_every_error_is_on_the_page() -> None:
    page = client()
    assert [
        name
        for name in paceline.__all__
        if name not in ("RunSpec",) and f"`{name}`" not in page and f"### {name}\n" not in page
    ] == []
    found = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.PacelineError)
    ]
    assert [name for name in found if f"| `{name}` |" not in page] == []
