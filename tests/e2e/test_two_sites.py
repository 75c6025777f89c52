"""Two regions and a witness in a bucket: the leader is lost with its disk, the other goes on, and both end as one."""

import asyncio
from pathlib import Path

import pytest

from diloco_node.core.types import RoundBody
from diloco_node.storage.object_store import bucket_scheme
from diloco_node.storage.swapped_object import FOLDER, SwappedObject
from tests.e2e.test_members_of_a_run import order
from tests.kit.cluster_kit import Cluster, Statuses
from tests.kit.s3_server import s3_server

# Of the gate are tests/core/test_two_sites.py, with cores, and tests/daemon/test_witness_link.py, with the S3 server.
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]
pytest.importorskip("obstore")
URL = "s3://sites/run"


def has_witness(statuses: Statuses) -> bool:
    """Whether the log of each region names the object."""
    rows = [row for status in statuses.values() for row in status["members"]["rows"] if row["kind"] == "witness"]
    return len(rows) == len(statuses) and all(row["has_folder"] and row["is_there"] for row in rows)


async def test_the_site_that_is_left_goes_on_and_the_lost_one_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path / "run", 2, changes={"sync_every = 16": "sync_every = 8"})
    try:
        with s3_server("sites") as environment:
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            await cluster.start()
            await cluster.until_trains()
            await cluster.until_commits(1)
            leader = await cluster.until_leader()
            (other,) = cluster.others(leader)
            said = await order(cluster, leader, "witness", URL)
            assert f"The voters are {', '.join(sorted((leader, other, 'witness')))} then" in said
            await cluster.until("the witness has its vote", has_witness)

            await cluster.kill(leader)
            cluster.wipe(leader)
            await cluster.until_commits(2, [other], why="alone")
            bucket = SwappedObject(URL, bucket_scheme(URL))
            payloads = set((await asyncio.to_thread(bucket.sizes)).keys()) - {f"{FOLDER}/record"}
            assert payloads, "the newest rounds are in the bucket, too"
            await cluster.start(leader)
            await cluster.until_merged(leader, why="with an empty folder")
        await cluster.until_commits(1, why="while the bucket is away")
        await cluster.end()
        cluster.check_equal(differences_max=None)
        assert cluster.account().faults == ()
        _, entries = cluster.ledger()
        alone = {f"{FOLDER}/{entry.hash.hex()}" for entry in entries if isinstance(entry.body, RoundBody)}
        assert payloads & alone, "what was merged alone is in the one history"
    finally:
        await cluster.clear()
