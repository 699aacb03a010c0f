"""What a page of `paceline report`, `plot` or `sweep` draws."""

from __future__ import annotations

import json
import re
from typing import Any


def content_of(page: str) -> dict[str, Any]:
    """Return title and blocks of a page."""
    (content,) = re.findall(r'<script type="application/json" id="content">(.*)</script>', page)
    found: dict[str, Any] = json.loads(content)
    return found


def charts_of(page: str) -> list[dict[str, Any]]:
    """Return the charts of a page in their order."""
    return [chart for block in content_of(page)["blocks"] if block[0] == "charts" for chart in block[1]]
