"""A region of two hosts beside one with a single process.

The FSDP2 example on one host is in tests/e2e/test_frameworks.py, the recipe on two ranks in tests/e2e/test_export.py.
"""

import asyncio
import contextlib
import os
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from tests.kit.cluster_kit import Cluster, all_train
from tests.kit.ports import free_port
from tests.kit.repository import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(2400)]

EXAMPLE = str(ROOT / "examples" / "fsdp_loop.py")

RENDEZVOUS_S = 45
"""Long enough for two launchers that start at once; docs/sharding.md says what else it has to be."""


class SecondHost:
    """Another host of a region, on loopback: a service that starts its launcher again whenever it has failed."""

    def __init__(self, launcher: list[str]) -> None:
        self._command = shlex.join([*launcher, "--node-rank", "1", EXAMPLE])
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """As after a boot."""
        loop = f"until {self._command}; do sleep 1; done"
        elsewhere = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
        self._process = await asyncio.create_subprocess_exec("sh", "-c", loop, env=elsewhere, start_new_session=True)

    async def lose(self) -> None:
        """End the service, its launcher and their ranks at once."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            service = psutil.Process(self._process.pid)
            for one in [service, *service.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        await self._process.wait()


def of_two_hosts() -> list[str]:
    """The launcher of each host, but for which one it is."""
    port = str(free_port())
    hosts = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    return [sys.executable, "-m", "torch.distributed.run", *hosts, "--rdzv-conf", f"timeout={RENDEZVOUS_S}"]


async def test_a_region_of_two_hosts_survives_the_loss_of_the_second(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", 2)
    sharded, single = cluster.names
    launcher = of_two_hosts()
    second = SecondHost(launcher)
    try:
        await second.start()
        await cluster.regions[sharded].start(cluster.config, [*launcher, "--node-rank", "0", EXAMPLE])
        await cluster.regions[single].start(cluster.config, [sys.executable, EXAMPLE])
        before = await cluster.until_trains()
        now = await cluster.until_commits(4)
        learner = now[sharded]["learner"]
        assert learner["tokens"] == learner["step"] * 2 * 8 * 64, "tokens of both hosts"
        await second.lose()
        # At once: its launcher meets what is left of the first host's, which has no more use for it.
        await second.start()
        await cluster.until(
            "both hosts are back",
            lambda now: (
                all_train(now) and now[sharded]["learner"]["incarnation"] > before[sharded]["learner"]["incarnation"]
            ),
        )
        await cluster.until_merged(sharded, why="after a host was lost")
        now = await cluster.until_commits(4)
        learner = now[sharded]["learner"]
        assert learner["tokens"] == learner["step"] * 2 * 8 * 64, "tokens of both hosts"
        await cluster.end()
        cluster.check_equal()
        assert cluster.account().faults == ()
    finally:
        await cluster.clear()
        await second.lose()
