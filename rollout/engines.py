"""Creates the engine that a run samples with."""

from __future__ import annotations

import importlib.util

from paceline.rollout.engine import Engine
from paceline.spec import RunSpec


def create_engine(spec: RunSpec, *, device: str = "cpu", load_weights: bool = False) -> Engine:
    """Return the engine that `policy.generation.backend` names, for the model in `policy`, on `device`. With
    `load_weights` the weights of `policy.model_name` serve as Version(0, 0). Without `load_weights` only the structure
    of the model is read, and `generate` raises until `update_weights` was called. An adapter's base is always read.
    `auto`, which is replaced when a run is submitted, is vLLM on a GPU if it is installed."""
    backend = spec.policy.generation.backend
    if backend == "auto":
        has_vllm = importlib.util.find_spec("vllm") is not None
        backend = "vllm" if device.startswith("cuda") and has_vllm else "native"
    if backend == "native":
        from paceline.rollout.native.engine import NativeEngine

        return NativeEngine(spec, device=device, load_weights=load_weights)
    if backend == "vllm":
        from paceline.rollout.vllm.arguments import require_vllm

        require_vllm()
        from paceline.rollout.vllm.engine import VllmEngine

        return VllmEngine(spec, device=device, load_weights=load_weights)
    raise ValueError(f"unknown policy.generation.backend {backend!r}")
