"""The policy: a Hugging Face causal LM that turns packed rows into log-probabilities, sharded by FSDP2 over a mesh of
the ranks (`learner/model/mesh.py`).

Promise: parameters keep their Hugging Face names and float32 masters; the LM head runs inside the model's forward,
where FSDP has gathered it, and the full logits never exist. oneDNN's products, short norms and activation checkpointing
change no loss and no gradient; compiled layers change them only by rounding.

FSDP2 wraps each decoder layer and the root (final norm, LM head and, if they are tied or on CPUs, the embedding). A
single rank in float32 stays unwrapped: there is nothing to shard or to cast, no process group is needed, and the hooks
would cost about 3 ms an update and 2 ms for each further micro-batch (2 layers, CPU): a quarter of a step on 32 short
texts.

Compiled layers (`policy.compile`) leave attention out, because its calls depend on the lengths in the row; each layer
becomes one graph before attention and one after it, and all layers share both graphs. A row's length is dynamic from
the second length on, so a run compiles each graph twice, and again for passes without a gradient; rows are padded to
few different lengths, so that few graphs are compiled even if a graph cannot be dynamic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.functional import pad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from paceline.errors import InvalidInput
from paceline.files.bounded_cache import use_own_compiled_code
from paceline.host.onednn import is_faster, product
from paceline.learner.batch.samples import PackedBatch, SequenceLayout
from paceline.learner.collectives import world_size
from paceline.learner.model.adapter import add_adapter, set_dropout
from paceline.learner.model.attention import (
    IMPLEMENTATION,
    leave_out_of_graphs,
    prefer_flash_attention_3,
    requires_packed,
)
from paceline.learner.model.loading import fill
from paceline.learner.model.logprobs import chunked_logprobs
from paceline.learner.model.mesh import mesh_of
from paceline.learner.model.mixers import keep_sequences_apart
from paceline.models.architectures import MIXERS, check_architecture, check_positions
from paceline.models.loading import fault_of_load, resolved_dtype
from paceline.models.logits import LogitRule, body_of, logit_rule
from paceline.models.pretrained import check_weights, load_pretrained, skeleton
from paceline.models.weight_files import WeightFiles, model_files
from paceline.spec import PolicySection

FIELD = "policy.model_name"


def load_policy(policy: PolicySection, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """Return the model to train, with float32 masters, on `device`, sharded over the default process group, if any.

    With policy.lora_cfg the model is frozen and has an adapter with float32 masters, initialized from `seed`. A frozen
    model has the compute type if all its files have that type, because this loses nothing, else float32. Each rank
    reads only its rows of every tensor; its peak of host memory is its share of the model and some buffers. Raises
    InvalidInput if no such folder or hub name exists, if the architecture's forward cannot be packed, or if the weights
    are damaged or not of this model.
    """
    lora = policy.lora_cfg
    model, files = _build(policy, torch.float32, exact=compute_dtype(policy, device) if lora.enabled else None)
    if lora.enabled:
        add_adapter(model, lora, seed)
    return _prepared(model, files, policy, device)


def load_reward_model(policy: PolicySection, device: torch.device) -> PreTrainedModel:
    """Return the model as `load_policy` does, with a head of one score in place of the LM head (`rm`). A model that has
    such a head keeps it; otherwise the head's weights are drawn from torch's generator, so seed all ranks alike. Its
    forward returns (scores, zeros) instead of (log-probabilities, entropies). Raises the errors of `load_policy`, and
    InvalidInput for an architecture without sequence classification."""
    return _prepared(*_build(policy, torch.float32, scoring=True), policy, device)


def _prepared(model: Any, files: WeightFiles | None, policy: PolicySection, device: torch.device) -> PreTrainedModel:
    """Return the model ready to train on its device; compiled, with activation checkpointing, if the spec says so."""
    if policy.compile:
        compile_layers(_decoder_layers(model), device)
    recompute_activations(_decoder_layers(model), policy.activation_checkpointing)
    set_dropout(model, active=True)
    return _placed(model, files, policy, device, resharded=device.type == "cuda")


def load_reference(policy: PolicySection, device: torch.device) -> PreTrainedModel:
    """Return the model as it was before training, frozen, in the compute type: π_ref of a KL penalty, or a teacher."""
    model, files = _build(policy, compute_dtype(policy, device))
    model.requires_grad_(False)
    set_dropout(model, active=False)
    return _placed(model, files, policy, device, resharded=True)


def packed_logprobs(
    model: PreTrainedModel,
    packed: PackedBatch,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return ([N] log-probabilities of the completion tokens, [N] entropies), float32, in nats. Entropies have a
    gradient only with `entropy_gradient`."""
    logprobs_N, entropy_N = model(
        packed=packed, temperature=temperature, chunk_tokens=chunk_tokens, entropy_gradient=entropy_gradient
    )
    return logprobs_N, entropy_N


