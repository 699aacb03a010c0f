"""`data`: the source of prompts and examples, with its presets (`data.preset`), changes before the run
(`data.preparation`) and questions with several answers (`data.choices`). Promise: a preset only fills in keys that
the spec leaves out, so the resolved spec shows every value; `data.train` may name a local copy with the same
columns. Columns are those of the hub's cards: https://huggingface.co/datasets/ followed by the name in `train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, JsonValue, field_validator, model_validator

from paceline.spec.sections.base import PositiveFloat, PositiveInt, Section


class ChoicesSection(Section):
    """Multiple-choice rows. Each row gets the columns `answer_choices` (the texts) and `answer_letter` (the letter of
    the right answer), and `{choices}` in `data.prompt_template` is the lettered list."""

    keys: Annotated[tuple[str, ...], Field(min_length=1)]
    """One column with the list of answers (or, as in ARC, an object of `text` and `label`), or a column per answer."""
    answer_key: str | None = None
    """Column with the right answer: its label, its letter, or its index from 0. Null: the first answer is right."""
    shuffle: bool = False
    """Shuffle the answers in an order that depends only on their texts, so that it is the same in every evaluation."""

    @model_validator(mode="after")
    def _check_first(self) -> ChoicesSection:
        if self.answer_key is None and not self.shuffle:
            raise ValueError(
                "answer_key is null, so the first answer is always right, and shuffle is false; set one of them"
            )
        return self


DataPresetName = Literal["openmathinstruct2", "helpsteer3", "deepscaler", "tldr", "ultrafeedback"]

DATA_PRESETS: dict[DataPresetName, dict[str, Any]] = {
    # problem, generated_solution, expected_answer, problem_source. With math_accuracy: kwargs {answer_column: expected_answer}.
    "openmathinstruct2": {
        "train": "nvidia/OpenMathInstruct-2",
        "prompt_key": "problem",
        "completion_key": "generated_solution",
    },
    # domain, language, context (messages), response1, response2, overall_preference (-3: response1 is much better, 0: equal,
    # 3: response2 is much better), individual_preference. Its configuration `preference` is the default one.
    "helpsteer3": {
        "train": "nvidia/HelpSteer3",
        "validation_split": "validation",
        "prompt_key": "context",
        "chosen_key": "response1",
        "rejected_key": "response2",
        "preference_key": "overall_preference",
    },
    # problem, answer, solution.
    "deepscaler": {
        "train": "agentica-org/DeepScaleR-Preview-Dataset",
        "prompt_key": "problem",
        "completion_key": "solution",
    },
    # prompt, completion.
    "tldr": {"train": "trl-lib/tldr"},
    # chosen and rejected (whole conversations), score_chosen, score_rejected.
    "ultrafeedback": {"train": "trl-lib/ultrafeedback_binarized"},
}


def with_preset(values: Any) -> Any:
    """Return the values of a `data` section, with the values of its preset for missing keys. An unknown preset stays,
    and is refused like any other wrong value."""
    if not isinstance(values, dict):
        return values
    presets: dict[Any, dict[str, Any]] = {**DATA_PRESETS}
    name = values.get("preset")
    return {**presets.get(name, {}), **values} if isinstance(name, str) else values


Share = Annotated[float, Field(ge=0, le=1)]


class PreparationSection(Section):
    """Changes to the rows before a run: first a function of yours, then filters. The submitting machine makes the
    changes, and the run gets the prepared rows with its other files; no service runs the function."""

    function: str | None = None
    """Function of a row (`path/to/file.py:name`) that returns a row, a list of rows, or None to leave the row out. It
    gets the rows of `data.train` and `data.validation`; the filters leave out rows of `data.train` only."""
    timeout_s: PositiveFloat = 60.0
    """The function may take at most this many seconds for 256 rows."""
    max_prompt_characters: PositiveInt | None = None
    """Leave out rows whose prompt has more than this many characters."""
    max_prompt_tokens: PositiveInt | None = None
    """Leave out rows whose prompt has more than this many tokens, by the policy's tokenizer and chat template, which
    must be on the submitting machine."""
    max_overlap: Annotated[float, Field(gt=0, le=1)] | None = None
    """Leave out rows whose prompt shares at least this fraction of its n-grams of 13 words with an evaluation set:
    `data.validation`, and files beside the training data whose stem is test, eval, validation, valid or dev."""
    pass_rate: tuple[Share, Share] | None = None
    """Leave out rows whose prompt has a pass rate outside these bounds. The pass rate is the share of the prompt's
    completions in the runs of `pass_rate_of` with a reward of at least `passed_at`. Prompts that no run tried stay."""
    pass_rate_of: tuple[str, ...] = ()
    """Ids of earlier runs of the same coordinator."""
    passed_at: float = 1.0
    """Smallest total reward with which a completion passes."""

    @property
    def is_used(self) -> bool:
        """Return whether this section changes the data."""
        return self.function is not None or self.filters

    @property
    def filters(self) -> bool:
        """Return whether a filter leaves out rows."""
        limits = (self.max_prompt_characters, self.max_prompt_tokens, self.max_overlap, self.pass_rate)
        return any(limit is not None for limit in limits)

    @model_validator(mode="after")
    def _check(self) -> PreparationSection:
        if self.function is not None and ".py:" not in self.function:
            raise ValueError(f"function {self.function!r} is not a function; write it as path/to/file.py:name")
        if (self.pass_rate is None) != (not self.pass_rate_of):
            given = "pass_rate" if self.pass_rate is not None else "pass_rate_of"
            raise ValueError(f"only {given} is set; set both pass_rate and pass_rate_of")
        if self.pass_rate is not None and self.pass_rate[0] > self.pass_rate[1]:
            raise ValueError(
                f"pass_rate {list(self.pass_rate)} has its larger bound first, so no prompt would stay; swap them"
            )
        return self


RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
        "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
        "tokenizer_kwargs", "truncation",
    }
)  # fmt: skip
"""Arguments of `apply_chat_template` that the template does not read."""


MIXTURE_BLOCK = 10_000
"""In each block of this many draws of a mixture, every data set has exactly its share, rounded to a whole number."""


class DataSource(NamedTuple):
    """The names that identify a data set."""

    field: str
    """Key of the spec that names the data set."""
    name: str | tuple[str, ...]
    split: str
    config: str | None = None


class DataSection(Section):
    """The source of prompts. Columns that are not named here are passed to the reward functions."""

    preset: DataPresetName | None = None
    """Public data set whose names and columns fill unset keys; `train` may name a local copy of the data set."""
    train: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """A .jsonl, .parquet, .csv or .tsv file, a glob (`data/*.parquet`) or an fsspec URL (`s3://bucket/*.jsonl`) of such
    files, a list of these, a folder made by `datasets`, or a data set's name on the hub."""
    train_weights: tuple[PositiveFloat, ...] | None = None
    """Share of draws from each data set in the list `train`. Without weights the list is one data set."""
    validation: str | Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Data sets for evaluation, in the forms of `train`."""
    train_split: str = "train"
    """Split of a `datasets` folder or a hub data set, or a part of it such as `train[:90%]`."""
    validation_split: str = "test"
    """Split of the data set for evaluation."""
    train_config: str | None = None
    """Configuration of a hub data set that has several (`main` of `openai/gsm8k`), for `datasets.load_dataset`."""
    validation_config: str | None = None
    """Configuration for evaluation; default `train_config` if `validation` names the same data set."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or chat messages (a list of role and content). Empty: the rows have no prompt, and
    `reset` of `environment.class` returns it."""
    prompt_template: str | None = None
    """Prompt instead of the column `prompt_key`: a text with the names of columns in braces (`Question: {question}`); a
    list is written with one line for each entry. Reward functions then get every column."""
    choices: ChoicesSection | None = None
    """Columns of multiple-choice rows."""
    completion_key: str = "completion"
    """Column with the target (`sft`) or the judged completion (`kto`): text, or messages that follow the prompt."""
    messages_key: str | None = None
    """Column with whole conversations, instead of prompt and completion (`sft`)."""
    chosen_key: str = "chosen"
    """Column with the better completion: text, or messages (`dpo`, `orpo`, `rm`)."""
    rejected_key: str = "rejected"
    """Column with the worse completion, or a list of several."""
    preference_key: str | None = None
    """Column with a number that says which completion is better: below 0 the completion in `chosen_key`, above 0 the
    completion in `rejected_key`. Rows with 0 are left out and counted (`dpo`, `orpo`, `rm`, `kto`)."""
    label_key: str = "label"
    """Column that says whether the completion is good: true or false (`kto`)."""
    margin_key: str = "margin"
    """Column with the margin by which the chosen completion is better; rows without it have margin 0 (`rm`)."""
    source_key: str | None = None
    """Column that names the source of a row, for algorithms that sample. Runs and `paceline eval` then also report the
    rewards of each source. If `train` or `validation` is a list, rows without this column get the name of their data set
    (for a file, its stem)."""
    system_prompt: str | None = None
    """System message placed before every prompt; it turns a text prompt into a chat."""
    apply_chat_template: Literal["auto", "always", "never"] = "auto"
    """Prompts to which the chat template is applied. auto: messages always, text only if system_prompt is set."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Arguments of the chat template wherever it is applied (`{enable_thinking: false}` for Qwen3)."""
    shuffle: bool = True
    """Draw a new seeded order in every epoch; false keeps the file's order."""
    streaming: bool = False
    """Read `train`, a data set on the hub, as a stream instead of downloading it first; only for algorithms that
    sample. Rows are checked as they arrive."""
    streaming_block_rows: PositiveInt = 10_000
    """Consecutive rows of a stream that are held in memory and shuffled together; a larger block mixes better."""
    preparation: PreparationSection = PreparationSection()
    """Changes to the rows before the run, made on the submitting machine."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        return with_preset(values)

    def source(self, *, validation: bool = False) -> DataSource:
        """Return the names that identify the data set for training or for evaluation."""
        if not validation:
            return DataSource("data.train", self.train, self.train_split, self.train_config)
        assert self.validation is not None, "RunSpec refuses evaluation without data.validation"
        config = self.validation_config or (self.train_config if self.validation == self.train else None)
        return DataSource("data.validation", self.validation, self.validation_split, config)

    def names(self, *, validation: bool = False) -> tuple[str, ...]:
        """Return the names of the data sets for training or for evaluation."""
        value = self.validation if validation else self.train
        return value if isinstance(value, tuple) else () if value is None else (value,)

    def source_names(self, *, validation: bool = False) -> tuple[str, ...]:
        """Return the name of each data set in a list, for people and metrics; none if there is no list."""
        value = self.validation if validation else self.train
        return distinct_names(value) if isinstance(value, tuple) else ()

    def with_prepared(self, train: Sequence[str] = (), validation: Sequence[str] = ()) -> DataSection:
        """Return the section with prepared files in place of its data sets, one file for each entry of a list. A data
        set without prepared files stays."""
        update: dict[str, Any] = {"preparation": PreparationSection()}
        if self.validation is not None:
            update["validation_config"] = self.source(validation=True).config
        for name, paths in (("train", train), ("validation", validation)):
            if paths:
                value = tuple(paths) if isinstance(getattr(self, name), tuple) else paths[0]
                update |= {name: value, f"{name}_config": None}
        return self.model_copy(update=update)

    @property
    def pair_keys(self) -> tuple[str, ...]:
        """Columns that decide about a pair of completions, in addition to its prompt."""
        decides = () if self.preference_key is None else (self.preference_key,)
        return (self.chosen_key, self.rejected_key, *decides)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_kwargs(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(set(kwargs) & RESERVED_TEMPLATE_KWARGS):
            raise ValueError(f"{taken[0]!r} is not an argument of the template; remove it")
        return kwargs

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        if self.streaming and isinstance(self.train, tuple):
            raise ValueError(
                f"streaming is true, and train lists {len(self.train)} data sets, which a stream cannot mix; name one, or "
                "set streaming to false"
            )
        if self.streaming and self.preparation.is_used:
            raise ValueError(
                "streaming is true, and preparation is set, which reads all rows before the run; remove one of them"
            )
        if self.train_weights is not None:
            self._check_weights(self.train_weights)
        return self

    def _check_weights(self, weights: tuple[float, ...]) -> None:
        if not isinstance(self.train, tuple) or len(self.train) != len(weights):
            number = len(self.train) if isinstance(self.train, tuple) else 1
            raise ValueError(
                f"train_weights has {len(weights)} weights, but train lists {number} data sets; give one weight to "
                "each entry of the list train"
            )
        least, total = min(weights), sum(weights)
        if least / total < 1 / MIXTURE_BLOCK:
            raise ValueError(
                f"train_weights: {least:g} of {total:g} is a share below 1/{MIXTURE_BLOCK}, so its data set would "
                "never be drawn; raise the weight, or remove the data set"
            )


def distinct_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the stem of each name (for a glob, its folder's), with its index if another name has the same."""
    paths = [PurePosixPath(name) for name in names]
    stems = [
        path.parent.name
        if "*" in path.name and path.parent.name
        else path.stem
        if path.suffix[1:].isalpha()
        else path.name
        for path in paths
    ]
    return tuple(f"{stem}-{index}" if stems.count(stem) > 1 else stem for index, stem in enumerate(stems))
