"""The packages that read and write tables, which the small images of coordinator and command line leave out."""

from __future__ import annotations

from importlib.util import find_spec

from paceline.errors import InvalidInput

PACKAGES = ("pyarrow", "datasets")


def need_table_packages(what: str) -> None:
    """Raises InvalidInput, with what to do, where the packages are not installed. `what` names the use."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise InvalidInput(
            f"{what} needs {' and '.join(missing)}, which this installation leaves out; take the image "
            "paceline-coordinator-tables (for commands paceline-cli-tables), install what is missing, or use JSONL or CSV"
        )