def compute_dtype(policy: PolicySection, device: torch.device) -> torch.dtype:
    """Return the type that `policy.precision` gives to the forward and backward passes."""
    dtype: torch.dtype = getattr(torch, resolved_dtype(policy.precision, device.type))
    return dtype


def published_dtype(policy: PolicySection, device: torch.device) -> torch.dtype:
    """Return the type of published weights: the sampler's. An adapter's type is float32, because an adapter is small
    and only its merge should round."""
    precision = "float32" if policy.lora_cfg.enabled else policy.generation_precision
    dtype: torch.dtype = getattr(torch, resolved_dtype(precision, device.type))
    return dtype


def _forward(
    model: Any,
    packed: PackedBatch,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
    *,
    policy: PolicySection,
    rule: LogitRule,
) -> tuple[Tensor, Tensor]:
    head = model.get_output_embeddings()
    states_NH = _predicting_states(model, packed, policy)
    return chunked_logprobs(
        states_NH.to(head.weight.dtype),  # some models add up the results of their layers in float32
        head.weight,
        packed.targets_N,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy_gradient=entropy_gradient,
        float32_head=policy.float32_head,
        bias_V=head.bias,
        scale=rule.scale,
        cap=rule.cap,
    )


def _score(model: Any, packed: PackedBatch, *, policy: PolicySection, **_: Any) -> tuple[Tensor, Tensor]:
    """Return the score at each position where a policy would predict a token."""
    # Cloned, because FSDP's hooks on a view are lost with the first operation in place.
    scores_N = model.score(_predicting_states(model, packed, policy)).float()[:, 0].clone()
    return scores_N, torch.zeros_like(scores_N)


def _predicting_states(model: Any, packed: PackedBatch, policy: PolicySection) -> Tensor:
    row = padded_row(packed) if policy.compile else packed
    model.row_layout = row.layout  # for layers that carry a state
    with requires_packed(model):
        hidden_1RH = body_of(model)(
            input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False, layout=row.layout
        ).last_hidden_state
    return hidden_1RH[0].index_select(0, packed.predictors_N)  # type: ignore[no-any-return]


def _build(
    policy: PolicySection, dtype: torch.dtype, *, exact: torch.dtype | None = None, scoring: bool = False
) -> tuple[PreTrainedModel, WeightFiles | None]:
    """Return the modules of a model, on the meta device and with this package's forward, and the files with their
    weights. If only transformers can read the files (quantized), return the whole model and None. Parameters have
    type `dtype`, or `exact` if the files have only that type."""
    name = policy.model_name
    try:
        files: WeightFiles | None
        source, files = model_files(name, FIELD)
        options: dict[str, Any] = {"num_labels": 1} if scoring else {}
        config = AutoConfig.from_pretrained(source, **options)
        check_architecture(config.to_dict(), f"{FIELD} {name!r}")
        check_positions(config.to_dict(), f"{FIELD} {name!r}", policy.max_total_sequence_length)
        kind: Any = AutoModelForSequenceClassification if scoring else AutoModelForCausalLM
        model: Any
        options["attn_implementation"] = IMPLEMENTATION
        if getattr(config, "quantization_config", None) is not None:
            files.__exit__()
            files = None
            model = load_pretrained(kind, name, FIELD, dtype=dtype, **options)
        else:
            dtype = exact if exact is not None and files.holds_only(exact) else dtype
            model = skeleton(kind, config, dtype=dtype, attn_implementation=IMPLEMENTATION)
            begins = scoring and not any("ForSequenceClass" in kind for kind in config.architectures or ())
            check_weights(model, files, f"{FIELD} {name!r}", begins=begins)
    except Exception as error:
        fault = fault_of_load(FIELD, name, error)
        if fault is None:
            raise
        raise fault from error
    if getattr(model.config, "quantization_config", None) is not None:  # removed if loading made plain weights
        raise InvalidInput(
            f"{FIELD} {name!r}: its weights are quantized (quantization_config in config.json), which the learner can neither "
            "train nor shard; name its 16-bit or 32-bit version"
        )
    head = getattr(model, "score", None) if scoring else model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise InvalidInput(
            f"policy.model_name {name!r}: its head is a {type(head).__name__}, but the learner needs a linear layer; name "
            "another model"
        )
    if not (model._supports_attention_backend or config.get_text_config().model_type in MIXERS):
        raise InvalidInput(
            f"policy.model_name {name!r}: transformers has no replaceable attention for models of type "
            f"{config.model_type!r}; name a model of another type"
        )
    keep_sequences_apart(model, _decoder_layers(model))
    # An instance attribute: FSDP's hooks run around it, as around any forward, so the LM head is gathered inside it.
    if scoring:
        model.forward = partial(_score, model, policy=policy)
    else:
        model.forward = partial(_forward, model, policy=policy, rule=logit_rule(model, f"{FIELD} {name!r}"))
    return model, files


