"""Each command's help ends with an example, and the parser takes every example."""

import shlex
from functools import cache
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from diloco_node.cli.examples import EXAMPLES, commands_of
from diloco_node.main import app

LINES = [line for text in EXAMPLES.values() for line in text.splitlines()]


def test_every_command_has_an_example_and_every_example_a_command() -> None:
    assert {words for words, _ in commands_of(app)} == set(EXAMPLES)


@pytest.mark.parametrize("words", EXAMPLES)
def test_the_help_of_a_command_ends_with_its_example(words: str) -> None:
    result = CliRunner().invoke(app, [*words.split(), "--help"])
    assert result.exit_code == 0
    lines = EXAMPLES[words].splitlines()
    last = [line.strip() for line in result.output.rstrip().splitlines()[-len(lines) - 1 :]]
    assert last == ["Example:", *lines]


@cache
def whole_command() -> Any:
    return typer.main.get_command(app)


@pytest.mark.parametrize("line", LINES)
def test_an_example_is_taken_by_the_parser(line: str) -> None:
    """Names, types and ranges of options and arguments are checked; nothing is run."""
    program, *arguments = shlex.split(line.partition(" > ")[0])
    assert program == "diloco-node"
    command = whole_command()
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    assert command.make_context(command.name, arguments).params


@pytest.fixture
def _from_bash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell is found among the parents of the process; a test's parents are whoever ran it."""
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))


@pytest.mark.usefixtures("_from_bash")
def test_a_shell_is_told_how_to_complete() -> None:
    result = CliRunner().invoke(app, ["--show-completion"], prog_name="diloco-node")
    assert result.exit_code == 0, result.output
    assert "complete -o default -F _diloco_node_completion diloco-node" in result.output


@pytest.mark.usefixtures("_from_bash")
def test_completion_is_installed_where_the_shell_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["--install-completion"], prog_name="diloco-node")
    assert result.exit_code == 0, result.output
    assert "bash_completions" in (tmp_path / ".bashrc").read_text()
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert "_DILOCO_NODE_COMPLETE" in script.read_text()
