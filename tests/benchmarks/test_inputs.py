"""Benchmarks refuse what they would silently measure as something else, and tell what they could not measure."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import attacks
import pytest
import restart
import soak
import storm_peers

FIGURES = {"before_per_s": 1.0, "during_per_s": 1.0, "kept": None, "kept_per_step": None, "longest_gap_s": 1.0}


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (storm_peers.main, ["--arms", "torchft,elastics"]),
        (restart.main, ["--preload", "on,of"]),
        (restart.main, ["--models", "demo,gpt3"]),
    ],
)
def test_a_word_that_names_nothing_is_refused(
    main: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storm_peers.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert repr(words[1].split(",")[1]) in capsys.readouterr().err


def test_the_memory_of_a_daemon_that_died_is_none() -> None:
    assert (attacks.memory_bytes(os.getpid()) or 0) > 1 << 20
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert attacks.memory_bytes(child.pid) is None, "it waits to be reaped"
    child.wait()
    assert attacks.memory_bytes(child.pid) is None
    one = {**FIGURES, "memory_bytes": None, "daemon_died": True, "connections": 9, "load": 1.0}
    assert attacks.line("pings", one).split() == ["pings", "1.00", "1.00", "-", "-", "1.0", "died", "9", "1.0"]


@pytest.mark.parametrize(("equal", "balanced", "code"), [(True, True, 0), (False, True, 1), (True, False, 1)])
@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_soak_that_went_wrong_says_so_by_its_exit_code(
    equal: bool, balanced: bool, code: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Done:
        def __init__(self, options: Namespace, folder: Path) -> None:
            pass

        async def run(self) -> dict[str, Any]:
            tokens = {"balanced": balanced, "faults": []}
            return {"kills": [], "rows": [], "run": {"rounds_committed": 1, "equal_digests": equal, "tokens": tokens}}

    monkeypatch.setattr(soak, "Soak", Done)
    assert soak.main(words) == code
