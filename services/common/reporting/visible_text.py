"""Text that a model or a person elsewhere wrote, made safe for a terminal.

A completion can hold sequences that move the cursor, change the title or reverse the order of what is shown. Each such character is
printed as its name in Python, `\\x1b`, so that it can be seen and does nothing.
"""

from __future__ import annotations

import re

KEPT = "\n\t"
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, those of ANSI sequences included
    "\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069"  # marks and overrides of direction
    "\u2028\u2029\ufeff\ud800-\udfff]"  # separators that some terminals take for lines; halves of characters
)


def visible(text: str) -> str:
    """Return the text with every control character but newline and tab written out."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)
