"""Log-probabilities of continuations are transformers' own, and so are the choices by them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from evaluation_questions import QUESTIONS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers_scores import scores_by_transformers

from paceline.apps.evaluation.engine_model import EngineModel
from paceline.apps.evaluation.evaluate import evaluation_spec
from paceline.apps.evaluation.runner import evaluate
from paceline.apps.evaluation.url_model import UrlModel
from paceline.apps.model_server.serving import opened_model
from paceline.errors import InvalidInput
from paceline.services.cli.chat import spec_of_model


async def test_choices_are_those_of_transformers(folder: Path) -> None:
    spec = evaluation_spec(folder / "choose.yaml", (), spec_of_model(str(folder / "model"), folder))
    async with opened_model(spec, "model") as served:
        result, samples, questions = await evaluate(EngineModel(served), spec, 0)
    assert questions[0] == "Two and two?"
    right = []
    for sample, (_, texts, gold) in zip(samples, QUESTIONS, strict=True):
        expected = scores_by_transformers(folder / "model", sample["prompt"], [f" {text}" for text in texts])
        logprobs = [score.logprob for score in expected]
        assert [score["logprob"] for score in sample["choices"]] == pytest.approx(logprobs, abs=1e-4)
        assert [score["is_greedy"] for score in sample["choices"]] == [each.is_greedy for each in expected]
        raw = max(range(len(texts)), key=logprobs.__getitem__)
        norm = max(range(len(texts)), key=[p / len(t) for p, t in zip(logprobs, texts, strict=True)].__getitem__)
        assert sample["completion"] == "ABC"[raw]
        assert sample["rewards"] == {"acc": float(raw == gold), "acc_norm": float(norm == gold)}
        right.append((raw == gold, norm == gold))
    for name, place in (("reward/acc", 0), ("reward/acc_norm", 1)):
        assert result["metrics"][name]["value"] == pytest.approx(sum(each[place] for each in right) / len(right))
    assert result["metrics"]["reward"] == result["metrics"]["reward/acc"]


async def test_a_chat_is_scored_behind_its_template(folder: Path) -> None:
    (folder / "choose.yaml").write_text(
        (folder / "choose.yaml").read_text().replace("template: never", "template: always")
    )
    spec = evaluation_spec(folder / "choose.yaml", (), spec_of_model(str(folder / "model"), folder))
    async with opened_model(spec, "model") as served:
        (score,) = await EngineModel(served).score("One?", ["2"])
        ids = served.tokenizer("<|user|>One?<|end|><|assistant|>2")["input_ids"]
        expected = await served.engine.prompt_logprobs(torch.tensor(ids).numpy())
    assert score.logprob == pytest.approx(float(expected.logprobs[-1]), abs=1e-5)


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tokenizer(space: str, scheme: str = "", bos: bool = False) -> Any:
    """Byte-level, or with Metaspace by its scheme; `un`, `undo`, `do`, `ing` and `happy` are tokens."""
    vocab = {each: index for index, each in enumerate(["<s>", "</s>", "<unk>", space, *LETTERS, "\n", "Ċ", ".", "0"])}
    merges = []
    for word in ("undo", "do", "ing", "happy", f"{space}un", f"{space}happy"):
        piece = word[0]
        for letter in word[1:]:
            merges += [] if (piece, letter) in merges else [(piece, letter)]
            piece += letter
            vocab.setdefault(piece, len(vocab))
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    if scheme:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>" if bos else None, eos_token="</s>", unk_token="<unk>"
    )


class Bigrams:
    """An engine whose next token depends on the last one."""

    max_batch_size = 8
    CHANCES = {
        ("un", "happy"): 2 / 3,
        ("un", "do"): 1 / 3,
        ("do", "ing"): 1.0,
        ("undo", "ing"): 1.0,
        ("</s>", "un"): 0.5,
    }

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def prompt_logprobs(self, ids: Any) -> Any:
        tokens = self.tokenizer.convert_ids_to_tokens(list(map(int, ids)))
        logprobs = [math.nan, *(math.log(self.CHANCES[pair]) for pair in itertools.pairwise(tokens))]
        return SimpleNamespace(logprobs=np.array(logprobs), top_logprobs=np.zeros(len(logprobs)))


def model_of(tokenizer: Any) -> EngineModel:
    data = SimpleNamespace(apply_chat_template="never", chat_template_kwargs={})
    spec = SimpleNamespace(data=data, policy=SimpleNamespace(model_name="m"))
    return EngineModel(cast(Any, SimpleNamespace(spec=spec, tokenizer=tokenizer, engine=Bigrams(tokenizer))))


async def test_a_token_that_spans_the_end_of_the_prompt_hides_no_part_of_the_continuation() -> None:
    """By the chain rule, EleutherAI/lm-evaluation-harness#4055."""
    scores = await model_of(tokenizer("Ġ")).score("un", ["happy", "doing", "do"])
    assert [each.logprob for each in scores] == pytest.approx([math.log(2 / 3), math.log(1 / 3), math.log(1 / 3)])
    (first,) = await model_of(tokenizer("Ġ")).score("", ["un"])
    assert first.logprob == pytest.approx(math.log(0.5))  # behind the end of sequence, where no token begins one


