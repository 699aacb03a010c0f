"""`paceline/seldom.py` under the name that services had for it."""

from paceline.seldom import SeldomLog, Unforeseen, unforeseen

__all__ = ["SeldomLog", "Unforeseen", "unforeseen"]
