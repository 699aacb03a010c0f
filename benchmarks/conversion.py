"""Peak memory of `paceline convert`: a model of several shards becomes a checkpoint of torch and a model folder again.

    python benchmarks/conversion.py [--gb 3] [--shard-gb 1]

Each conversion is a process, as on the command line. Its peak is VmHWM, with the interpreter and torch; it fails above 1.3
times the largest shard, or where a bit of the weights has changed. It needs three times the model's size on the disk. Recorded
results: docs/operate/performance.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from random_model import write_random_model
from short_form import parse

LIMIT = 1.3
MEASURED = """
import sys
from pathlib import Path
from paceline.services.cli.main import main
main(sys.argv[1:], standalone_mode=False)
lines = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
"""


def main() -> None:
    """Make the model, convert it both ways, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=3.0, help="size of the model, about")
    parser.add_argument("--shard-gb", type=float, default=1.0, help="size of its files")
    options = parse(parser, gb=0.1, shard_gb=0.1)
    from transformers import Qwen3Config

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        width = 2048
        layer = width * width * 16 * 2  # bytes of a layer's matrices, about
        config = Qwen3Config(
            vocab_size=32_000,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=max(1, round(options.gb * 1e9 / layer)),
            num_attention_heads=16,
            num_key_value_heads=16,
            head_dim=width // 16,
        )
        write_random_model(folder / "model", config, int(options.shard_gb * 1e9))
        shards = [file.stat().st_size for file in (folder / "model").glob("*.safetensors")]
        there = _peak("convert", folder / "model", folder / "dcp", "--to", "dcp")
        back = _peak("convert", folder / "dcp", folder / "back")
        same = _same_bits(folder / "model", folder / "back")
    result = {
        "shards": len(shards),
        "largest_shard_bytes": max(shards),
        "model_bytes": sum(shards),
        "peak_bytes_to_checkpoint": there,
        "peak_bytes_to_folder": back,
        "ratio": round(max(there, back) / max(shards), 3),
        "same_bits": same,
    }
    print(json.dumps(result))
    sys.exit(not same or (result["ratio"] > LIMIT and not options.short))


def _peak(*words: object) -> int:
    """Return the peak memory in bytes of a command of `paceline`."""
    command = [sys.executable, "-c", MEASURED, *map(str, words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.splitlines()[-1])


def _same_bits(first: Path, second: Path) -> bool:
    """Compare the tensors of two folders, one at a time."""
    import torch

    from paceline.models.weight_files import model_files

    with model_files(str(first), "first")[1] as one, model_files(str(second), "second")[1] as other:
        return one.tensors.keys() == other.tensors.keys() and all(
            torch.equal(tensor[...].view(torch.uint8), other.tensors[name][...].view(torch.uint8))
            for name, tensor in one.tensors.items()
        )


if __name__ == "__main__":
    main()
