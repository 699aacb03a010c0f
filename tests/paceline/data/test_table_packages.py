import sys
from pathlib import Path

import pytest

from paceline.data.rows import open_rows
from paceline.data.table_rows import need_table_packages
from paceline.errors import InvalidInput


def test_nothing_is_refused_where_the_packages_are() -> None:
    need_table_packages("a Parquet file")


def test_a_table_is_refused_with_the_image_that_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (path := tmp_path / "rows.parquet").touch()
    with pytest.raises(InvalidInput, match=r"data.train: .*rows.parquet' needs pyarrow.*paceline-coordinator-tables"):
        open_rows(str(path), "train")
