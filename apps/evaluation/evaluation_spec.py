"""The spec of an evaluation: a file with the keys of a run, for the model of `--model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.apps.evaluation.tasks import FOLDER
from paceline.errors import InvalidInput
from paceline.spec import RunSpec
from paceline.spec.sections.user_code import RewardFunctionSection

LONGEST = 4096
"""Tokens of prompt and completion together, of a model whose files are not here."""


def spec_of_endpoint(url: str) -> RunSpec:
    """Return the settings of a model behind a URL, of which nothing else is known."""
    return RunSpec.model_validate(
        {
            "policy": {"model_name": url, "max_total_sequence_length": LONGEST},
            "data": {"train": "none"},
            "rewards": [{"function": "exact_match"}],
        }
    )


def evaluation_spec(file: Path, overrides: tuple[str, ...], model: RunSpec) -> RunSpec:
    """Return the spec in `file` for the model of another one. Raises SpecError, InvalidInput without validation data."""
    from paceline.spec.reading import apply_override, parse_spec, read_tree

    tree = read_tree(file)
    for override in overrides:
        apply_override(tree, override)
    if file.parent == FOLDER and isinstance(tree["data"].get("validation"), str):
        tree["data"]["validation"] = _from_here(tree["data"]["validation"])
    data = tree.get("data") if isinstance(tree.get("data"), dict) else {}
    if not data or not data.get("validation"):
        raise InvalidInput(f"{file}: data.validation is not set; name the data set with the problems")
    policy = tree.get("policy") or {}
    generation = policy.get("generation") or {} if isinstance(policy, dict) else {}
    if not (isinstance(policy, dict) and isinstance(generation, dict)):
        return parse_spec(tree, base=file.parent)  # which says what they are
    tree["policy"] = {
        "max_total_sequence_length": model.policy.max_total_sequence_length,
        **policy,
        "model_name": model.policy.model_name,
        "tokenizer_name": model.policy.tokenizer_name,
        "lora_cfg": {"enabled": False},
        # Nothing trains on these samples, so no ratio could be biased.
        "generation": {"allow_biased_sampling": True, **generation},
    }
    # The training set is not read; a run's spec names one, and an evaluation file need not.
    tree["data"] = {"train": data["validation"], **data}
    if isinstance(evaluation := tree.get("evaluation"), dict) and evaluation.get("method") == "prefer":
        _measure(tree, model.policy.model_name)
    return parse_spec(tree, base=file.parent)


def reads_model(tree: dict[str, Any]) -> bool:
    """Return whether a file measures the model of `--model`; one that measures a judge needs none."""
    evaluation, rewards = tree.get("evaluation"), tree.get("rewards")
    if not isinstance(evaluation, dict) or evaluation.get("method") != "prefer":
        return True
    return any(_path_argument(reward) is not None for reward in rewards or ())


def _measure(tree: dict[str, Any], model: str) -> None:
    """Make `model` that of the reward functions which name none: it is what is measured."""
    for reward in tree.get("rewards") or ():
        argument = _path_argument(reward)
        if argument is not None:
            reward["kwargs"] = {argument: model, **(reward.get("kwargs") or {})}


def _path_argument(reward: Any) -> str | None:
    """Return the keyword argument of a reward function that names its model; None for another function."""
    name = reward.get("function") if isinstance(reward, dict) else None
    return RewardFunctionSection.PATH_ARGUMENTS.get(name) if isinstance(name, str) else None


def _from_here(name: str) -> str:
    """Return a path of this directory as an absolute one, and any other name unchanged."""
    return str(Path(name).expanduser().resolve()) if Path(name).expanduser().exists() else name


def digests(spec: RunSpec) -> dict[str, str]:
    """Return the digests of what decides an evaluation: the spec, and the model's files where they are on this machine."""
    from paceline.models.evaluation_results import digest_of, folder_digest

    found = {"spec": digest_of(spec.model_dump(mode="json", exclude={"folder"}))}
    folder = Path(spec.policy.model_name)
    return found | ({"model": folder_digest(folder)} if folder.is_dir() else {})
