"""`paceline chat` and `paceline generate`: completions of a model in this process, or of a rollout worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.client import Client
from paceline.errors import InvalidInput, NotFound, Unavailable
from paceline.files.model_source import model_source
from paceline.files.storage import is_url
from paceline.services.cli.recorded.source import find_files, opened_ledger
from paceline.services.common.options import coordinator_option, directory_option, json_option, print_json
from paceline.services.common.processes.starting import set_library_variables
from paceline.services.common.reporting.terminal import visible
from paceline.spec import RunSpec

if TYPE_CHECKING:
    from paceline.groups import Completion
    from paceline.rollout.engine import Engine
    from paceline.v1.rollout_pb2 import GeneratedCompletion

DEFAULT_NEW_TOKENS = 512
UNFINISHED = "\ufffd"


@click.command()
@click.argument("model", metavar="RUN|FOLDER|URL|NAME@ALIAS")
@click.option("--system", help="System message. Default: the run's system message.")
@click.option("--temperature", type=float, help="Sampling temperature. Default: as in the run.")
@click.option(
    "--max-new-tokens", type=click.IntRange(1), help="Largest number of tokens of an answer. Default: as in the run."
)
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same answers.")
@directory_option
def chat(
    model: str, system: str | None, temperature: float | None, max_new_tokens: int | None, seed: int, directory: Path
) -> None:
    """Chat with the exported model of a run (its id or its folder), with a model folder or its URL, or with a
    registered model of --directory. No service has to run.

    A model without a chat template continues each line by itself. An empty line or the end of the input ends the chat.
    """
    set_library_variables()
    spec = changed(spec_of_model(model, directory), temperature, max_new_tokens, system)
    asyncio.run(_chat(spec, seed))


def spec_of_model(model: str, directory: Path, *, scores: bool = False) -> RunSpec:
    """Return a spec to sample from `model`, or with `scores` from a reward model. Raises NotFound, InvalidInput."""
    if is_url(model):
        return _spec_of_folder(model)
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return _spec_of_folder(str(folder.resolve()))
    from paceline.services.cli.recorded.source import registered_model

    if registered := registered_model(model, directory):
        return _spec_of_folder(registered.path)
    from paceline.spec.reading import spec_of_run

    path, run_id = find_files(model.removeprefix("run:"), directory)
    try:
        with opened_ledger(path) as opened:
            spec = spec_of_run(run_id, opened.run(run_id)["spec_yaml"])[0]
            export = opened.export_path(run_id)
    except NotFound as error:
        if not folder.is_dir():
            raise
        raise NotFound(
            f"{error}; the folder {model!r} is not a model folder either, because it has no config.json"
        ) from None
    if not export or not (is_url(export) or (Path(export) / "config.json").is_file()):
        raise NotFound(
            f"run {run_id} has exported no model yet; `paceline export {run_id} FOLDER` writes a model from the "
            "newest checkpoint, and `paceline chat FOLDER` chats with the model"
        )
    if spec.has_scoring_head and not scores:
        raise InvalidInput(
            f"run {run_id} has trained a reward model, which generates no text; name a run that has trained a language model"
        )
    lora = spec.policy.lora_cfg.model_copy(update={"enabled": False})
    policy = {"model_name": str(export), "tokenizer_name": None, "lora_cfg": lora}
    spec = spec.model_copy(update={"policy": spec.policy.model_copy(update=policy)})
    return with_generation(spec, max_batch_size=16)


def with_generation(spec: RunSpec, **settings: Any) -> RunSpec:
    generation = spec.policy.generation.model_copy(update=settings)
    return spec.model_copy(update={"policy": spec.policy.model_copy(update={"generation": generation})})


def _spec_of_folder(model: str) -> RunSpec:
    from transformers import AutoConfig

    from paceline.models.loading import fault_of_load

    try:
        config = AutoConfig.from_pretrained(model_source(model, "the model"))
    except Exception as error:
        fault = fault_of_load("the model", model, error)
        if fault is None:
            raise
        raise fault from error
    longest = getattr(config, "max_position_embeddings", None) or 4096
    generation = {"max_new_tokens": min(DEFAULT_NEW_TOKENS, longest // 2), "max_batch_size": 16}
    return RunSpec.model_validate(
        {
            "policy": {"model_name": model, "max_total_sequence_length": min(longest, 4096), "generation": generation},
            "data": {"train": "none"},
            "rewards": [{"function": "exact_match"}],
        }
    )


def changed(spec: RunSpec, temperature: float | None, max_new_tokens: int | None, system: str | None = None) -> RunSpec:
    """Return the spec with the sampling options of the command line. Raises InvalidInput."""
    if temperature is not None and temperature <= 0:
        raise InvalidInput(f"--temperature is {temperature:g}, but must be above 0; use 1e-4 for greedy decoding")
    longest = spec.policy.max_total_sequence_length
    if max_new_tokens is not None and not 0 < max_new_tokens < longest:
        raise InvalidInput(
            f"--max-new-tokens is {max_new_tokens}, but must be from 1 to {longest - 1}: prompt and answer may have "
            f"{longest} tokens together"
        )
    given = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    spec = with_generation(spec, **{key: value for key, value in given.items() if value is not None})
    data = {} if system is None else {"system_prompt": system}
    return spec.model_copy(update={"data": spec.data.model_copy(update=data)})


@dataclass
class Talk:
    """One conversation with a model. `show` gets each piece of an answer when it is sampled."""

    engine: Engine
    tokenizer: Any
    spec: RunSpec
    seed: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)
    _turn: int = 0

    @property
    def is_chat(self) -> bool:
        return bool(self.tokenizer.chat_template) and self.spec.data.apply_chat_template != "never"

    async def answer(self, line: str, show: Any = None) -> str:
        """Return the model's answer to a line of the conversation. Raises InvalidInput if the line is too long."""
        from paceline.data.tokens import encode_prompt, with_system_prompt

        data, prompt = self.spec.data, line
        if self.is_chat:
            messages = [*self.messages, {"role": "user", "content": line}]
            prompt = with_system_prompt(messages, data)
        ids = encode_prompt(self.tokenizer, prompt, data.apply_chat_template, data.chat_template_kwargs)
        (completion,) = await self.sample(ids, 1, show)
        text = self.text(completion)
        if self.is_chat:
            self.messages = [*messages, {"role": "assistant", "content": text}]
        self._turn += 1
        return text

    async def sample(self, prompt_ids: Any, n: int, show: Any = None) -> list[Completion]:
        """Return `n` completions of a prompt. If `n` is 1, `show` gets the pieces of the completion."""
        from paceline.rollout.engine import GenerationRequest, SamplingParams, sample_seed
        from paceline.rollout.stop_strings import StopStrings

        generation = self.spec.policy.generation
        stop = StopStrings.of(self.tokenizer, generation.stop_strings)
        shown = 0

        def progress(completion: Completion) -> None:
            nonlocal shown
            text = self._decode(completion.token_ids.tolist())
            if not text.endswith(UNFINISHED) and len(text) > shown:
                show(text[shown:])
                shown = len(text)

        requests = [
            GenerationRequest(
                f"chat/{self._turn}/{index}",
                prompt_ids,
                SamplingParams.from_spec(generation),
                sample_seed(self.seed, self._turn, index),
                on_progress=progress if show is not None and n == 1 else None,
                stop=stop,
            )
            for index in range(n)
        ]
        completions = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        if show is not None and n == 1:
            show(self.text(completions[0])[shown:])
        return completions

    def text(self, completion: Completion) -> str:
        from paceline.chat.completion_texts import completion_text
        from paceline.rollout.stop_strings import StopStrings

        stop = StopStrings.of(self.tokenizer, self.spec.policy.generation.stop_strings)
        return completion_text(self.tokenizer, completion, stop.end if stop is not None else None)

    def _decode(self, token_ids: list[int]) -> str:
        from paceline.chat.completion_texts import text_of

        return text_of(self.tokenizer, token_ids)


