"""Memory of all services of a run at once, on CPUs, with a model of the shape of Qwen2.5-0.5B and random weights.

    python benchmarks/model_memory.py [--steps 3] [section.key=value ...]

It makes the model (1 GB on the disk) in a temporary folder, trains it with `paceline up`, and adds up the proportional set
sizes of all processes (memory that two of them map counts once). It prints the peak, the share of each service in it, and
each service's own peak. A run that leaves the host less than `--spare-gb` is ended.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import psutil
from short_form import HELP, OPTION

SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4_864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2_048,
    "tie_word_embeddings": True,
}
SHORT_SHAPE = SHAPE | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
SHORT_SHAPE |= {"num_attention_heads": 2}
ROLES = ("learner", "rollout", "reward", "coordinator")
SAMPLE_S = 0.4
REWARD = "def distinct(completions, **_):\n    return [float(len(set(text)) % 7) for text in completions]\n"
SPEC = """
name: memory
policy:
  model_name: ./model
  max_total_sequence_length: 256
  train_mb_tokens: 2048
  generation: {max_new_tokens: 32, max_batch_size: 8}
data: {train: ./train.jsonl}
rewards: [{function: "reward.py:distinct"}]
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 4, use_dynamic_sampling: false}
cluster: {rollout_workers: 1, device: cpu}
weights: {max_wait_s: 120}
"""


def make_run(folder: Path, prompt_tokens: int, model: Path, shape: dict[str, Any]) -> None:
    """Write data, reward and spec, and the model unless it is there."""
    if not (model / "config.json").is_file():
        make_model(model, shape)
    prompt = " ".join(f"w{number}" for number in range(10, 10 + prompt_tokens))
    rows = [json.dumps({"prompt": f"{prompt} w{number}"}) for number in range(64)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "spec.yaml").write_text(SPEC.replace("./model", str(model.resolve())))


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a model of random weights (a small block of numbers, repeated), with a tokenizer of one word for each token."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {f"w{number}": number for number in range(shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2").save_pretrained(folder)
    config = Qwen2Config(**shape, eos_token_id=1, pad_token_id=2, bos_token_id=None, dtype="bfloat16")
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    block = (0.02 * torch.randn(65_521, generator=torch.Generator().manual_seed(0))).bfloat16()
    tensors = {
        name: torch.ones(tensor.shape, dtype=torch.bfloat16)
        if name.endswith("norm.weight")
        else block.repeat(-(-tensor.numel() // len(block)))[: tensor.numel()].view(tensor.shape).clone()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # it is the embedding
    }
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def proportional_bytes(process: psutil.Process) -> int:
    """Return the proportional set size of a process; 0 for one that has ended."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def role_of(process: psutil.Process) -> str:
    """Return the role of a service's process; `command` for all others."""
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return "command"
    return next((role for role in ROLES if f"paceline.services.{role}." in words), "command")


def by_role(command: psutil.Process) -> dict[str, int]:
    """Return the bytes of every role now."""
    sizes = dict.fromkeys((*ROLES, "command"), 0)
    try:
        processes = [command, *command.children(recursive=True)]
    except psutil.Error:
        return sizes
    for process in processes:
        sizes[role_of(process)] += proportional_bytes(process)
    return sizes


@click.command()
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--steps", default=3, show_default=True, help="Steps to train.")
@click.option("--prompt-tokens", default=100, show_default=True, help="Length of the prompts.")
@click.option(
    "--model",
    "keep",
    type=click.Path(path_type=Path),
    help="Folder to keep the model in; else it is removed.",
)
@click.option("--spare-gb", default=1.5, show_default=True, help="Memory to leave to the host.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(OPTION, "short", is_flag=True, help=HELP)
def main(
    overrides: tuple[str, ...],
    steps: int,
    prompt_tokens: int,
    keep: Path | None,
    spare_gb: float,
    as_json: bool,
    short: bool,
) -> None:
    """Measure the peak of all processes of a run."""
    with tempfile.TemporaryDirectory(prefix="model-memory-") as name:
        folder = Path(name)
        model = keep or folder / "model"
        steps = 1 if short else steps
        make = [sys.executable, __file__, "--make", str(folder), str(prompt_tokens), str(model), *([OPTION] * short)]
        subprocess.run(make, check=True)
        started_s = time.monotonic()
        up = [
            sys.executable,
            "-c",
            "from paceline.services.cli.main import main; main()",
            "up",
            str(folder / "spec.yaml"),
        ]
        options = [
            "--directory",
            str(folder / "runs"),
            "--port",
            "0",
            f"grpo.max_num_steps={steps}",
            *overrides,
        ]
        with (folder / "up.log").open("w") as log:
            process = subprocess.Popen([*up, *options], stdout=log, stderr=subprocess.STDOUT)
            peak, together, alone = 0, dict.fromkeys(ROLES, 0), dict.fromkeys((*ROLES, "command"), 0)
            peak_s, ended_for_memory = 0.0, False
            while process.poll() is None:
                now = by_role(psutil.Process(process.pid))
                alone = {role: max(size, alone[role]) for role, size in now.items()}
                if sum(now.values()) > peak:
                    peak, together, peak_s = sum(now.values()), now, time.monotonic() - started_s
                if psutil.virtual_memory().available < spare_gb * 1e9:
                    ended_for_memory = True
                    process.kill()
                time.sleep(SAMPLE_S)
        printed = (folder / "up.log").read_text()
        facts = {
            "peak_gb": round(peak / 1e9, 2),
            "at_the_peak_gb": {role: round(size / 1e9, 2) for role, size in together.items()},
            "each_alone_gb": {role: round(size / 1e9, 2) for role, size in alone.items()},
            "peak_after_s": round(peak_s),
            "seconds": round(time.monotonic() - started_s),
            "exit_status": process.returncode,
            "ended_for_memory": ended_for_memory,
            "steps": steps,
            "overrides": list(overrides),
            "machine": f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB, {platform.machine()}",
        }
    if as_json:
        click.echo(json.dumps(facts))
    else:
        click.echo(printed, nl=False)
        for key, value in facts.items():
            click.echo(f"{key}: {value}")
    if process.returncode:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make_run(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), SHORT_SHAPE if OPTION in sys.argv else SHAPE)
    else:
        main()
