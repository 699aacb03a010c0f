"""Options that several commands share, and their JSON output."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from paceline.calls.token import VARIABLE
from paceline.client import DEFAULT_ADDRESS
from paceline.errors import InvalidInput, Unreadable
from paceline.files.names import LEDGER_NAME
from paceline.host.process import require_linux
from paceline.services.common.access.insecure import check_coordinator, check_host, insecure_option

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
PORT = click.IntRange(0, 65535)
SECONDS = click.FloatRange(0, 1e9)
MAX_MB = 1 << 40


def linux_only(command: CommandT) -> CommandT:
    """Make a command that starts services fail at once on a platform other than Linux."""

    @functools.wraps(command)
    def checked(*arguments: Any, **options: Any) -> Any:
        try:
            require_linux(click.get_current_context().command_path)
        except InvalidInput as error:
            raise click.ClickException(str(error)) from None
        return command(*arguments, **options)

    return cast(CommandT, checked)


def _use_token_file(_context: click.Context, _option: click.Parameter, path: str | None) -> None:
    """Set the token file in the environment, so that child processes read the same file."""
    if path:
        os.environ[VARIABLE] = path


def _token_file_option(*, exists: bool) -> Callable[[CommandT], CommandT]:
    return click.option(
        "--token-file",
        type=click.Path(exists=exists, dir_okay=False),
        callback=_use_token_file,
        expose_value=False,
        is_eager=True,
        help=f"File with the coordinator's token. Default: {VARIABLE}, else the file in the coordinator's directory (runs).",
    )


token_file_option = _token_file_option(exists=False)
"""Option --token-file of services. The file may be missing at first: workers may start before the coordinator."""
caller_token_file_option = _token_file_option(exists=True)
"""Option --token-file of commands that call a coordinator; the file must exist."""
functions_from_option = click.option(
    "--functions-from",
    "functions_from",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder that reward functions may come from; may be given several times. Default: the folder of the run's spec.",
)


def _built_in(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    from paceline.reward.builtin import BUILTIN_FUNCTIONS

    for name in names:
        if name not in BUILTIN_FUNCTIONS:
            raise click.BadParameter(
                f"{name!r} is not a built-in reward function; built in are {', '.join(sorted(BUILTIN_FUNCTIONS))}"
            )
    return names


only_option = click.option(
    "--only",
    multiple=True,
    metavar="FUNCTION",
    callback=_built_in,
    help="Built-in reward function that this worker may run; may be given several times. Runs with any other function are not "
    "scored. Use --only code_tests for a separate pool that runs code written by models.",
)
store_option = click.option(
    "--store",
    default="",
    metavar="FOLDER|URL",
    help="Root of checkpoints, exports and stored weights: a folder or an fsspec URL (s3://bucket/runs). Default: the folder "
    "of --directory. With --store, --directory has only the ledger.",
)
_address_option = click.option(
    "--coordinator",
    default=DEFAULT_ADDRESS,
    envvar="PACELINE_COORDINATOR",
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    callback=check_coordinator,
    help="Address of the coordinator.",
)


def coordinator_option(command: CommandT) -> CommandT:
    """Add options for the coordinator: its address, its token, and whether it may be beyond this host."""
    return caller_token_file_option(insecure_option(_address_option(command)))


def worker_options(
    name: str, *, grace: str, host: str = "Address to listen on.", port: str = "gRPC port"
) -> Callable[[CommandT], CommandT]:
    """Return every worker's options: --coordinator, --host, --insecure, --port, --advertise-host, --name, --grace,
    --metrics-port, --ready-file. `name` is the default of --name; `grace`, `host` and `port` are texts of help."""
    options = (
        _address_option,
        click.option("--host", default="127.0.0.1", show_default=True, callback=check_host, help=host),
        insecure_option,
        click.option("--port", type=PORT, default=0, show_default=True, help=f"{port}; 0 takes a free port."),
        click.option(
            "--advertise-host", default="", help="Address at which other workers reach this machine. Default: --host."
        ),
        click.option("--name", default=name, help="Name for people to read; the member id begins with this name."),
        click.option("--grace", "grace_s", type=SECONDS, default=25.0, show_default=True, help=grace),
        click.option(
            "--metrics-port",
            type=PORT,
            help="Port on --host that serves /metrics for Prometheus; 0 takes a free port. Default: none.",
        ),
        click.option(
            "--ready-file",
            type=click.Path(path_type=Path),
            help="File to write the address to, once the service listens.",
        ),
    )

    def decorate(command: CommandT) -> CommandT:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


device_option = click.option("--device", default="auto", show_default=True, help="cpu, cuda, or auto.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line, instead of text.")
directory_option = click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of the coordinator's ledger and runs.",
)
recorded_option = click.option(
    "--directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Read the records in this folder instead of calling a coordinator. Default: the folder runs, if no coordinator answers.",
)


def print_json(value: Any) -> None:
    """Print a JSON value on one line. Not-a-number becomes null, because JSON has no such number."""
    click.echo(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def find_run(run: str, directory: Path) -> tuple[Path, str]:
    """Return the ledger file and the id of a run that is named by its id or its folder."""
    folder = Path(run)
    if folder.is_dir() and (folder.resolve().parent / LEDGER_NAME).is_file():
        return folder.resolve().parent / LEDGER_NAME, folder.resolve().name
    return directory / LEDGER_NAME, run


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float() if value != value or value in (float("inf"), float("-inf")):
            return None
    return value


def make_directory(directory: Path) -> None:
    """Make the folder and its parents. Raises Unreadable if it cannot be made or written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unreadable(
            f"--directory {directory} cannot be made: {error.strerror}; name a folder in which you can write"
        ) from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise Unreadable(
            f"--directory {directory} cannot be used: you cannot write in it; name a folder in which you can write"
        )
