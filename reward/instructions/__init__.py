"""Instructions whose fulfilment a program can check: the kinds of IFEval."""
