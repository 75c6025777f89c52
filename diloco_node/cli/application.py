"""The operator's commands as one application, and how a command ends: exit codes, one line for an error.

Nothing heavy is imported here: `--help` must answer in under 300 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from diloco_node import __version__
from diloco_node.cli import (
    certs,
    checkpoint_commands,
    config,
    explain,
    init,
    ledger,
    members,
    orders,
    replay,
    start,
    status,
    why,
)
from diloco_node.cli.doctor.doctor_command import doctor
from diloco_node.cli.export import export
from diloco_node.cli.measure import measure_command
from diloco_node.cli.page.page_commands import dashboard, report
from diloco_node.cli.plan.plan_command import plan
from diloco_node.errors import INTERRUPTED_CODE, ConfigError, DilocoError
from diloco_node.escaping import escaped

DEBUG_FLAG = "--debug"
LIST_FLAG: Final = "--preload"
"""Takes a list, which may be empty."""

RUN: Final = "Run a region"
LOOK: Final = "Look at a run"
CHANGE: Final = "Change a run"
LABORATORY: Final = "Laboratory"
GROUPS: Final = (RUN, LOOK, CHANGE, LABORATORY)
"""Headings of `--help`. Each command is registered with its own."""


class CommandsInGroups(TyperGroup):
    """The program, whose help lists the commands under the headings of their groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help that list commands."""
        width = max(map(len, self.commands))
        for title in GROUPS:
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(formatter.width - width - 6))
                        for name, command in self.commands.items()
                        if getattr(command, "rich_help_panel", None) == title
                    ]
                )


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"diloco-node {__version__}")
        raise typer.Exit


def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG_FLAG, help="Show the traceback of an error; works anywhere.")] = False,
) -> None:
    pass


def operator_app() -> typer.Typer:
    """Build the application with all commands of an operator."""
    app = typer.Typer(
        name="diloco-node",
        help="Train one model across several datacenters over ordinary internet links (Decoupled DiLoCo).",
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_top,
        cls=CommandsInGroups,
    )
    app.command("init", rich_help_panel=RUN)(init.init)
    app.add_typer(certs.app, name="certs", rich_help_panel=RUN)
    app.add_typer(config.app, name="config", rich_help_panel=RUN)
    app.command("plan", rich_help_panel=RUN)(plan)
    app.command("doctor", rich_help_panel=RUN)(doctor)
    app.command("start", rich_help_panel=RUN)(start.start)
    app.command("status", rich_help_panel=LOOK)(status.status)
    app.command("why", rich_help_panel=LOOK)(why.why)
    app.command("dashboard", rich_help_panel=LOOK)(dashboard)
    app.command("report", rich_help_panel=LOOK)(report)
    app.add_typer(measure_command.app, name="measure", rich_help_panel=LOOK)
    app.command("ledger", rich_help_panel=LOOK)(ledger.ledger)
    app.command("replay", rich_help_panel=LOOK)(replay.replay)
    app.command("export", rich_help_panel=LOOK)(export)
    app.add_typer(checkpoint_commands.app, name="checkpoint", rich_help_panel=LOOK)
    app.command("help", rich_help_panel=LOOK)(explain.explain)
    app.command("drain", rich_help_panel=CHANGE)(orders.drain)
    app.command("finish", rich_help_panel=CHANGE)(orders.finish)
    app.add_typer(orders.budget, name="budget", rich_help_panel=CHANGE)
    app.add_typer(orders.learner, name="learner", rich_help_panel=CHANGE)
    app.add_typer(members.app, name="members", rich_help_panel=CHANGE)
    app.add_typer(orders.quarantine, name="quarantine", rich_help_panel=CHANGE)
    return app


def _check_words(words: Sequence[str]) -> None:
    """Refuse an empty word: a variable of the shell that is not set would widen an order, or be the folder here.

    Raises ConfigError.
    """
    for number, word in enumerate(words, start=1):
        is_flag = word.startswith("--") and word.endswith("=") and word.count("=") == 1
        flag = word[:-1] if is_flag else words[max(number - 2, 0)]
        if (is_flag or not word) and flag != LIST_FLAG:
            at = " ".join(words[:number]) + "''" * (not word)
            raise ConfigError(f"{at}: this is empty, perhaps a variable that is not set: give a value, or leave it out")


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run one command of an application; None: the words of the process. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # What follows `--` belongs to the user's own command, also a `--debug` in it.
    at = words.index("--") if "--" in words else len(words)
    options, command = words[:at], words[at:]
    is_debug = DEBUG_FLAG in options
    try:
        _check_words(options)
        app(args=[word for word in options if word != DEBUG_FLAG] + command, prog_name="diloco-node")
    except DilocoError as error:
        if is_debug:
            raise
        # It may hold the words of a peer, or of whatever answers at an address.
        lines = (escaped(line) for line in str(error).strip().split("\n"))
        more = f"({error.code}; diloco-node help {error.code})"
        sys.stderr.write("diloco-node: " + "\n".join(lines) + f" {more}\n")
        return error.exit_code
    except SystemExit as end:  # how typer ends, after help, a usage error or a command's own exit code
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    return 0
