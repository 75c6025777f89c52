"""Messages captured on the way to a region come again, thousands of times: it counts once, the account balances."""

from collections import Counter
from dataclasses import replace

import pytest

from diloco_node.core.messages import Contributed, ContributionStripe
from diloco_node.core.types import Ballot, RoundBody
from diloco_node.wire.envelope import TransferBegin, decode_bulk, decode_control, encode_begin, encode_control
from tests.kit.small_world import Small

pytestmark = pytest.mark.world

MESSAGES = 10_000
TRANSFERS = 1_000


def test_a_captured_contribution_and_its_stripe_count_once_however_often_they_come(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(5)
    leader, source = small.leader(), small.others()[0]
    frames: list[bytes] = []
    transfers: list[tuple[bytes, bytes]] = []

    def keep_frame(target: str, frame: bytes) -> bytes:
        if target == leader and isinstance(decode_control(frame), Contributed):
            frames.append(frame)
        return frame

    def keep_transfer(target: str, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        begin = decode_bulk(header)
        if target == leader and isinstance(begin, TransferBegin) and isinstance(begin.header, ContributionStripe):
            transfers.append((header, body))
        return header, body

    network = small.sim.network
    network.frame_spoilers[source], network.bulk_spoilers[source] = keep_frame, keep_transfer
    small.sim.run_until(lambda: bool(frames and transfers))
    network.frame_spoilers.pop(source)
    network.bulk_spoilers.pop(source)
    for _ in range(3):  # while its ballot is open, after it was merged, and after the next ones
        for _ in range(MESSAGES // 3):
            small.hosts[leader].frame_arrived(source, frames[0])
        for _ in range(TRANSFERS // 3):
            small.hosts[leader].transfer_arrived(source, *transfers[0])
        small.go(3)
    assert small.alarms() == []
    message = decode_control(frames[0])
    assert isinstance(message, Contributed)
    captured = message.contribution

    def give_it_again(target: str, frame: bytes) -> bytes:
        now = decode_control(frame)
        if isinstance(now, Contributed) and now.contribution.fragment == captured.fragment:
            given.append(now.ballot)
            return encode_control(replace(now, contribution=captured))
        return frame

    def give_its_stripes(target: str, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        begin = decode_bulk(header)
        now = begin.header if isinstance(begin, TransferBegin) else None
        if isinstance(now, ContributionStripe) and now.contribution.fragment == captured.fragment:
            return encode_begin(0, replace(now, contribution=captured), len(body)), body
        return header, body

    # Under the number of each later ballot, with all stripes: only the account knows that it was merged.
    given: list[Ballot] = []
    network.frame_spoilers[source], network.bulk_spoilers[source] = give_it_again, give_its_stripes
    small.go(5)
    network.frame_spoilers.pop(source)
    network.bulk_spoilers.pop(source)
    refused = [note.text for _, note in small.notes if note.kind == "declined" and note.text.startswith(source)]
    assert given
    assert any("it was included in" in text for text in refused), refused
    small.settle()  # the books of all regions are checked against what the learners did
    merged = Counter(
        member.contribution for body in small.bodies() if isinstance(body, RoundBody) for member in body.members
    )
    assert merged[captured] == 1
    assert max(merged.values()) == 1
