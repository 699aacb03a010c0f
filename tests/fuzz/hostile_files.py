"""Hostile files: every kind of file that a command reads, changed by a seed, is answered with a sentence.

    python tests/fuzz/hostile_files.py --rounds 200 --seed 1

A case is a small valid file and the command, or the part of a service's start, that reads it. Each round changes the file, or puts
something that is no file in its place, and runs the command in this process: it has to end within LIMIT_S and with at most MAX_BYTES of further address space, with success or with a message, never with a traceback.
The last line is one JSON object: `rounds`, and the `faults` by case.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from click.testing import CliRunner
from hostile_changes import OBJECTS, changed, changed_value, put_back, remove, sparse

from paceline.apps.model_server.trace_log import TraceLog
from paceline.bundle.manifest import Manifest
from paceline.errors import PacelineError
from paceline.models.evaluation_results import RESULT, SAMPLES, write_result
from paceline.services.cli.main import main as paceline
from paceline.services.common.access.callers import TokenCallers
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_table import FILE_NAME as TOKENS
from paceline.services.common.access.token_table import create as create_token
from paceline.services.coordinator.audit_log.log import AuditLog
from paceline.services.coordinator.blobs import BlobStore
from paceline.services.coordinator.bundle_servicer import Upload
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.rollout.openai.server import FeedbackAsk

ARCHIVE = Path(__file__).parents[1] / "data" / "recorded.tar.xz"
LIMIT_S = 30.0
MAX_BYTES = 4 << 30
OBJECT_SHARE = 0.1
UNDECIDED = 2
"""Status of `paceline gate` with few problems."""


class Slow(BaseException):
    """A command that does not end; no handler of an Exception takes it."""


@dataclass(frozen=True)
class Case:
    """A file, and what reads it."""

    name: str
    file: Path
    read: Callable[[], int]
    """Returns the exit status; raises what a user would see as a traceback."""
    values: Callable[[Any], None] | None = None
    """Writes a changed value of the file's JSON with its digests, for files that are signed."""
    objects: tuple[Callable[[Path], None], ...] = tuple(OBJECTS.values())
    """What is put in its place."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """End what takes longer than LIMIT_S with `Slow`."""

    def end(*_: object) -> None:
        raise Slow(f"no end after {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process take MAX_BYTES of further address space at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def attack(case: Case, rounds: int, seed: int) -> list[str]:
    """Change the file again and again; return what was wrong, the same fault once."""
    dice, faults = random.Random(f"{seed}/{case.name}"), Counter[str]()
    valid = case.file.read_bytes()
    status = case.read()
    assert status in (0, UNDECIDED), f"{case.name}: the valid file is refused with {status}"
    try:
        for _ in range(rounds):
            if case.objects and dice.random() < OBJECT_SHARE:
                remove(case.file)
                dice.choice(case.objects)(case.file)
            elif case.values is not None and dice.random() < 0.8:
                value = changed_value(json.loads(valid), dice)
                with contextlib.suppress(ValueError, TypeError, RecursionError):  # a value that cannot be signed
                    case.values(value)
            else:
                case.file.write_bytes(changed(valid, dice))
            try:
                with limited():
                    case.read()
            except (Exception, Slow) as error:
                frames = traceback.extract_tb(error.__traceback__)
                ours = [f for f in frames if "site-packages" not in f.filename and "/lib/python" not in f.filename]
                where = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "?"
                fault = f"{type(error).__name__} in {where}: {str(error)[:100]}"
                if not any(known.startswith(fault.partition(":")[0]) and where in known for known in faults):
                    _keep(case, len(faults))
                faults[fault] += 1
            finally:
                put_back(case.file, valid)
    finally:
        put_back(case.file, valid)
    return [f"{fault} ({number} times)" for fault, number in faults.most_common(20)]


def _keep(case: Case, number: int) -> None:
    """Keep a file that was not answered well, to look at."""
    if (folder := os.environ.get("HOSTILE_KEEP")) is not None and case.file.is_file():
        shutil.copy(case.file, Path(folder) / f"{case.name.replace(' ', '-')}-{number}")


def command(*arguments: str | Path) -> int:
    """Run a command and return its exit status; raises the exception that would be a traceback."""
    result = CliRunner().invoke(paceline, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if "Traceback (most recent call last)" in result.output:
        raise AssertionError(result.output[-500:])
    if result.exit_code and not result.output.strip():
        raise AssertionError(f"{arguments[0]} ends with {result.exit_code} and says nothing")
    return result.exit_code


def cases(folder: Path) -> list[Case]:
    """Write valid files below `folder` and return their cases. The working directory becomes the folder."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    os.chdir(folder)
    return [
        *_spec_cases(folder),
        *_data_cases(folder),
        *_foreign_cases(folder),
        *_result_cases(folder),
        *_key_cases(folder),
        *_record_cases(folder),
        _manifest_case(folder),
        *_service_cases(folder),
    ]


