"""An environment that searches a folder of text files and opens them."""

import re
from pathlib import Path

NOTES = Path(__file__).resolve().parent / "notes"
WORD = re.compile(r"\w+")


class Search:
    """Tools over local files. The files do not change, so equal calls have equal answers."""

    deterministic = True

    def __init__(self) -> None:
        self._pages = {path.name: path.read_text() for path in sorted(NOTES.glob("*.txt"))}
        self._opened: list[str] = []

    def reset(self, page: str, **columns: object) -> None:
        """Begin an episode. `page` is the column with the file that has the answer."""
        self._opened = []
        self._wanted = page

    def search(self, words: str) -> str:
        """
        Finds the files that have the most of some words.

        Args:
            words: the words to look for, separated by spaces
        """
        wanted = {word.lower() for word in WORD.findall(words)}
        found = []
        for name, text in self._pages.items():
            hits = len(wanted & {word.lower() for word in WORD.findall(text)})
            if hits:
                found.append((-hits, name))
        return "\n".join(name for _, name in sorted(found)[:3]) or "nothing found"

    def open_file(self, name: str) -> str:
        """
        Opens a file.

        Args:
            name: a name that `search` has found
        """
        if name not in self._pages:
            raise ValueError(f"there is no file {name}; search first")
        self._opened.append(name)
        return self._pages[name]

    def get_reward(self) -> float:
        """Return up to half a point for the right file, less for each file opened before it; reward.py judges the
        answer."""
        if self._wanted not in self._opened:
            return 0.0
        return 0.5 / (1 + self._opened.index(self._wanted))
