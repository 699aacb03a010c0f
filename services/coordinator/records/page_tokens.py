"""Page tokens of RecordsService: the key of the last row of a page, as numbers. A token is a key and not an offset, so
every page costs the same, and new rows move no page."""

from __future__ import annotations

from paceline.errors import InvalidInput

LARGEST = 1 << 62


def write(*numbers: int) -> str:
    return ".".join(str(number) for number in numbers)


def read(token: str, length: int) -> tuple[int, ...] | None:
    """Return the key of a token with `length` numbers; None for the first page. Raises InvalidInput for any other
    text."""
    if not token:
        return None
    parts = token.split(".")
    if len(parts) != length or not all(_is_number(part) for part in parts):
        raise InvalidInput(
            f"page_token {token[:40]!r} is invalid; send `next_page_token` of the previous answer, with the same request"
        )
    return tuple(int(part) for part in parts)


def page_size(requested: int, largest: int) -> int:
    """Return the number of rows of a page: as requested, at most `largest`; 0 requests `largest`."""
    return min(requested or largest, largest)


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 19 and int(digits) <= LARGEST
