"""A click group that imports a command's module when the command runs, and lists its commands without imports. Apps add
commands by entry points (GROUP): each names a table like `sections` below, in a module that imports nothing heavy. The
headings of a table are those of `paceline --help`, or SERVE for roles of `paceline serve`."""

from __future__ import annotations

import errno
import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

import click

from paceline.errors import PacelineError

GROUP = "paceline.commands"
SERVE = "paceline serve"
Sections = Mapping[str, Mapping[str, tuple[str, str]]]


@functools.cache
def sections_of_apps() -> Sections:
    """Return the commands of apps by heading. An app with an unreadable table is left out, and a line on stderr says
    why."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: (not e.value.startswith("paceline."), e.name)):
        try:
            table = {
                heading: {name: (str(target), str(summary)) for name, (target, summary) in commands.items()}
                for heading, commands in entry.load().items()
            }
            for heading, commands in table.items():
                found[heading] = commands | found.get(heading, {})
        except (Exception, SystemExit) as error:  # the fault is another project's, and all other commands work
            click.echo(f"the app {entry.name} ({entry.value}) is left out: {error}", err=True)
    return found


class LazyGroup(click.Group):
    """A click group with lazily imported commands. `sections` maps a heading to its commands: for each name
    "module:attribute" and one line of help. The attribute is a click command, or a function without parameters. Apps
    add commands, and replace none. A PacelineError of any command becomes "Error: …" on stderr with exit status 1."""

    def __init__(self, *args: Any, sections: Sections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own_sections = sections
        self._own = {name: entry for section in sections.values() for name, entry in section.items()}
        """Commands of the core by name, which are found without loading apps."""

    @functools.cached_property
    def sections(self) -> Sections:
        """Commands by heading. Headings that only apps have are at the end."""
        of_apps = sections_of_apps()
        if self.name == "serve":
            of_apps = {heading: of_apps.get(SERVE, {}) for heading in self._own_sections}
        headings = [*self._own_sections, *(each for each in of_apps if each not in (SERVE, *self._own_sections))]
        return {
            heading: dict(self._own_sections.get(heading, {}))
            | {name: entry for name, entry in of_apps.get(heading, {}).items() if name not in self._own}
            for heading in headings
        }

    @functools.cached_property
    def entries(self) -> Mapping[str, tuple[str, str]]:
        """Module and one line of help of each command, by the command's name."""
        return {name: entry for section in self.sections.values() for name, entry in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._own and cmd_name not in self.entries:
            return None
        target, summary = self._own.get(cmd_name) or self.entries[cmd_name]
        module, _, attribute = target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, click.Command):
            return click.Command(cmd_name, callback=found, help=summary)
        _bound_numbers(found)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self._own and args[0] not in self.entries:
            ctx.fail(f"No such command {args[0][:80]!r}; {remedy(args[0], self.entries)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, entries in self.sections.items():
            if not entries:
                continue
            with formatter.section(heading):
                formatter.write_dl([(name, summary) for name, (_, summary) in entries.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            clause = setting_for(error.option_name)
            if not clause:
                raise
            raise click.UsageError(f"{error.message.rstrip('.')}{clause}", ctx=error.ctx) from None
        except PacelineError as error:
            raise click.ClickException(str(error)) from None
        except OSError as error:  # a file of the user's; click handles a closed pipe
            if error.filename is None or error.errno == errno.EPIPE:
                raise
            raise click.ClickException(f"{error.filename}: {error.strerror}") from None


def _bound_numbers(command: click.Command) -> None:
    """Let every number option of a command and of its subcommands refuse NaN, infinities and integers beyond 64 bits,
    which click's types accept."""
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        _bound_numbers(below)
    for parameter in command.params:
        if not isinstance(parameter.callback, _Bounded):
            parameter.callback = _Bounded(parameter.callback)


class _Bounded:
    """Callback of a parameter that checks its numbers first."""

    def __init__(self, inner: Callable[[click.Context, click.Parameter, Any], Any] | None) -> None:
        self._inner = inner

    def __call__(self, context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise click.BadParameter(f"{number} is not a finite number.", context, parameter)
            if isinstance(number, int) and abs(number) > MAX_INT:
                raise click.BadParameter(f"{number} is beyond 64 bits.", context, parameter)
        return value if self._inner is None else self._inner(context, parameter, value)


MAX_INT = (1 << 63) - 1
MEANT = {
    word: command
    for command, words in {
        "up": "train run start launch rl ppo main_ppo",
        "grpo": "run_grpo run_grpo_math",
        "sft": "run_sft sft_trainer",
        "dpo": "run_dpo",
        "rm": "run_rm reward reward_trainer",
        "distillation": "run_distillation distill gkd",
        "samples": "sample rollouts completions",
        "ledger verify": "verify check fsck",
        "ledger backup": "backup",
        "watch": "logs log tail follow progress",
        "runs": "list ls jobs ps",
        "members": "workers nodes",
        "cancel": "stop kill delete abort",
        "resume": "continue restart",
        "generate": "infer predict complete",
        "convert": "merge model_merger quantize",
        "export": "convert_dcp_to_hf save",
        "models push": "push upload",
        "models register": "register",
        "models promote": "promote",
        "models fetch": "deploy",
        "spec": "config validate explain",
        "import": "init migrate",
        "serve rollout": "vllm-serve inference rollout worker",
        "serve learner": "learner trainer",
        "serve coordinator": "orchestrator coordinator server",
        "doctor": "env health install",
        "eval": "evaluate run_eval benchmark",
        "sweep": "tune hpo",
    }.items()
    for word in words.split()
}
"""Maps a word of other libraries or command lines to the command of Paceline."""


def remedy(word: str, commands: Iterable[str]) -> str:
    """Return the remedy for an unknown command, such as "did you mean `paceline samples`?"."""
    from paceline.spec.faults import nearest

    names = list(commands)
    plain = word.rpartition("/")[2].removesuffix(".py").removesuffix(".sh").lower()
    if plain in names:
        return f"did you mean `paceline {plain}`?"
    meant = MEANT.get(plain, "")
    if meant.partition(" ")[0] in names:
        return f"did you mean `paceline {meant}`?"
    guesses = nearest(plain, names)
    if guesses:
        return f"did you mean {' or '.join(f'`paceline {guess}`' for guess in guesses)}?"
    return "`paceline --help` lists the commands"


def setting_for(option: str) -> str:
    """Return how to write a setting that was given as an option, such as `--learning_rate`; empty if it is no setting."""
    from paceline.spec.faults import unknown_key
    from paceline.spec.foreign import look_up
    from paceline.spec.keys import keys

    name = option.lstrip("-").replace("-", "_")
    if name in keys():
        return f"; a setting is written as {name}=VALUE"
    if look_up(name) is None and not any(path.endswith(f".{name}") for path in keys()):
        return ""
    (line,) = unknown_key((name,), None)
    return f"; a setting is written as SECTION.KEY=VALUE, and {line.replace(f'{name}: unknown key; ', '')}"
