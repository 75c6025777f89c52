"""The tests of one `measure bandwidth`, one after the other: one that fails does not take those before it along."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from diloco_node.errors import DilocoError, PeersUnreachable
from diloco_node.measure.documents import FlowCase, failure_document

Keep = Callable[[dict[str, Any]], None]
"""Takes a document as it would be if the measurement ended here: shown when it is cut short."""


def forget(_: dict[str, Any]) -> None:
    """A `Keep` for those who want the end only."""


async def run_series(
    cases: Sequence[FlowCase],
    test: Callable[[FlowCase], Awaitable[dict[str, Any]]],
    say: Callable[[str], None],
    keep: Keep = forget,
) -> dict[str, Any]:
    """Carry out each case, and keep what was measured when others fail.

    Without plain TCP, which a firewall may keep out, the rest is whole: `plain_error` says why, and it is not tried
    again. When the peer can't be reached any more nothing else is tried either.

    Args:
        test: measures one case and returns its document. say: called with what goes on, for people.
        keep: called after each test with what there is.

    Returns:
        A part of the document: "tests", "failures" and "plain_error".

    Raises:
        DilocoError: the first one failed; so would the others.
    """
    tests: list[dict[str, Any]] = []
    failed: list[tuple[FlowCase, DilocoError]] = []
    plain_error = ""
    for number, case in enumerate(cases, start=1):
        if case.path == "plain" and plain_error:
            continue  # it would be the same again
        if failed and isinstance(failed[-1][1], PeersUnreachable):
            failed.append((case, failed[-1][1]))
            continue
        last = f"; the last one {8e-6 * tests[-1]['bytes_per_second']:.0f} Mbit/s" if tests else ""
        over = f", connections: {case.connections}" if case.connections else ""
        say(f"test {number} of {len(cases)}: {case.title}{over}{last}")
        try:
            tests.append(await test(case))
        except DilocoError as error:
            if case.path == "plain":
                plain_error = f"no plain TCP beside it: {error}"
            elif tests:
                failed.append((case, error))
            else:
                raise
        keep(_found(tests, failed, plain_error))
    return _found(tests, failed, plain_error)


def _found(tests: list[dict[str, Any]], failed: list[tuple[FlowCase, DilocoError]], plain_error: str) -> dict[str, Any]:
    failures = [failure_document(case, error) for case, error in failed]
    return {"tests": list(tests), "failures": failures, "plain_error": plain_error or None}
