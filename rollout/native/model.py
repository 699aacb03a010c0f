"""A Hugging Face causal language model for the native engine: prefill, decode one token, replace weights.

Promise: `replace` changes all weights or none, because `check` finds every fault before anything is written; and only
the positions that are sampled from reach the LM head. Axis suffixes: R rows, T tokens of a padded prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from paceline.errors import InvalidInput
from paceline.host.onednn import is_faster, product
from paceline.models.architectures import COUNTING_ATTENTION, MIXERS, check_architecture
from paceline.models.loading import fault_of_load
from paceline.models.pretrained import load_pretrained
from paceline.rollout.native.kv_cache import SlotCache
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
"""Model types that give every layer the window of their config, if it names one."""


class SlidingWindow(NamedTuple):
    """The last tokens that a token attends to, including itself, in all layers or in one kind of layer."""

    num_tokens: int
    in_every_layer: bool


class NativeModel:
    """The forward passes and the weights of a model. One thread calls its methods; `check` may run in another."""

    def __init__(
        self,
        module: Any,
        stop_token_ids: tuple[int, ...],
        max_tokens: int,
        adapter: AdapterSlot | None = None,
        *,
        window: SlidingWindow | None = None,
        float32_head: bool = False,
    ) -> None:
        self.module = module.eval().requires_grad_(False)
        self.stop_token_ids = stop_token_ids
        self.max_tokens = max_tokens
        """Longest sequence in tokens, prompt and completion together."""
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.vocab_size: int = module.get_input_embeddings().weight.shape[0]
        self._parameters: dict[str, Tensor] = module.state_dict()
        self._layout = WeightLayout.of(module)
        self._adapter = adapter
        self._window = window
        self._last_R: Tensor | None = None
        self._hidden_RTH: Tensor | None = None
        self._head = Float32Head(module.get_output_embeddings()) if float32_head else None
        module.get_output_embeddings().register_forward_pre_hook(self._keep_last)
        if is_faster(self.device, self.dtype):
            for layer in module.modules():
                # A quantized layer's weight is not a plain parameter, and torchao multiplies by it.
                if type(layer) is nn.Linear and layer.bias is None and type(layer.weight) is nn.Parameter:
                    layer.forward = partial(_linear, layer)

    def prefill(self, ids_RT: Tensor, lengths_R: Tensor, cache: SlotCache) -> Tensor:
        """Return [R, V] logits after the last token of each row of right-padded `ids_RT`; `cache.begin_prefill` must
        come before. No mask is needed: attention is causal, so no token attends to the padding on its right."""
        positions_1T = torch.arange(ids_RT.shape[1], device=self.device)[None]
        self._last_R = lengths_R - 1
        inputs = {"input_ids": ids_RT, "position_ids": positions_1T, "past_key_values": cache}
        try:
            output = self.module(**inputs, use_cache=True)
        finally:
            self._last_R = self._hidden_RTH = None
        return output.logits[:, 0]  # type: ignore[no-any-return]

    def decode(self, ids_R: Tensor, positions_R: Tensor, cache: SlotCache) -> Tensor:
        """Return [R, V] logits after one more token for each row; `cache.begin_decode` must come before."""
        output = self.module(
            input_ids=ids_R[:, None],
            attention_mask=self._decode_mask(cache),
            position_ids=positions_R[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def score(self, ids_RT: Tensor, lengths_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return [R, T] log-probabilities of right-padded `ids_RT` at temperature 1, the likeliest tokens and their
        log-probabilities; column 0 and the padding are meaningless. Raises InvalidInput for a model that changes the
        logits after its LM head (a scale, a soft cap): the head is applied to a few positions at a time, so that the
        logits of all of them are never in memory together."""
        self._last_R = lengths_R - 1
        try:
            output = self.module(input_ids=ids_RT, use_cache=False)
            hidden_RTH = self._hidden_RTH
        finally:
            self._last_R = self._hidden_RTH = None
        assert hidden_RTH is not None
        head = self.module.get_output_embeddings()
        rows_R = torch.arange(len(ids_RT), device=self.device)
        last_RV = head(hidden_RTH[rows_R, lengths_R - 1][:, None])[:, 0]
        if not torch.equal(last_RV, output.logits[:, 0]):
            raise InvalidInput(
                f"the model {type(self.module).__name__} changes its logits after the LM head, so the native engine cannot "
                "score given texts; use the vllm backend"
            )
        logprobs_RT = torch.zeros(ids_RT.shape, device=self.device)
        top_ids_RT = torch.zeros_like(ids_RT)
        tops_RT = torch.zeros_like(logprobs_RT)
        step = max(1, SCORED_LOGITS // (len(ids_RT) * self.vocab_size))
        for start in range(0, ids_RT.shape[1] - 1, step):
            after = slice(start + 1, min(start + step, ids_RT.shape[1] - 1) + 1)
            logits_RTV = head(hidden_RTH[:, start : after.stop - 1]).float()
            total_RT = logits_RTV.logsumexp(-1)
            chosen_RT = logits_RTV.gather(-1, ids_RT[:, after, None])[..., 0]
            best_RT, top_ids_RT[:, after] = logits_RTV.max(-1)
            logprobs_RT[:, after] = chosen_RT - total_RT
            tops_RT[:, after] = best_RT - total_RT
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

    def _decode_mask(self, cache: SlotCache) -> Tensor | dict[str, Tensor]:
        """Return a decode pass's mask, or one for each kind of layer if only some layers have a window."""
        if self._window is None:
            return cache.decode_mask(self.dtype)
        sliding = cache.decode_mask(self.dtype, self._window.num_tokens)
        if self._window.in_every_layer:
            return sliding
        return {"full_attention": cache.decode_mask(self.dtype), "sliding_attention": sliding}

    def _keep_last(self, _: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        # In front of the LM head, so that it works for every architecture, with scaled or soft-capped logits too.
        if self._last_R is None:
            return None
        self._hidden_RTH = inputs[0]
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
    if config.get_text_config().model_type in {**MIXERS, **COUNTING_ATTENTION}:
        raise InvalidInput(
            f"{FIELD} {policy.model_name!r}: the native engine does not run models of type {config.model_type!r}; use the "
            "vllm backend"
        )
    max_tokens = longest_sequence(policy, config)
    window = _window_of(config, max_tokens)
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
    return NativeModel(module, ends, max_tokens, slot, window=window, float32_head=policy.float32_head)


def _window_of(config: PreTrainedConfig, max_tokens: int) -> SlidingWindow | None:
    """Return the window of the layers that have one; None if no sequence is longer. Raises InvalidInput for a model
    type whose layers' windows are not known."""
    num_tokens = getattr(config, "sliding_window", None)
    kinds = config.to_dict().get("layer_types")
    if num_tokens is None or num_tokens >= max_tokens or (kinds and "sliding_attention" not in kinds):
        return None
    if not kinds and config.model_type not in WINDOW_IN_EVERY_LAYER:
        raise InvalidInput(
            f"the native engine does not know which layers of a {config.model_type} have the window of {num_tokens} tokens "
            f"that its config names (sequences have up to {max_tokens} tokens); use the vllm backend"
        )
    return SlidingWindow(num_tokens, in_every_layer=not kinds)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return the layer's product, by oneDNN if there are enough rows."""
    if x.numel() < ONEDNN_ROWS * layer.in_features:
        return nn.functional.linear(x, layer.weight)
    return product(x, layer.weight)


class Float32Head:
    """Replaces the forward of an LM head of a shorter type (`policy.float32_head`): products with its weights are
    summed in and rounded to float32, as the learner's. On a CPU it keeps a float32 copy of the weights."""

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
