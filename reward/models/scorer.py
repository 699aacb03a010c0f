"""Scores texts with a classification model, in passes of a token budget.

Promise: a text's score is that of transformers' own forward pass on this text alone, up to the rounding of its type. A
text that is longer than the model reads has no score.

Suffixes: N texts of a pass, T tokens of the longest, L outputs of the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from paceline.chat.completion_texts import message_text
from paceline.data.tokens import (
    check_vocabulary,
    encode_continuation,
    encode_for_scoring,
    encode_prompt,
    padding_token_id,
)
from paceline.errors import InvalidInput, Unreadable
from paceline.files.model_source import model_source
from paceline.files.storage import Folder, is_url
from paceline.files.whole_file import stamp
from paceline.models.loading import fault_of_load, resolved_dtype
from paceline.models.pretrained import load_pretrained
from paceline.reward.models.settings import ModelSettings, ProcessModelSettings

UNBOUNDED = 1 << 30


class Scorer:
    """A loaded model and the conversion of its outputs to scores. `max_tokens`: length of the longest text that the
    model reads."""

    def __init__(self, settings: ModelSettings, model: Any, tokenizer: Any, version: str, max_tokens: int) -> None:
        self._settings, self._model, self._tokenizer = settings, model, tokenizer
        self._max_tokens, self.version = max_tokens, version
        self._texts = TextEncoder(settings, tokenizer)

    def encode(self, prompt: Any, completion: Any) -> Text:
        """Return the tokens of a prompt with its completion. Raises InvalidInput if they cannot be rendered."""
        return self._texts.encode(prompt, completion)

    def scores(
        self, texts: Sequence[Text], ran: Callable[[int], None] = lambda texts: None
    ) -> list[list[float] | None]:
        """Return each text's scores: one, or one for each step; None for a text that is too long.

        `ran` is called with the texts of each pass. Raises InvalidInput for a score that is not finite, torch's errors.
        """
        found: list[list[float] | None] = [None] * len(texts)
        fitting = [index for index, text in enumerate(texts) if len(text.ids) <= self._max_tokens]
        with torch.inference_mode():
            for chosen in passes([len(texts[i].ids) for i in fitting], self._settings.max_batch_tokens):
                indices = [fitting[position] for position in chosen]
                for index, values in zip(indices, self._pass([texts[i] for i in indices]), strict=True):
                    if not all(map(math.isfinite, values)):
                        raise InvalidInput(f"the model {self._settings.path!r} gives a score that is not finite")
                    found[index] = values
                ran(len(indices))
        return found

    def _pass(self, texts: Sequence[Text]) -> list[list[float]]:
        longest = max(len(text.ids) for text in texts)
        ids_NT = torch.full((len(texts), longest), padding_token_id(self._tokenizer))
        mask_NT = torch.zeros(len(texts), longest, dtype=torch.int64)
        for row, text in enumerate(texts):
            ids_NT[row, : len(text.ids)] = torch.tensor(text.ids)
            mask_NT[row, : len(text.ids)] = 1
        device = self._model.device
        logits = self._model(input_ids=ids_NT.to(device), attention_mask=mask_NT.to(device)).logits
        settings = self._settings
        if not isinstance(settings, ProcessModelSettings):
            return [[score] for score in logits[:, 0].float().tolist()]
        return [chances_at_steps(logits[row, text.places].float(), settings) for row, text in enumerate(texts)]


def chances_at_steps(logits_SL: torch.Tensor, settings: ProcessModelSettings) -> list[float]:
    """Return [S] probabilities that the steps are right, from the outputs at their ends."""
    if logits_SL.shape[-1] == 1:
        chances: list[float] = logits_SL[:, 0].sigmoid().tolist()
    else:
        chances = logits_SL.softmax(-1)[:, settings.positive_label].tolist()
    return chances


def load_scorer(settings: ModelSettings) -> Scorer:
    """Load the current model. Raises InvalidInput for another kind or damaged files, Unreadable for missing files or
    devices."""
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
    )

    by_step = isinstance(settings, ProcessModelSettings)
    device = device_of(settings)
    source, version = fetched(settings.path)
    try:
        config = AutoConfig.from_pretrained(source)
        check_kind(settings, config)
        tokenizer = AutoTokenizer.from_pretrained(source)
        kind = AutoModelForTokenClassification if by_step else AutoModelForSequenceClassification
        dtype = getattr(torch, resolved_dtype(settings.precision, device.type))
        model = load_pretrained(kind, settings.path, "reward model", dtype=dtype, source=source)
    except Exception as error:
        fault = fault_of_load("reward model", settings.path, error)
        if fault is None:
            raise
        raise fault from None
    check_separator(settings, tokenizer)
    rows = len(model.get_input_embeddings().weight)
    check_vocabulary(tokenizer, rows, f"reward model {settings.path!r}")
    model.requires_grad_(False).eval().config.pad_token_id = padding_token_id(tokenizer)
    return Scorer(settings, model.to(device), tokenizer, version, longest_text(config))


def longest_text(config: Any) -> int:
    return getattr(config.get_text_config(), "max_position_embeddings", None) or UNBOUNDED


def check_separator(settings: ModelSettings, tokenizer: Any) -> None:
    """Raise InvalidInput for a separator of steps that has no token."""
    if isinstance(settings, ProcessModelSettings):
        separator = settings.step_separator
        if not tokenizer(separator, add_special_tokens=False)["input_ids"]:
            raise InvalidInput(f"step_separator {separator!r} has no token in the model's tokenizer")


def device_of(settings: ModelSettings) -> torch.device:
    """Return the device of the settings. Raises Unreadable for a GPU that this process does not see."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = settings.device
    if name == "auto":
        name = "cuda:0" if gpus else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise Unreadable(
            f"reward model {settings.path!r}: device is {name!r}, but the worker sees {gpus} GPUs; change device or "
            "cluster.reward_gpus"
        )
    return device


