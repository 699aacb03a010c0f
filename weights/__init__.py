"""Carries a version's weights from the learner's ranks to the engines, by the memory of hosts or an object store."""
