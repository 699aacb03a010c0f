"""A Hugging Face causal language model for the native engine: prefill, decode one token, replace weights.

Promise: `replace` changes all weights or none, because `check` finds every fault before anything is written; and only
the positions that are sampled from reach the LM head. Axis suffixes: R rows, T tokens of a padded prompt, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers import __version__ as transformers_version
from transformers.cache_utils import Cache
from transformers.initialization import no_init_weights

from paceline.errors import InvalidInput
from paceline.host.onednn import is_faster, product
from paceline.models.architectures import check_architecture
from paceline.models.loading import fault_of_load
from paceline.models.pretrained import load_pretrained
from paceline.rollout.native.kv_cache import AttentionLimit, SlotCache
from paceline.spec import PolicySection
from paceline.weights.model_layout import (
    AdapterSlot,
    WeightLayout,
    end_token_ids,
    generation_dtype,
    longest_sequence,
    read_config,
)

FIELD = "policy.model_name"
ONEDNN_ROWS = 32
"""oneDNN is faster for a product with at least this many rows."""
SCORED_LOGITS = 1 << 26
"""Number of float32 logits that scoring holds at a time."""
WINDOW_IN_EVERY_LAYER = frozenset({"mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"})
"""Model types that give every layer with attention the window of their config, if it names one."""
UNLIMITED = (0.0, math.inf)
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
STATE_KINDS = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of layers with states; a `hybrid` layer has full attention too."""
KINDS = STATE_KINDS | {FULL, SLIDING, CHUNKED, "mlp", "moe"}