def check_kind(settings: ModelSettings, config: Any) -> None:
    by_step = isinstance(settings, ProcessModelSettings)
    kinds = config.architectures or []
    wanted = "ForTokenClassification" if by_step else "ForSequenceClassification"
    fits = any(kind.endswith(wanted) for kind in kinds)
    named = (
        f"reward model {settings.path!r} holds {', '.join(kinds) or 'no architecture'} with {config.num_labels} outputs"
    )
    if isinstance(settings, ProcessModelSettings):
        if not fits:
            raise InvalidInput(f"{named}; process_reward_model needs a model for token classification")
        if config.num_labels > 1 and settings.positive_label >= config.num_labels:
            raise InvalidInput(
                f"{named}, but positive_label is {settings.positive_label}; set it to 0 … {config.num_labels - 1}"
            )
    elif not fits or config.num_labels != 1:
        raise InvalidInput(
            f"{named}; reward_model needs sequence classification with one output, as `paceline rm` exports it"
        )


class Text(NamedTuple):
    ids: list[int]
    places: list[int]
    """[S] indices of tokens whose outputs count: the ends of steps; empty if the model itself finds the last token."""


class TextEncoder:
    def __init__(self, settings: ModelSettings, tokenizer: Any) -> None:
        self._settings, self.tokenizer = settings, tokenizer

    def encode(self, prompt: Any, completion: Any) -> Text:
        kwargs = self._settings.chat_template_kwargs or {}
        if isinstance(self._settings, ProcessModelSettings):
            return self._steps(prompt, completion, self._settings.step_separator)
        return Text(encode_for_scoring(self.tokenizer, prompt, completion, "auto", kwargs).tolist(), [])

    def _steps(self, prompt: Any, completion: Any, separator: str) -> Text:
        """Return the prompt and the steps. Each step ends with the separator, at whose last token the model scores it."""
        text = completion if isinstance(completion, str) else message_text(completion[-1])
        tokenizer = self.tokenizer
        ids = encode_prompt(tokenizer, prompt, "auto", self._settings.chat_template_kwargs or {}).tolist()
        places = []
        for step in steps_of(text, separator):
            for piece in (step, separator):
                ids += encode_continuation(tokenizer, ids, piece).tolist()
            places.append(len(ids) - 1)
        return Text(ids, places)


def steps_of(text: str, separator: str) -> list[str]:
    """Return the steps of a completion without empty ones; an empty completion is one step."""
    return [step for step in text.split(separator) if step.strip()] or [text]


def passes(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the indices of the texts of each pass; texts of similar length share a pass, the longest come first.

    A pass has at most `max_tokens` tokens including padding (texts times the longest), or one text.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    found = []
    while order:
        count = max(1, max_tokens // max(1, lengths[order[0]]))
        found.append(order[:count])
        order = order[count:]
    return found


OF_STEP = re.compile(r"step-(\d{1,18})")
FILES = ("*.json", "*.safetensors", "*.bin", "*.model", "*.jinja")


def located(path: str) -> str:
    """Return `path`, or the newest export (`step-10`, `step-20` …) in it. Raises Unreadable if `path` has neither a
    model nor an export."""
    is_folder = is_url(path) or Path(path).expanduser().is_dir()
    if not is_folder:
        return path
    try:
        folder = Folder(path if is_url(path) else Path(path).expanduser())
        if folder.exists("config.json"):
            return path
        steps = [(int(match[1]), each) for each in folder.folders() if (match := OF_STEP.fullmatch(each.name))]
        for _, export in sorted(steps, key=lambda step: -step[0]):
            if export.exists("config.json"):
                return str(export)
    except Unreadable:
        raise
    except Exception as error:  # the clients of object stores raise errors without a common base
        raise Unreadable(f"reward model {path!r} cannot be read: {type(error).__name__}: {error}") from None
    raise Unreadable(
        f"reward model {path!r} has no config.json, and no export step-N in it; name an exported reward model's folder"
    )


def fetched(path: str, *, weights: bool = True) -> tuple[str, str]:
    """Return the argument of transformers' `from_pretrained`, and the version of the files. Both change if the files
    change.

    Files at a URL are copied to this host, the weights only if `weights` is true. Raises Unreadable if they cannot be
    read now, InvalidInput for an unknown URL.
    """
    place = located(path)
    source = model_source(place, "reward model", weights=weights)
    if not Path(source).is_dir():
        return source, source  # a name on the hub, of which transformers keeps one copy
    content = repr((place, source, stamp(Path(source), FILES)))
    name = Path(place.rstrip("/")).name
    return source, f"{name}-{xxhash.xxh3_64(content.encode()).hexdigest()[:8]}"