def _placed(
    model: Any, files: WeightFiles | None, policy: PolicySection, device: torch.device, resharded: bool
) -> PreTrainedModel:
    """Return the model on the device, with its weights; sharded if that has an effect."""
    prefer_flash_attention_3(device, deterministic=policy.deterministic)
    if not policy.compile:
        use_onednn_linear(model, device, compute_dtype(policy, device))
        use_short_norms(model, device)
    sharded = world_size() > 1 or compute_dtype(policy, device) != torch.float32 or _offloads(policy, device)
    if sharded:
        _shard(model, policy, device, resharded)
    if files is not None:
        with files:
            target = torch.device("cpu") if sharded and _offloads(policy, device) else device
            fill(model, files, target, f"{FIELD} {policy.model_name!r}", device)
    return model if sharded else model.to(device)  # type: ignore[no-any-return]


def _shard(model: Any, policy: PolicySection, device: torch.device, resharded: bool) -> None:
    options: dict[str, Any] = {
        "mesh": mesh_of(policy, device),
        "reshard_after_forward": resharded,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype(policy, device), reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if _offloads(policy, device) else OffloadPolicy(),
    }
    for layer in reversed(_decoder_layers(model)):  # a layer in another one comes first
        fully_shard(layer, **options)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if resharded and head is not None and embedding.weight is not head.weight:
        # In one unit with the head, the embedding would stay gathered, because the loss reads the head in the root.
        fully_shard(embedding, **options)
    fully_shard(model, **options)


def _decoder_layers(model: Any) -> list[Any]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _offloads(policy: PolicySection, device: torch.device) -> bool:
    """Return whether parameters go to host memory (policy.cpu_offload). False on a CPU, which has no other memory."""
    return policy.cpu_offload and device.type == "cuda"


