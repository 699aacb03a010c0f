"""Names of registered models: accepted forms, and refusals that show the form."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidInput
from paceline.models.registered import Reference, check_alias, check_name, read_reference


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("sums", Reference("sums")),
        ("Sums-2.5_b:12", Reference("Sums-2.5_b", 12)),
        ("sums@champion", Reference("sums", 0, "champion")),
    ],
)
def test_a_reference_is_read_and_written(text: str, reference: Reference) -> None:
    assert read_reference(text) == reference
    assert str(reference) == text


@pytest.mark.parametrize("text", ["", "sums:0", "sums:x", "sums@", "sums@A", "../sums", "a:1@b", "x" * 65, "sums\n"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="NAME@ALIAS"):
        read_reference(text)


def test_names_and_aliases_are_checked_with_their_value() -> None:
    check_name("sums")
    check_alias("champion")
    with pytest.raises(InvalidInput, match=r"'\.\./x'"):
        check_name("../x")
    with pytest.raises(InvalidInput, match="'Champion'"):
        check_alias("Champion")