def _spec(folder: Path, data: str = "train.jsonl") -> Path:
    path = folder / f"spec-{data}.yaml"
    tree = {
        "name": "sums",
        "policy": {
            "model_name": "./model",
            "max_total_sequence_length": 64,
            "generation": {"max_new_tokens": 8},
        },
        "data": {"train": f"./{data}"},
        "rewards": [{"function": "length", "kwargs": {}}],
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 3},
        "checkpointing": {"save_period": 5},
        "logger": {"tensorboard": False},
    }
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


ROWS = (
    '{"prompt": "1+1=", "answer": "2", "level": 1}\n'
    '{"prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "level": 2}\n'
    '{"prompt": "3+3=", "answer": "6", "level": 3}\n'
)


def _spec_cases(folder: Path) -> list[Case]:
    (folder / "train.jsonl").write_text(ROWS)
    spec = _spec(folder)
    return [
        Case("spec", spec, lambda: command("spec", spec)),
        Case("plan", spec, lambda: command("plan", spec)),
        Case("spec of data inspect", spec, lambda: command("data", "inspect", spec)),
    ]


def _data_cases(folder: Path) -> list[Case]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "rows.csv").write_text('prompt,answer\n"1+1=",2\n"2+\n2=",4\n')
    pq.write_table(pa.table({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"]}), folder / "rows.parquet")
    found = []
    for name in ("rows.jsonl", "rows.csv", "rows.parquet"):
        spec = _spec(folder, name)
        found.append(Case(f"data {name}", folder / name, _inspect(spec)))
    trace = {"prompt": "1+1=", "completion": "2", "final_reward": 1.0}
    traces = folder / "traces.jsonl"
    traces.write_text(
        "".join(
            json.dumps(trace | {"final_reward": reward, "completion": f"{reward}"}) + "\n" for reward in (1.0, 0.0, 0.9)
        )
    )
    found.append(Case("traces", traces, lambda: command("traces", "pairs", traces, folder / "pairs.jsonl")))
    return found


def _inspect(spec: Path) -> Callable[[], int]:
    return lambda: command("data", "inspect", spec)


FOREIGN = {
    "nemo": (
        "nemo.yaml",
        "grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4}\n"
        'policy: {model_name: ./model, max_total_sequence_length: 64, precision: "${x.y}"}\n'
        "x: {y: float32}\n",
    ),
    "verl": (
        "verl.sh",
        "MODEL=./model\npython3 -m verl.trainer.main_ppo \\\n    algorithm.adv_estimator=grpo data.max_prompt_length=32 \\\n"
        "    data.max_response_length=32 actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.n=4\n",
    ),
    "prime-rl": ("prime.toml", 'max_steps = 20\nseq_len = 64\n[model]\nname = "./model"\n'),
    "trl": (
        "train.py",
        "from trl import GRPOConfig, GRPOTrainer\n"
        "args = GRPOConfig(output_dir='x', learning_rate=1e-6, num_generations=4, max_completion_length=32)\n"
        "GRPOTrainer(model='./model', args=args).train()\n",
    ),
}
"""Configurations of other libraries, without data and rewards, which the command gives."""

COMPLETING = (
    "data.train=./train.jsonl",
    "rewards=[{function: length}]",
    "policy.max_total_sequence_length=64",
    "policy.generation.max_new_tokens=8",
)


def _foreign_cases(folder: Path) -> list[Case]:
    found = []
    for library, (name, text) in FOREIGN.items():
        file = folder / name
        file.write_text(text)
        found.append(Case(f"import {library}", file, _import(library, file, folder / f"{name}.out.yaml")))
    return found


def _import(library: str, file: Path, output: Path) -> Callable[[], int]:
    return lambda: command("import", library, file, *COMPLETING, "--force", "-o", output)


def _result_cases(folder: Path) -> list[Case]:
    samples = [
        {"problem": str(i), "sample": k, "reward": float(i % 2), "rewards": {"length": 1.0}, "text": "x"}
        for i in range(6)
        for k in range(2)
    ]
    result = {
        "model": "m",
        "k": 2,
        "metrics": {"reward": {"value": 0.5}},
        "digests": {"model": "d", "data": "e"},
    }
    for name in ("candidate", "baseline"):
        write_result(folder / name, result, samples)
    candidate, baseline = folder / "candidate", folder / "baseline"

    def judge() -> int:
        return command("gate", candidate, "--baseline", baseline)

    def sign(value: Any) -> None:
        kept = value if isinstance(value, dict) else {"value": value}
        write_result(candidate, {name: each for name, each in kept.items() if name != "digest"}, samples)

    def sign_samples(value: Any) -> None:
        write_result(candidate, result, value if isinstance(value, list) else [value])

    file = folder / "samples.json"  # as one value, which is written as lines
    file.write_text(json.dumps(samples))
    return [
        Case("result of gate", candidate / RESULT, judge, sign),
        Case("samples of gate", candidate / SAMPLES, judge),
        Case("signed samples of gate", file, judge, sign_samples),
    ]


def _key_cases(folder: Path) -> list[Case]:
    create_token(folder / TOKENS, "ann", CallerRole.VIEWER, 86_400.0)
    command("certs", "init", folder / "ca")
    command("certs", "issue", folder / "ca", "ann", "--role", "worker")
    return [
        Case("tokens", folder / TOKENS, lambda: command("token", "list", "--directory", folder)),
        Case("authority", folder / "ca" / "ca.crt", lambda: command("certs", "show", folder / "ca")),
        Case(
            "certificate",
            folder / "ca" / "ann" / "tls.crt",
            lambda: command("certs", "show", folder / "ca" / "ann"),
        ),
    ]


def _record_cases(folder: Path) -> list[Case]:
    runs = folder / "runs"
    names = sorted(path for path in runs.rglob("*") if path.is_file() and not path.is_symlink())
    found = []
    for path in names:
        kind = path.relative_to(runs).as_posix()
        if path.suffix in (".sqlite", ".segment", ".json", ".metadata", ".jsonl") or "segments" in kind:
            found.append(Case(f"verify {kind}", path, _verify))
    ledger = runs / "ledger.sqlite"
    for name, arguments in {
        "runs": ("runs", "--directory", "runs"),
        "metrics": ("metrics", "recorded-1", "--directory", "runs"),
        "samples": ("samples", "recorded-1", "--directory", "runs"),
    }.items():
        found.append(Case(f"{name} of a ledger", ledger, _of_ledger(arguments)))
    return found


def _verify() -> int:
    return command("ledger", "verify", "--deep", "--directory", "runs")


def _of_ledger(arguments: Sequence[str]) -> Callable[[], int]:
    return lambda: command(*arguments)


def _manifest_case(folder: Path) -> Case:
    file = folder / "manifest.json"
    sha256 = "a" * 64
    whole = {"format": 1, "files": [{"path": "code/r.py", "sha256": sha256, "size": 10, "kind": "code"}]}
    file.write_text(json.dumps(whole))

    def read() -> int:
        with contextlib.suppress(PacelineError):
            Manifest.read(file.read_bytes())
        return 0

    return Case("manifest of a bundle", file, read, lambda value: _write(file, value), objects=())


def _service_cases(folder: Path) -> list[Case]:
    """Files that services read when they start, or that a person's resume has to repair."""
    objects = (*OBJECTS.values(), sparse)
    audited, tokens, traces, blobs = (folder / name for name in ("audited", "tokens", "traces", "blobs"))

    def start() -> int:
        with contextlib.suppress(PacelineError), contextlib.closing(Ledger(audited / "ledger.sqlite")) as ledger:
            AuditLog(ledger).close()
        return 0

    def accept() -> int:
        TokenCallers(lambda: "bootstrap", tokens / "token", tokens / TOKENS)
        return 0

    async def rated() -> None:
        with contextlib.closing(TraceLog(traces, "m", 1 << 20)) as log:
            await log.record("b", [{"prompt": "1+1=", "completion": "2"}])
            await log.rate(FeedbackAsk(completion_id="b", index=0, score=1.0))
            with contextlib.suppress(PacelineError):
                await log.rate(FeedbackAsk(completion_id="a", index=0, score=1.0))

    def rate() -> int:
        asyncio.run(rated())
        for path in sorted(traces.iterdir()):
            if path != traces / "requests-000001.jsonl":
                remove(path)
        return 0

    def resend() -> int:
        store, upload = BlobStore(blobs), Upload(BlobStore(blobs))
        if sha256 in store.missing({sha256: len(content)}):
            upload.take(sha256, len(content), 0, content)
        assert b"".join(store.read(sha256)) == content
        return 0

    start()
    tokens.mkdir()
    create_token(tokens / TOKENS, "ann", CallerRole.VIEWER, 86_400.0)
    traces.mkdir()
    row = {"id": "a", "choice": 0, "prompt": "1+1=", "completion": "2", "final_reward": None}
    (traces / "requests-000001.jsonl").write_text(json.dumps(row) + "\n")
    content = b"content of a bundled file\n" * 20
    sha256 = hashlib.sha256(content).hexdigest()
    resend()
    log = audited / "audit" / "000001.jsonl"
    of_audit = ("--directory", audited)
    return [
        Case("start with an audit log", log, start, objects=objects),
        Case("audit verify", log, lambda: 0 * command("audit", "verify", *of_audit), objects=objects),
        Case("audit show", log, lambda: 0 * command("audit", "show", *of_audit), objects=objects),
        Case(
            "ledger verify with an audit log", log, lambda: 0 * command("ledger", "verify", *of_audit), objects=objects
        ),
        Case("start with tokens", tokens / TOKENS, accept, objects=objects),
        Case("start with traces", traces / "requests-000001.jsonl", rate, objects=objects),
        Case("resume with blobs", blobs / sha256[:2] / sha256[2:], resend, objects=objects),
    ]


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


@click.command()
@click.option("--rounds", default=200, show_default=True, help="Changes of each file.")
@click.option("--seed", default=1, show_default=True)
@click.option("--only", default="", help="Part of the names of the cases.")
def main(rounds: int, seed: int, only: str) -> None:
    """Change every kind of file that a command reads, and run the command."""
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-hostile-") as folder:
        chosen = [case for case in cases(Path(folder).resolve()) if only in case.name]
        for case in chosen:
            with bounded_memory():
                faults = attack(case, rounds, seed)
            if faults:
                found[case.name] = faults
            click.echo(f"{case.name}: {len(faults) or 'no'} faults", err=True)
        os.chdir("/")
    click.echo(json.dumps({"rounds": rounds * len(chosen), "cases": len(chosen), "faults": found}))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
