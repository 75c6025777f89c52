"""The fake data plane takes for a payload what is just that."""

import random

from diloco_node.lab.sim import fake_tensors as tensors
from diloco_node.lab.sim.dataplane import DataPlane
from diloco_node.lab.sim.disk import Disk, DiskPayload
from diloco_node.lab.sim.setup import draw_setup


def test_a_payload_has_no_byte_more_or_less_than_its_stripes() -> None:
    setup = draw_setup(random.Random(5), 3)
    complaints: list[str] = []
    plane = DataPlane(setup, Disk(), complaints.append)
    layout, codec = setup.layouts[0], setup.settings.codec_down
    ranges = ((0, 1), (1, layout.block_count))
    data = bytes(tensors.byte_range(layout, 0, layout.block_count, codec)[1])
    digest = tensors.payload_digest(data, layout, ranges, codec)
    assert plane.digest_of(0, DiskPayload(ranges, data)) == digest
    for wrong in (data + b"\0", data[:-1], b""):
        assert plane.digest_of(0, DiskPayload(ranges, wrong)) == b""
    for gaps in ((), ((0, 1),), ((1, layout.block_count),), ((0, 1), (2, layout.block_count))):
        assert plane.digest_of(0, DiskPayload(gaps, data)) == b""
