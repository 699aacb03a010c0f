"""Questions with answers to choose from: some with letters of several bytes, some whose answers have one token."""

from __future__ import annotations

QUESTIONS = [
    ("Two and two?", ["four", "three point five"], 0),
    ("Which is a colour?", ["a stone", "red", "walking"], 1),
    ("Überall Wärme, où est l'été?", ["été", "Süden", "nirgends auf der Welt"], 2),
    ("One?", ["1", "2"], 1),
]
"""Question, answers, index of the right one."""
