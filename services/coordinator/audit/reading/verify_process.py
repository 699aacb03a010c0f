"""`python -m paceline.services.coordinator.audit.reading.verify_process LEDGER RUN [--deep]`: `verify` in a process of its own.

The comparison reads every array of a run and takes minutes of a processor, which the coordinator's process needs. It runs at the
lowest priority and ends with its parent. `verify_apart` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import click

from paceline.errors import PacelineError
from paceline.services.common.processes.starting import STARTER_VARIABLE, die_with_starter
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.v1 import records_pb2 as pb

NICENESS = 19
VERIFY_S = 3600.0


async def verify_apart(ledger: Path, request: pb.VerifyRunRequest) -> pb.VerifyRunResponse:
    """Return the report of a run from a process of its own, which ends when the caller is cancelled. Raises PacelineError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(ledger), request.run_id),
        *(["--deep"] if request.deep else []),
        env=os.environ | {STARTER_VARIABLE: str(os.getpid())},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(VERIFY_S):
            output, errors = await process.communicate()
    except TimeoutError:
        raise PacelineError(f"the records were compared for {VERIFY_S:g} s without an end") from None
    finally:
        if process.returncode is None:  # the caller has gone
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise PacelineError(f"the comparison has failed: {errors.decode(errors='replace')[-1000:]}")
    found = json.loads(output)
    return pb.VerifyRunResponse(problems=found["problems"], facts_json=json.dumps(found["facts"]))


@click.command()
@click.argument("ledger", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("run_id")
@click.option("--deep", is_flag=True)
def main(ledger: Path, run_id: str, deep: bool) -> None:
    """Print the report of RUN_ID as a JSON object."""
    die_with_starter()
    os.nice(NICENESS)
    try:
        opened = Ledger(ledger, read_only=True)
        report = verify(opened, run_id, deep=deep)
    except PacelineError as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps({"problems": report.problems, "facts": report.facts}))


if __name__ == "__main__":
    main()
