"""Real regions begin a run at an earlier version of another one; and those whose models differ are told at once."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from diloco_node.codec.digest import fragment_digest
from diloco_node.daemon.run_files import RunFiles
from diloco_node.daemon.state_replay import read_past
from diloco_node.storage.store import RegionStore
from tests.kit.cluster_kit import WAIT_S, Cluster
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

VERSION = 2

SCRIPT = """
import sys
import torch
import diloco_node

blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
model = torch.nn.ModuleDict({"blocks": blocks, "head" if sys.argv[1] == "b" else "lm": torch.nn.Linear(64, 8)})
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with diloco_node.attach(model, optimizer) as diloco:
    while not diloco.should_stop:
        diloco.step(tokens=1)
"""


@pytest.mark.long
async def test_a_new_run_begins_at_an_earlier_version_of_an_archive_that_still_trains(tmp_path: Path) -> None:
    first = Cluster(tmp_path / "first", 2, changes={"admin_port": "payload_archive = true\nadmin_port"})
    init = first.folder / first.names[0]
    changes = {'id = "demo"': f'id = "demo"\ninit = "{init}@{VERSION}"', "fragments = 4": "fragments = 3"}
    second = Cluster(tmp_path / "second", 2, changes=changes)
    try:
        await first.start()
        await first.until_trains()
        await first.until_commits(4 * 12, why="so that the version is old")
        await second.start()
        await second.until_trains()
        await second.until_commits(3)
        await second.end()
        await first.end()
        second.check_equal()
        assert second.account().faults == ()
    finally:
        await first.clear()
        await second.clear()
    files, past, parameters = await asyncio.to_thread(read_past, [init], version=VERSION)
    assert min(past.versions) == VERSION
    begun = RunFiles.read(second.folder / second.names[1])
    assert begun.genesis.manifest_digest != files.genesis.manifest_digest, "it is cut in another way"
    expected = np.sort(np.concatenate(parameters.momentum))
    for name in second.names:
        store = RegionStore(second.folder / name, is_read_only=True)
        states = [store.read_state(fragment, 0) for fragment in range(3) if 0 in store.state_versions(fragment)]
        for fragment, state in enumerate(states):
            assert fragment_digest(*state) == begun.genesis.fragment_digests[fragment]
        if len(states) == 3:
            assert np.array_equal(np.sort(np.concatenate([momentum for _, momentum in states])), expected)


@pytest.mark.long  # of the gate are tests/daemon/learner/test_other_models.py and tests/transport/test_transport.py
async def test_regions_whose_models_differ_end_their_learners_with_the_tensors(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    cluster = Cluster(tmp_path / "run", 2)
    try:
        for name, head in zip(cluster.names, "ab", strict=True):
            await cluster.regions[name].start(cluster.config, (sys.executable, str(script), head))
        for name in cluster.names:
            log = cluster.folder / name / "logs" / "learner.log"
            await eventually(
                lambda log=log: log.exists() and "would train another model in this run" in log.read_text(),
                f"{name} refuses its learner",
                within_s=WAIT_S,
                every_s=0.5,
            )
            text = log.read_text()
            assert "the models differ: tensor " in text
            assert "head.bias is only " in text
            assert "lm.bias is only " in text
    finally:
        await cluster.clear()
