from __future__ import annotations

from typing import Any

import pytest

from diloco_node.adapters.series import run_series
from diloco_node.errors import DilocoError, LinkLost, PeersUnreachable
from diloco_node.measure.documents import FlowCase

KINDS = (("transport", "random"), ("transport", "int4"), ("plain", "random"))
CASES = [FlowCase("eu", "us", *kind, count) for count in (1, 4) for kind in KINDS]


async def series(wrong: dict[int, DilocoError]) -> tuple[dict[str, Any], list[int]]:
    """What comes of CASES when some go wrong, and which were tried."""
    tried: list[int] = []

    async def test(case: FlowCase) -> dict[str, Any]:
        tried.append(CASES.index(case))
        if tried[-1] in wrong:
            raise wrong[tried[-1]]
        return {"case": case, "bytes_per_second": 125_000 * (tried[-1] + 1)}

    return await run_series(CASES, test, lambda _: None), tried


def measured(found: dict[str, Any]) -> list[int]:
    return [CASES.index(row["case"]) for row in found["tests"]]


async def test_all_of_it() -> None:
    found, tried = await series({})
    assert measured(found) == tried == [0, 1, 2, 3, 4, 5]
    assert (found["failures"], found["plain_error"]) == ([], None)


async def test_one_that_fails_leaves_the_others() -> None:
    found, tried = await series({3: LinkLost("us: the stream ended")})
    assert tried == [0, 1, 2, 3, 4, 5]
    assert measured(found) == [0, 1, 2, 4, 5]
    assert found["failures"] == [
        {
            "from": "eu",
            "to": "us",
            "path": "transport",
            "body": "random",
            "connections": 4,
            "error": "us: the stream ended",
        }
    ]
    assert found["plain_error"] is None


async def test_nothing_is_tried_with_a_peer_that_can_not_be_reached_any_more() -> None:
    found, tried = await series({1: LinkLost("us: it ended"), 3: PeersUnreachable("us is gone")})
    assert tried == [0, 1, 2, 3]
    assert measured(found) == [0, 2]
    assert [(row["path"], row["body"], row["error"]) for row in found["failures"]] == [
        ("transport", "int4", "us: it ended"),
        ("transport", "random", "us is gone"),
        ("transport", "int4", "us is gone"),
        ("plain", "random", "us is gone"),
    ]


async def test_a_first_one_that_fails_is_an_error() -> None:
    with pytest.raises(LinkLost, match="it ended"):
        await series({0: LinkLost("us: it ended")})


async def test_without_plain_tcp_the_rest_is_whole() -> None:
    found, tried = await series({2: PeersUnreachable("port 7402 is shut")})
    assert tried == [0, 1, 2, 3, 4]  # plain TCP once
    assert measured(found) == [0, 1, 3, 4]
    assert (found["failures"], found["plain_error"]) == ([], "no plain TCP beside it: port 7402 is shut")


async def test_what_there_is_so_far_is_kept_after_each_test() -> None:
    kept: list[dict[str, Any]] = []

    async def test(case: FlowCase) -> dict[str, Any]:
        if case.path == "plain":
            raise LinkLost("shut")
        return {"case": case, "bytes_per_second": 1}

    found = await run_series(CASES[:4], test, lambda _: None, kept.append)
    assert [(len(one["tests"]), bool(one["plain_error"])) for one in kept] == [
        (1, False),
        (2, False),
        (2, True),
        (3, True),
    ]
    assert kept[-1] == found


async def test_progress_says_what_is_on_and_what_the_last_one_was() -> None:
    said: list[str] = []

    async def test(case: FlowCase) -> dict[str, Any]:
        return {"bytes_per_second": 125_000_000}

    await run_series([FlowCase("eu", "us", "transport", "int4", count) for count in (0, 4)], test, said.append)
    assert said == [
        "test 1 of 2: TLS, int4+zstd",
        "test 2 of 2: TLS, int4+zstd, connections: 4; the last one 1000 Mbit/s",
    ]