async def open_talk(spec: RunSpec, seed: int) -> Talk:
    """Return a conversation with the model of `spec`, loaded in this process. Raises InvalidInput."""
    import torch

    from paceline.data.tokens import load_tokenizer
    from paceline.rollout.engines import create_engine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(spec.policy)
    engine = await asyncio.to_thread(create_engine, spec, device=device, load_weights=True)
    await engine.ready()
    return Talk(engine, tokenizer, spec, seed)


async def _chat(spec: RunSpec, seed: int) -> None:
    click.echo(f"loading {spec.policy.model_name}", err=True)
    talk = await open_talk(spec, seed)
    try:
        if not talk.is_chat:
            click.echo("the model has no chat template, so it continues each line by itself", err=True)
        while line := await asyncio.to_thread(_read_line):
            try:
                await talk.answer(line, lambda piece: click.echo(visible(piece), nl=False))
                click.echo()
            except InvalidInput as error:
                click.echo(f"{error}; start a new chat", err=True)
    finally:
        await talk.engine.close()


def _read_line() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo()  # the next output begins on a new line
        return ""


@click.command()
@click.argument("prompt")
@click.option("--n", default=1, show_default=True, help="Number of completions.")
@click.option("--temperature", type=float, help="Sampling temperature. Default: as in the run.")
@click.option(
    "--max-new-tokens", type=click.IntRange(1), help="Largest number of tokens of a completion. Default: as in the run."
)
@click.option("--seed", default=0, show_default=True, help="The same seed and weights give the same completions.")
@click.option(
    "--export",
    "exported",
    metavar="RUN|FOLDER|URL|NAME@ALIAS",
    help="Sample in this process, without any service, from this run's exported model, the model at this folder or URL, or a "
    "registered model.",
)
@coordinator_option
@directory_option
@json_option
def generate(
    prompt: str,
    n: int,
    temperature: float | None,
    max_new_tokens: int | None,
    seed: int,
    exported: str | None,
    coordinator: str,
    directory: Path,
    as_json: bool,
) -> None:
    """Request completions of PROMPT from the rollout worker with the newest weights; with --json as JSON lines."""
    if exported is not None:
        set_library_variables()
        spec = changed(spec_of_model(exported, directory), temperature, max_new_tokens)
        for text, sampled in asyncio.run(_from_export(spec, prompt, n, seed)):
            spans = [[s.start, s.end, s.session, s.step] for s in sampled.spans]
            _print(text, sampled, spans, as_json)
        return
    try:
        with Client(coordinator) as client:
            completions = client.generate(
                prompt, n=n, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
            )
    except Unavailable as error:
        raise Unavailable(f"{error}; --export RUN samples without services from a run's exported model") from None
    for completion in completions:
        spans = [[s.start, s.end, s.version.session, s.version.step] for s in completion.spans]
        _print(completion.text, completion, spans, as_json)


def _print(text: str, completion: Completion | GeneratedCompletion, spans: list[list[int]], as_json: bool) -> None:
    if not as_json:
        click.echo(visible(text))
        return
    facts = {"text": text, "token_ids": list(map(int, completion.token_ids))}
    facts |= {"logprobs": list(map(float, completion.logprobs)), "finish_reason": completion.finish_reason}
    print_json(facts | {"spans": spans})


async def _from_export(spec: RunSpec, prompt: str, n: int, seed: int) -> list[tuple[str, Completion]]:
    """Return text and completion of each of `n` samples; the prompt is encoded as in a rollout worker."""
    from paceline.data.tokens import encode_prompt

    talk = await open_talk(spec, seed)
    try:
        data = spec.data
        ids = encode_prompt(talk.tokenizer, prompt, data.apply_chat_template, data.chat_template_kwargs)
        return [(talk.text(completion), completion) for completion in await talk.sample(ids, n)]
    finally:
        await talk.engine.close()
