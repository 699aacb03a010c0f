"""Host memory and seconds of loading a model on several ranks, and of exporting it from their shards.

    python benchmarks/load.py [--ranks 2] [--layers 28] [--s3] [--json]

A random model of Qwen2.5-1.5B's shape (1.54 B parameters, tied; `--layers` makes it smaller), written as bfloat16
safetensors of 256 MB each, is loaded as a float32 policy on gloo ranks of one thread each, from a local folder, and with
`--s3` from an S3 server (moto) on loopback too. Needs 9 GB of memory at 2 ranks and 7 GB of disk, 10 with `--s3`.

`peak_over_shard` is (peak RssAnon - 2 GB) / bytes of the rank's float32 shard, of the worst rank, from the start of the
process until the model is loaded; `bit_equal` says whether every row of every rank has the bits that `from_pretrained`
gives it; `export_equal`, whether the model that the ranks then export in bfloat16 has the bytes of the files.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import xxhash
from random_model import write_random_model
from short_form import parse

ROOT = Path(__file__).resolve().parents[1]
ALLOWED_BYTES = 2_000_000_000
SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SHORT = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256}


class AnonymousPeak:
    """Largest RssAnon of this process while the block runs, in bytes, sampled every 5 ms."""

    def __enter__(self) -> Self:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            ended = self._ended.wait(0.005)
            self.bytes = max(self.bytes, anonymous_bytes())
            if ended:
                return


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])


def as_rank(source: str, out: Path) -> None:
    """One rank: load, note the digest of every tensor's rows, export."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    with AnonymousPeak() as peak:
        dist.init_process_group("gloo")
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        from paceline.learner.checkpoints.export import export_live
        from paceline.learner.model.policy import load_policy
        from paceline.spec import PolicySection

        policy = PolicySection(model_name=source, precision="float32")
        started_s = time.perf_counter()
        model = load_policy(policy, torch.device("cpu"))
        load_s = time.perf_counter() - started_s
    rows: dict[str, tuple[int, int, str]] = {}
    shard_bytes = 0
    for name, parameter in model.named_parameters():
        whole: Any = parameter.detach()
        local = whole.to_local()
        shard_bytes += local.nbytes
        _, offset = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
        rows[name] = offset[0], len(local), digest(local)
    before = anonymous_bytes()
    with AnonymousPeak() as export_peak:
        started_s = time.perf_counter()
        failure = export_live(out / "export", model, policy, dtype=torch.bfloat16)
        export_s = time.perf_counter() - started_s
    if failure is not None:
        raise failure
    result = {
        "peak_bytes": peak.bytes,
        "shard_bytes": shard_bytes,
        "load_s": load_s,
        "export_s": export_s,
        "export_bytes": export_peak.bytes - before,
        "rows": rows,
    }
    (out / f"rank.{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def digest(tensor: torch.Tensor) -> str:
    """XXH3 of a tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def compare(folder: Path, out: Path) -> None:
    """Compare all ranks' rows with `from_pretrained`, and the export with the files; print both findings."""
    from transformers import AutoModelForCausalLM

    from paceline.models.weight_files import find_weight_files

    auto: Any = AutoModelForCausalLM
    expected = dict(auto.from_pretrained(folder, dtype=torch.float32).named_parameters())
    ranks = [json.loads(path.read_text())["rows"] for path in sorted(out.glob("rank.*.json"))]
    bit_equal = all(rows.keys() == expected.keys() for rows in ranks)
    covered = dict.fromkeys(expected, 0)
    for rows in ranks:
        for name, (first, count, found) in rows.items():
            covered[name] += count
            bit_equal = bit_equal and digest(expected[name].detach()[first : first + count]) == found
    bit_equal = bit_equal and all(covered[name] == len(tensor) for name, tensor in expected.items())
    del expected
    files = [find_weight_files(str(path), str(path), "the model") for path in (folder, out / "export")]
    first, second = files[0].tensors, files[1].tensors
    export_equal = first.keys() == second.keys() and all(
        torch.equal(tensor[...], second[name][...]) for name, tensor in first.items()
    )
    print(json.dumps({"bit_equal": bit_equal, "export_equal": export_equal}))


def measure(source: str, folder: Path, out: Path, ranks: int) -> dict[str, Any]:
    """Load from `source` on this many ranks; `folder` has the same files."""
    out.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["XDG_CACHE_HOME"] = str(out / "cache")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*torchrun, __file__, "--as-rank", source, str(out)], env=environment, check=True)
    found = [json.loads((out / f"rank.{rank}.json").read_text()) for rank in range(ranks)]
    compared = subprocess.run(
        [sys.executable, __file__, "--compare", str(folder), str(out)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    worst = max(found, key=lambda one: (one["peak_bytes"] - ALLOWED_BYTES) / one["shard_bytes"])
    return {
        "peak_over_shard": (worst["peak_bytes"] - ALLOWED_BYTES) / worst["shard_bytes"],
        **json.loads(compared.stdout.splitlines()[-1]),
        "peak_gb": worst["peak_bytes"] / 1e9,
        "shard_gb": worst["shard_bytes"] / 1e9,
        "load_s": max(one["load_s"] for one in found),
        "export_s": max(one["export_s"] for one in found),
        "export_extra_gb": max(one["export_bytes"] for one in found) / 1e9,
    }


@contextmanager
def s3_server() -> Iterator[str]:
    """URL of an empty bucket, for this process and its children while it is open."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        import s3fs

        s3fs.S3FileSystem().mkdir("models")
        yield "s3://models"
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--s3", action="store_true", help="load from an S3 server too; needs s3fs and moto[server]")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)
    arguments = parse(parser, layers=1)
    if arguments.as_rank:
        return as_rank(arguments.as_rank[0], Path(arguments.as_rank[1]))
    if arguments.compare:
        return compare(*map(Path, arguments.compare))
    with tempfile.TemporaryDirectory(prefix="paceline-load-") as scratch:
        from transformers import Qwen2Config

        folder = Path(scratch) / "model"
        shape = SHAPE | SHORT if arguments.short else SHAPE
        config = Qwen2Config(**shape, num_hidden_layers=arguments.layers, dtype="bfloat16")
        result: dict[str, Any] = {"parameters": write_random_model(folder, config, 1 << 28)}
        result |= measure(str(folder), folder, Path(scratch) / "local", arguments.ranks)
        if arguments.s3:
            with s3_server() as bucket:
                import s3fs

                for path in sorted(folder.iterdir()):
                    s3fs.S3FileSystem().put_file(str(path), f"{bucket}/model/{path.name}")
                result["s3"] = measure(f"{bucket}/model", folder, Path(scratch) / "s3", arguments.ranks)
    result["load_average"] = os.getloadavg()[0]
    if arguments.json:
        print(json.dumps(result))
    else:
        print(json.dumps(result, indent=2))
    return None


if __name__ == "__main__":
    main()
