"""`--short` of every benchmark: its smallest sizes, in seconds, so that a test can run all of it. The figures mean nothing."""

from __future__ import annotations

import argparse
import sys
from typing import Any

OPTION = "--short"
HELP = "take the smallest sizes, for a trial of seconds: the figures mean nothing"


def parse(parser: argparse.ArgumentParser, **sizes: Any) -> argparse.Namespace:
    """Return the options of the command line; with --short these sizes are the defaults, and no result fails the command."""
    parser.add_argument(OPTION, action="store_true", help=HELP)
    if OPTION in sys.argv[1:]:
        parser.set_defaults(**sizes)
    return parser.parse_args()
