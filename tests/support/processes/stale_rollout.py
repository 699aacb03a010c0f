"""A real rollout service whose first layer is always the one of two versions before: `python stale_rollout.py OPTIONS…`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from torch import Tensor

import paceline.services.rollout.main
from paceline.rollout.native.model import NativeModel

kept: deque[dict[str, Tensor]] = deque(maxlen=3)


def main() -> None:
    """Serve, with a layer that is not replaced in time."""
    replace = NativeModel.replace

    def replace_but_one(self: NativeModel, weights: Mapping[str, Tensor]) -> None:
        kept.append({name: tensor.clone() for name, tensor in weights.items() if ".layers.0." in name})
        replace(self, {**weights, **kept[0]})

    NativeModel.replace = replace_but_one  # type: ignore[method-assign]
    paceline.services.rollout.main.main()


if __name__ == "__main__":
    main()