def use_onednn_linear(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give every float32 `nn.Linear` of the model a forward through oneDNN, if that is faster on this machine."""
    if not is_faster(device, dtype):
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    # Inputs or weights may have been cast after loading; oneDNN has kernels of other types on few CPUs.
    if not inputs.dtype == module.weight.dtype == torch.float32:
        return nn.functional.linear(inputs, module.weight, module.bias)
    out: Tensor = _OneDnnProduct.apply(inputs, module.weight)  # type: ignore[no-untyped-call]
    return out if module.bias is None else out + module.bias


class _OneDnnProduct(torch.autograd.Function):
    """Product y = x·Wᵀ with ∂x = g·W and ∂W = gᵀ·x, each by the same kernel."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight_OI)
        out = product(inputs, weight_OI)
        # The same numbers, but not as a view, which the model could not change in place.
        return inputs.new_empty(0).set_(out.untyped_storage(), out.storage_offset(), out.size(), out.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weight_OI = ctx.saved_tensors
        (grad,) = grads
        grad_inputs = product(grad, weight_OI.T) if ctx.needs_input_grad[0] else None
        grad_weight_OI = None
        if ctx.needs_input_grad[1]:
            grad_weight_OI = _outer(grad.flatten(0, -2), inputs.flatten(0, -2))
        return grad_inputs, grad_weight_OI


def _outer(left_NO: Tensor, right_NI: Tensor) -> Tensor:
    """Return [O, I] leftᵀ·right, the narrower operand first: the kernel copies a transposed operand only there."""
    if left_NO.shape[1] > right_NI.shape[1]:
        return product(right_NI.T, left_NO.T).T
    return product(left_NO.T, right_NI.T)


def use_short_norms(model: nn.Module, device: torch.device) -> None:
    """If the model is on a CPU, give its RMSNorms a forward with fewer passes, as far as they compute as Llama's
    does."""
    code = LlamaRMSNorm.forward.__code__
    for module in model.modules() if device.type == "cpu" else ():
        own = getattr(type(module).forward, "__code__", code.replace(co_code=b""))
        if (own.co_code, own.co_consts, own.co_names) == (code.co_code, code.co_consts, code.co_names):
            module.forward = partial(_norm, module)


def _norm(module: Any, inputs: Tensor) -> Tensor:
    if not inputs.dtype == module.weight.dtype == torch.float32:
        return type(module).forward(module, inputs)  # type: ignore[no-any-return]
    out: Tensor = _ShortNorm.apply(inputs, inputs, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


class _ShortNorm(torch.autograd.Function):
    """y = w·x/√(mean x² + ε), with the arithmetic of transformers, but intermediate results overwrite each other. `x`
    is passed twice, so that autograd adds the two parts of ∂x to a residual's gradient in its own order, and all
    gradients are equal bit by bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        scale = x.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt()
        ctx.save_for_backward(x, weight_H, scale)
        return (x * scale).mul_(weight_H)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H, scale = ctx.saved_tensors
        (grad,) = grads
        normal = x * scale
        # Autograd's product has the gradient's strides, on which its sums depend.
        work = torch.mul(grad, normal, out=normal if normal.stride() == grad.stride() else None)
        grad_weight_H = work.sum_to_size(weight_H.shape) if ctx.needs_input_grad[2] else None
        direct = grad * weight_H
        through_scale = torch.mul(direct, x, out=work).sum(-1, keepdim=True).mul_(-0.5).mul_(scale.pow(3))
        through_mean = torch.mul(x, through_scale.div_(x.shape[-1]).mul_(2), out=work)
        return direct.mul_(scale), through_mean, grad_weight_H, None


KEPT_OPERATIONS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm"),
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "mkldnn::_linear_pointwise",
        "torch_attn::_varlen_attn",
    }
)
"""Operations whose results `selective` checkpointing keeps, by their names in the dispatcher."""


def recompute_activations(layers: Iterable[torch.nn.Module], how: str) -> None:
    """Give the layers a forward that keeps less for the backward pass (Chen et al. 2016, arXiv 1604.06174). `how` is
    `policy.activation_checkpointing`: `full` (and `auto`, which is replaced when a run is submitted) keeps the input
    of a layer; `selective` also keeps the results of matrix products and attention, and recomputes the rest."""
    if how == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_or_recompute)
    for layer in layers:
        # Around the layer's forward, so that FSDP's hooks stay outside and do not run again in the recomputation.
        layer.forward = partial(checkpoint, layer.forward, **options)


def _keep_or_recompute(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    schema = getattr(operation, "_schema", None)
    if schema is not None and schema.name in KEPT_OPERATIONS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


ROW_MULTIPLE = 128
"""Rows are padded to multiples of this many tokens."""
COMPILED_VARIANTS = 64
"""Most compiled variants of one layer's code; further ones run in torch's eager mode. Variants differ in the kind of
attention, in having gradients or not, and in the length of rows if it is not dynamic."""


def compile_layers(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Compile the forward of each layer at its first call. Raises InvalidInput if this machine cannot compile."""
    _require_compiler(device)
    use_own_compiled_code()
    leave_out_of_graphs()
    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, COMPILED_VARIANTS)
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


def padded_row(packed: PackedBatch) -> PackedBatch:
    """Return the batch with tokens, positions and layout padded to a multiple of ROW_MULTIPLE by a separate sequence at
    the row's end: no other token attends to the padding, and no loss reads it."""
    extra = -packed.input_ids.shape[1] % ROW_MULTIPLE
    if extra == 0:
        return packed
    device = packed.input_ids.device
    positions_E = torch.arange(extra, device=device)
    return dataclasses.replace(
        packed,
        input_ids=pad(packed.input_ids, (0, extra)),
        position_ids=torch.cat((packed.position_ids, positions_E[None]), dim=1),
        layout=_with_sequence(packed.layout, extra),
    )


def _with_sequence(layout: SequenceLayout, length: int) -> SequenceLayout:
    end: Tensor = layout.starts[-1:] + length
    return dataclasses.replace(
        layout,
        runs=(*layout.runs, (1, length)),
        starts=torch.cat((layout.starts, end)),
        max_length=max(layout.max_length, length),
    )


def _require_compiler(device: torch.device) -> None:
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise InvalidInput(
                "policy.compile is true, but Triton, which torch.compile needs on GPUs, does not work on this machine; "
                "install the triton package that belongs to this torch, or set policy.compile to false"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise InvalidInput(
            "policy.compile is true, but torch.compile finds no C++ compiler, which it needs on CPUs; install g++ (or "
            "name one in the environment variable CXX), or set policy.compile to false"
        ) from None
