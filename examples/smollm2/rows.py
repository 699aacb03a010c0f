"""Choose and rewrite GSM8K's rows. The specs name a function as `data.preparation.function`; None leaves a row out."""

import re

LONGEST_SOLUTION = 138
"""Characters. 1,520 of the 7,473 training problems have a solution that is at most so long."""


def short_solution(row: dict[str, str]) -> dict[str, str] | None:
    """Return the row with its solution without the calculator's marks, if it is short."""
    solution = re.sub(r"<<[^>]*>>", "", row["answer"])
    return {**row, "completion": solution} if len(solution) <= LONGEST_SOLUTION else None


def at_most_two_steps(row: dict[str, str]) -> dict[str, str] | None:
    """Return the row if its solution has at most two calculations, which `<<` begins."""
    return row if row["answer"].count("<<") <= 2 else None