class NativeModel:
    """The forward passes and the weights of a model. One thread calls its methods; `check` may run in another."""

    def __init__(
        self,
        module: Any,
        stop_token_ids: tuple[int, ...],
        max_tokens: int,
        adapter: AdapterSlot | None = None,
        *,
        float32_head: bool = False,
    ) -> None:
        self.module = module.eval().requires_grad_(False)
        self.has_states = bool(_kinds_of(module.config) & STATE_KINDS)
        """True if layers have states; a prefill then takes only prompts of equal length."""
        self.stop_token_ids = stop_token_ids
        self.max_tokens = max_tokens
        """Longest sequence in tokens, prompt and completion together."""
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.vocab_size: int = module.get_input_embeddings().weight.shape[0]
        self._parameters: dict[str, Tensor] = module.state_dict()
        self._layout = WeightLayout.of(module)
        self._adapter = adapter
        self._limits = _limits_of(module.config, max_tokens)
        parameters = inspect.signature(module.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache_params"
        self._last_R: Tensor | None = None
        self._decoded_R: Tensor | None = None
        self._blocks = [layer for layer in module.modules() if hasattr(layer, "conv1d_state")]
        """Blocks of RecurrentGemma, which keep their states themselves."""
        self._head = Float32Head(module.get_output_embeddings()) if float32_head else None
        module.get_output_embeddings().register_forward_pre_hook(self._keep_last)
        for layer in module.modules():
            if getattr(layer, "attn_temperature_tuning", False) and not layer.use_rope:
                layer.q_proj.register_forward_hook(partial(self._scale_queries, layer))
            if getattr(layer, "time_step_limit", UNLIMITED) != UNLIMITED:
                limits = [_inverse_softplus(step) for step in layer.time_step_limit]
                layer.in_proj.register_forward_hook(partial(self._clamp_time_steps, layer, limits))
        if is_faster(self.device, self.dtype):
            for layer in module.modules():
                # A quantized layer's weight is not a plain parameter, and torchao multiplies by it.
                if type(layer) is nn.Linear and layer.bias is None and type(layer.weight) is nn.Parameter:
                    layer.forward = partial(_linear, layer)

    def prefill(self, ids_RT: Tensor, lengths_R: Tensor, cache: SlotCache) -> Tensor:
        """Return [R, V] logits after the last token of each row of right-padded `ids_RT`; `cache.begin_prefill` must
        come before. No mask is needed: attention is causal, so no token attends to the padding on its right. With
        `has_states` there must be no padding, because it would change the states."""
        positions_1T = torch.arange(ids_RT.shape[1], device=self.device)[None]
        self._last_R = lengths_R - 1
        try:
            return self._logits(ids_RT, positions_1T, cache)[:, 0]
        finally:
            self._last_R = None

    def decode(self, ids_R: Tensor, positions_R: Tensor, cache: SlotCache) -> Tensor:
        """Return [R, V] logits after one more token for each row; `cache.begin_decode` must come before."""
        self._decoded_R = positions_R
        try:
            return self._logits(ids_R[:, None], positions_R[:, None], cache, self._decode_mask(cache))[:, -1]
        finally:
            self._decoded_R = None

    def score(self, ids_RT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return [R, T] log-probabilities of right-padded `ids_RT` at temperature 1, the likeliest tokens and their
        log-probabilities; column 0 and the padding are meaningless. The head, with any scale or soft cap after it, is
        applied to a few positions at a time, so that the logits of all positions are never in memory together."""
        body = self.module.get_decoder()
        if body is self.module:  # Llama 4 does not name it
            body = self.module.model
        output = body(input_ids=ids_RT, use_cache=False)
        hidden_RTH = output.last_hidden_state
        logprobs_RT = torch.zeros(ids_RT.shape, device=self.device)
        top_ids_RT = torch.zeros_like(ids_RT)
        tops_RT = torch.zeros_like(logprobs_RT)
        step = max(1, SCORED_LOGITS // (len(ids_RT) * self.vocab_size))
        body.forward = lambda *_, **__: output
        try:
            for start in range(0, ids_RT.shape[1] - 1, step):
                after = slice(start + 1, min(start + step, ids_RT.shape[1] - 1) + 1)
                output.last_hidden_state = hidden_RTH[:, start : after.stop - 1]
                logits_RTV = self.module(input_ids=ids_RT[:, start : after.stop - 1], use_cache=False).logits.float()
                total_RT = logits_RTV.logsumexp(-1)
                chosen_RT = logits_RTV.gather(-1, ids_RT[:, after, None])[..., 0]
                best_RT, top_ids_RT[:, after] = logits_RTV.max(-1)
                logprobs_RT[:, after] = chosen_RT - total_RT
                tops_RT[:, after] = best_RT - total_RT
        finally:
            del body.forward
        return logprobs_RT, top_ids_RT, tops_RT

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise InvalidInput if `weights` (an adapter if the run trains one) do not fit, see `WeightLayout.check`."""
        if self._adapter is not None:
            self._adapter.check(weights)
        else:
            self._layout.check(weights)

    def replace(self, weights: Mapping[str, Tensor]) -> None:
        """Copy checked `weights` over the model's tensors, in place and in the model's type."""
        with torch.no_grad():
            if self._adapter is not None:
                self._adapter.replace(weights)
            else:
                for names in self._layout.tied:
                    name = next(name for name in names if name in weights)
                    self._parameters[name].copy_(weights[name], non_blocking=True)
            if self._head is not None:
                self._head.refresh()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the device has finished its work, so that a pause can be measured."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _logits(self, ids_RT: Tensor, positions: Tensor, cache: SlotCache, mask: Any = None) -> Tensor:
        """Return the logits of a prefill or decode pass."""
        for index, layer in enumerate(self._blocks):
            layer.rg_lru.recurrent_states = cache.get_recurrent_state(index)
            layer.conv1d_state = cache.get_recurrent_state(index, 1)
        inputs: dict[str, Any] = {self._cache_name: cache}
        if self._limits:
            inputs |= {"attention_mask": mask, "position_ids": positions}
        output = self.module(input_ids=ids_RT, use_cache=True, **inputs)
        for index, layer in enumerate(self._blocks):
            cache.update_recurrent_state(layer.rg_lru.recurrent_states, index)
            cache.update_recurrent_state(layer.conv1d_state, index, 1)
        return output.logits  # type: ignore[no-any-return]

    def _decode_mask(self, cache: SlotCache) -> Tensor | dict[str, Tensor | None] | None:
        """Return a decode pass's mask, or one for each kind of layer if these differ; None without attention."""
        masks = {kind: cache.decode_mask(self.dtype, limit) for kind, limit in self._limits.items()}
        return {**dict.fromkeys(STATE_KINDS), **masks} if len(masks) > 1 else next(iter(masks.values()), None)

    def _scale_queries(self, layer: Any, _: Any, __: Any, queries: Tensor) -> Tensor | None:
        # Llama 4 scales queries by the length of the cache. Here rows differ in length and its scale is 1, so scale by
        # row.
        if self._decoded_R is None:
            return None
        steps_R = torch.floor((self._decoded_R.float() + 1) / layer.floor_scale)
        scales_R = torch.log1p(steps_R) * layer.attn_scale + 1
        scaled: Tensor = queries * scales_R[:, None, None]
        return scaled.to(queries.dtype)

    def _clamp_time_steps(self, layer: Any, limits: list[float], _: Any, __: Any, projected: Tensor) -> Tensor | None:
        # Mamba 2 clamps its time steps, softplus(x + bias), in a prefill but not in a decode pass.
        if self._decoded_R is None:
            return None
        low_M, high_M = (limit - layer.dt_bias.float() for limit in limits)
        scale = getattr(layer, "mup_vector", None)  # in Falcon-H1
        if scale is not None:
            low_M, high_M = (each_M / scale[0, 0, -layer.num_heads :] for each_M in (low_M, high_M))
        others, steps = projected[..., : -layer.num_heads], projected[..., -layer.num_heads :]
        return torch.cat((others, steps.float().clamp(low_M, high_M).to(steps.dtype)), -1)

    def _keep_last(self, _: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        # In front of the LM head, so that it works for every architecture, with scaled or soft-capped logits too.
        if self._last_R is None:
            return None
        rows_R = torch.arange(len(self._last_R), device=self.device)
        return (inputs[0][rows_R, self._last_R][:, None], *inputs[1:])


def load_native_model(policy: PolicySection, device: str, load_weights: bool) -> NativeModel:
    """Return the model that `policy.model_name` describes. Without `load_weights` its memory is not initialised, unless
    the run trains an adapter: the base is then loaded here. Raises InvalidInput for files that cannot be loaded, or an
    architecture that is not supported."""
    try:
        return _load(policy, device, load_weights)
    except Exception as error:
        fault = fault_of_load(FIELD, policy.model_name, error)
        if fault is None:
            raise
        raise fault from error


def _load(policy: PolicySection, device: str, load_weights: bool) -> NativeModel:
    config = read_config(policy)
    check_architecture(config.to_dict(), f"{FIELD} {policy.model_name!r}")
    max_tokens = longest_sequence(policy, config)
    _refuse_unknown_states(config)
    _limits_of(config, max_tokens)
    dtype = generation_dtype(policy, device)
    auto: Any = AutoModelForCausalLM
    lora = policy.lora_cfg
    if load_weights or lora.enabled:
        module = load_pretrained(auto, policy.model_name, FIELD, dtype=dtype).to(device)
    else:
        with torch.device(device), no_init_weights():
            module = auto.from_config(config, dtype=dtype)
        module.tie_weights()
    slot = AdapterSlot(module, lora) if lora.enabled else None
    ends = end_token_ids(policy, config, module.generation_config)
    return NativeModel(module, ends, max_tokens, slot, float32_head=policy.float32_head)


def _kinds_of(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of a model's layers; empty if its config does not list them."""
    return set(getattr(config.get_text_config(), "layer_types", None) or ())


def _limits_of(config: PreTrainedConfig, max_tokens: int) -> dict[str, AttentionLimit | None]:
    """Return the limit of each kind of attention in a model; one entry if it applies to all layers, empty without
    attention. Limits that no sequence reaches are left out. Raises InvalidInput for layers that are not known."""
    kinds = _kinds_of(config)
    if kinds - KINDS:
        raise _refusal(config, f"has layers of the kind {', '.join(sorted(kinds - KINDS))}")
    text = config.get_text_config()
    window, chunk = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
    limits: dict[str, AttentionLimit | None] = {}
    if not kinds or kinds & {FULL, "hybrid"}:
        limits[FULL] = None
    for kind, size in ((SLIDING, window), (CHUNKED, chunk)):
        if kind in kinds:
            if size is not None and size < max_tokens:
                limits[kind] = AttentionLimit(size, in_chunks=kind == CHUNKED)
            else:
                limits[FULL] = None
    if window is not None and window < max_tokens and SLIDING not in kinds:
        if text.model_type in WINDOW_IN_EVERY_LAYER:
            return {SLIDING: AttentionLimit(window)}
        if not kinds:
            raise _refusal(
                config,
                f"does not say which layers have its window of {window} tokens (sequences have up to {max_tokens})",
            )
    return limits


def _refuse_unknown_states(config: PreTrainedConfig) -> None:
    """Raise InvalidInput for a model with states that the engine cannot keep."""
    has_states = bool(_kinds_of(config) & STATE_KINDS)
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if getattr(model_class, "_is_stateful", False) and not has_states:
        raise _refusal(config, "keeps states in a form that this engine does not know")
    if has_states and not hasattr(Cache, "get_conv_state"):
        raise _refusal(
            config,
            f"has states that transformers {transformers_version} does not give to the engine",
            "transformers 5.23",
        )


def _refusal(config: PreTrainedConfig, reason: str, remedy: str = "the vllm backend") -> InvalidInput:
    return InvalidInput(f"the native engine cannot run a {config.model_type}, which {reason}; use {remedy}")


def _inverse_softplus(value: float) -> float:
    return value + math.log(-math.expm1(-value)) if value > 0 else -math.inf


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return the layer's product, by oneDNN if there are enough rows."""
    if x.numel() < ONEDNN_ROWS * layer.in_features:
        return nn.functional.linear(x, layer.weight)
    return product(x, layer.weight)


class Float32Head:
    """Replaces the forward of an LM head of a shorter type (`policy.float32_head`): products with its weights are
    summed in and rounded to float32, as the learner's products are. On a CPU it keeps a float32 copy of the weights."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self._copy_VH: Tensor | None = None
        if head.weight.dtype != torch.float32:
            head.forward = self._logits

    def refresh(self) -> None:
        """Update the copy from changed weights."""
        self._copy_VH = None

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return [..., V] float32 logits of [..., H] hidden states."""
        weight_VH: Tensor = self._head.weight
        bias_V = None if self._head.bias is None else self._head.bias.float()
        if hidden.is_cuda:
            flat_NV = torch.mm(hidden.flatten(0, -2), weight_VH.T, out_dtype=torch.float32)
            logits: Tensor = flat_NV.view(*hidden.shape[:-1], -1)
            return logits if bias_V is None else logits + bias_V
        if self._copy_VH is None:
            self._copy_VH = weight_VH.float()
        return torch.nn.functional.linear(hidden.float(), self._copy_VH, bias_V)
