"""One version of the weights, ready to be sent: a copy that no later optimizer step touches.

Packing and checksums take seconds with a large model, so the first link's thread that needs them makes them, once, and
never the thread that trains. The bytes never change afterwards, so any number of links may send them at once, and a send
that is stuck forever keeps them alive without harm.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from paceline.groups import Version
from paceline.weights.manifest import Algorithm, WeightManifest
from paceline.weights.packing import checksums, pack, plan


class StagedWeights:
    """The tensors of `version`, which belong to this object from now on."""

    def __init__(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        *,
        bucket_bytes: int,
        algorithm: Algorithm,
    ) -> None:
        self.version = version
        self.size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        """Bytes that are sent, approximately."""
        self._tensors: Mapping[str, torch.Tensor] | None = tensors
        self._bucket_bytes = bucket_bytes
        self._algorithm = algorithm
        self._ready: tuple[WeightManifest, bytes, torch.Tensor] | None = None
        self._lock = threading.Lock()

    def ready(self) -> tuple[WeightManifest, bytes, torch.Tensor]:
        """Return the manifest, the same as bytes, and the flat run ([total_bytes] uint8) that it describes."""
        with self._lock:
            if self._ready is None:
                assert self._tensors is not None
                manifest = plan(self._tensors, self._bucket_bytes, self._algorithm)
                flat = pack(self._tensors, manifest)
                manifest = manifest.with_checksums(checksums(flat, manifest))
                self._ready = (manifest, manifest.to_bytes(), flat)
                self._tensors = None
            return self._ready
