"""Finds how a model of transformers turns the results of its LM head into logits: as they are, scaled, or soft-capped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import InvalidInput, first_line

if TYPE_CHECKING:
    from torch import Tensor

CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Keys of a config that name a soft cap of logits."""


class LogitRule(NamedTuple):
    """logits = cap · tanh(scale · x / cap), or scale · x without a cap; x are the results of the LM head."""

    scale: float = 1.0
    cap: float | None = None

    def logits(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        return scaled if self.cap is None else (scaled / self.cap).tanh() * self.cap


def body_of(model: Any) -> Any:
    """Return the model below the head of a causal LM or of a sequence classifier."""
    body = model.base_model
    return body if body is not model else model.model  # Llama 4 has another prefix


class _Body:
    """Stands for the model below the head: it returns `hidden`, and has the attributes of the real one."""

    def __init__(self, hidden: Tensor, real: Any) -> None:
        self._output, self._real = _Output((hidden,)), real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._output


class _Output(tuple[Any]):
    """An output of transformers: hidden states, and None for everything else."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]  # type: ignore[no-any-return]

    def __getattr__(self, _: str) -> None:
        return None


class _Head:
    """Stands for the LM head; some models cast its input to the type of its weight."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden


def logit_rule(model: Any, what: str) -> LogitRule:
    """Return the rule of a causal LM. The model's own forward runs over chosen hidden states, with the identity as
    head, so no weight is read. `what` names the model in messages. Raises InvalidInput if the model follows no such
    rule."""
    import torch

    config = model.config.get_text_config()
    x = torch.linspace(-30.0, 30.0, config.hidden_size)
    parts, body, head = model._modules, body_of(model), model.get_output_embeddings()
    names = {name: part for name, part in parts.items() if part is body or part is head}
    try:
        for name, part in names.items():
            parts[name] = _Body(x[None, None], body) if part is body else _Head(x)
        with torch.no_grad():
            ids = torch.zeros(1, 1, dtype=torch.int64)
            logits = type(model).forward(model, input_ids=ids, use_cache=False).logits
        y = logits.flatten().float()
    except Exception as error:  # a forward that needs more than this: its logits cannot be known
        y, said = x.new_full(x.shape, torch.nan), f": {first_line(error)}"
    else:
        said = ""
    finally:
        parts.update(names)
    if len(names) == 2 and y.shape == x.shape:
        caps = [cap for key in CAPS if isinstance(cap := getattr(config, key, None), int | float)]
        for cap in (None, *caps):
            middle = y[len(y) // 2] if cap is None else cap * (y[len(y) // 2] / cap).atanh()
            scale = float(f"{float(middle / x[len(x) // 2]):.6g}")
            if torch.allclose(LogitRule(scale, cap).logits(x), y, rtol=1e-5, atol=1e-5):
                return LogitRule(_exact(model, scale), cap)
    raise InvalidInput(
        f"{what}: the logits of a {type(model).__name__} do not follow from its LM head by a known rule (a scale, a "
        f"soft cap){said}; name a model of another type"
    )


def _exact(model: Any, scale: float) -> float:
    """Return the number of the config that is nearest to a measured scale or its inverse, with all its digits."""
    config = model.config.get_text_config().to_dict()
    numbers = [float(value) for value in config.values() if type(value) in (int, float) and value]
    for number in (1.0, *numbers, *(1 / each for each in numbers)):
        if abs(number - scale) <= 2e-6 * abs(scale):
            return number
    return scale