TOKENIZERS = {
    "bytes": lambda: tokenizer("Ġ"),
    "bytes with bos": lambda: tokenizer("Ġ", bos=True),
    **{f"Metaspace {each}": lambda each=each: tokenizer("▁", each) for each in ("always", "first", "never")},
    **{f"Metaspace {each} with bos": lambda each=each: tokenizer("▁", each, bos=True) for each in ("always", "first", "never")},
}  # fmt: skip
PARTS = (
    ("un", "doing"),
    ("un", "do"),
    ("un", " happy"),
    ("un ", "happy"),
    ("undo", "ing"),
    ("ab", "c"),
    ("", "doing"),
)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_tokens_of_a_continuation_are_its_text(kind: str, parts: tuple[str, str]) -> None:
    made, (prompt, continuation) = TOKENIZERS[kind](), parts
    ids, start = model_of(made)._pair(prompt, continuation)
    begin = made(prompt.rstrip())["input_ids"]
    if prompt:
        assert ids[:start].tolist() == begin
        assert made.decode(ids) == made.decode(begin) + (" " if prompt.endswith(" ") else "") + continuation
    else:
        assert (start, made.decode(ids[1:]).lstrip()) == (1, continuation)
        assert ids[0] in (0, 1)


async def test_a_chat_is_continued_in_its_place() -> None:
    """A Metaspace tokenizer writes a space before a separate text."""
    model = model_of(tokenizer("▁", "always"))
    ids = model._in_place(np.array(model._served.tokenizer("un")["input_ids"], np.int32), "happy")
    assert model._served.tokenizer.convert_ids_to_tokens(ids.tolist()) == ["happy"]


class Echoing:
    """An endpoint that repeats a text with log-probabilities, as ours does."""

    def __init__(self, tokenizer: Any) -> None:
        self.engine = Bigrams(tokenizer)

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.engine.tokenizer(body["prompt"])["input_ids"]
        scored = await self.engine.prompt_logprobs(ids)
        found = {
            "tokens": [self.engine.tokenizer.decode([each]) for each in ids],
            "token_logprobs": [None, *scored.logprobs[1:].tolist()],
            "top_logprobs": [None, *({"x": 0.0} for _ in ids[1:])],
        }
        return {"choices": [{"logprobs": found}], "usage": {"prompt_tokens": len(ids)}}


async def test_by_url_the_same_is_scored_or_refused() -> None:
    spec = SimpleNamespace(data=SimpleNamespace(apply_chat_template="never"), rewards=())
    asked = UrlModel(cast(Any, spec), cast(Any, Echoing(tokenizer("Ġ"))), "m", 1)
    (score,) = await asked.score("un", ["happy"])
    assert score.logprob == pytest.approx(math.log(2 / 3))
    with pytest.raises(InvalidInput, match="spans the border between the prompt and the continuation 'doing'"):
        await asked.score("un", ["doing"])
    with pytest.raises(InvalidInput, match="puts no token before the text"):
        await asked.score("", ["undoing"])
