"""Loops of other libraries join a run by their callback alone: the commands of examples/README.md as they stand."""

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_node.core.ledger.election import Role
from diloco_node.lab.demo.region_processes import RegionProcess, free_ports
from diloco_node.learner.checkpoint import FileName, newest_first
from tests.kit.cluster_kit import Cluster, Statuses, all_train, is_running
from tests.kit.data_kit import END, rows_of, write_jsonl, write_tokenizer
from tests.kit.repository import ROOT
from tests.kit.row_log import read_lives, write_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

NEEDS = {
    "hf_trainer.py": ("transformers", "accelerate"),
    "lightning_fit.py": ("lightning", "torchdata"),
    "accelerate_loop.py": ("accelerate",),
    "fsdp_loop.py": (),
    "llama.py": ("transformers",),
    "torchtitan_train.py": ("torchtitan",),
}
EXAMPLES = [pytest.param(name, marks=() if name == "accelerate_loop.py" else pytest.mark.long) for name in NEEDS]
"""Each takes minutes: `make test` has the quickest."""

MICRO_BATCHES = {"accelerate_loop.py": 4}
BATCH_TOKENS = 8 * 64
TITAN = "torchtitan_train.py"
TITAN_TOML = """
[job]
dump_folder = "{folder}"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{folder}/tokenizer"
[training]
dataset = "c4_test"
dataset_path = "{folder}/text"
local_batch_size = 2
seq_len = 32
steps = 1000000
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
"""


class Page:
    """examples/README.md: its fences marked `sh`, by the heading above them."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[str]] = {}
        text = (ROOT / "examples" / "README.md").read_text()
        for section in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
            heading, _, body = section.partition("\n")
            found = re.findall(r"^```sh\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
            self.blocks[heading.partition(":")[0].strip("`")] = found

    def script(self, example: str) -> str:
        """Everything that a reader of this example types. It waits for a line of input before it looks and ends."""
        (make,), start, (look, end) = self.blocks["Make a run of two regions"], self.blocks[example], self._last
        # Others may have these ports just now.
        for port, free in zip(("7400", "7500"), free_ports(2), strict=True):
            assert f"127.0.0.1:{port}" in make
            make = make.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
        return "\n".join((make, *start, "read go", look, end))

    @property
    def _last(self) -> list[str]:
        return self.blocks["Look at it, and end it"]

    def ranks(self, example: str) -> dict[str, int]:
        """By region, how many processes train."""
        started = re.findall(r"--region (\w+) -- (.*)", "\n".join(self.blocks[example]))
        return {name: int((re.findall(r"--nproc-per-node (\d+)", line) or [1])[0]) for name, line in started}


class ByHand(Cluster):
    """Regions that a shell has started."""

    def __init__(self, folder: Path, names: list[str], shell: asyncio.subprocess.Process) -> None:
        self.folder = folder
        self.names = names
        self.lost = {name: [] for name in names}
        self.regions = {name: RegionProcess(name, 0, folder / name, process=shell) for name in names}


def a_checkout(folder: Path) -> Path:
    """A folder with `examples` in it; beside it `diloco-node`, `python` and `torchrun` of an active environment."""
    checkout, programs = folder / "checkout", folder / "bin"
    checkout.mkdir()
    programs.mkdir()
    (checkout / "examples").symlink_to(ROOT / "examples")
    python = shlex.quote(sys.executable)
    modules = {"diloco-node": "-m diloco_node.main", "torchrun": "-m torch.distributed.run", "python": ""}
    for name, module in modules.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {python} {module} "$@"\n')
        (programs / name).chmod(0o755)
    return checkout


def skip_without(example: str) -> None:
    missing = [name for name in NEEDS[example] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: pip install 'diloco-node[hf,lightning,titan]'")


def write_titan_settings(folder: Path) -> Path:
    write_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    write_jsonl(folder / "text" / "rows.jsonl", rows_of(300))
    path = folder / "train.toml"
    path.write_text(TITAN_TOML.format(folder=folder))
    return path


def for_a_cpu(script: str, folder: Path) -> str:
    """torchtitan's settings, and what it needs to run on a machine like this."""
    settings = write_titan_settings(folder)
    where = f"../examples/{TITAN}"
    assert script.count(where) == 2
    script = script.replace(where, f"-m tests.kit.titan_on_cpu {where}")
    return script.replace(" train.toml", f" {shlex.quote(str(settings))}")


async def come_back(cluster: Cluster, before: Statuses) -> None:
    """Kill a learner, the first of its ranks if there are two, and wait until it is in merges again."""
    was = before["west"]
    os.kill(was["pids"]["learner"], signal.SIGKILL)
    await cluster.until(
        "the learner is back", lambda now: all_train(now) and now["west"]["pids"]["learner"] != was["pids"]["learner"]
    )
    await cluster.until_merged("west", why="after its learner was killed")


@pytest.mark.parametrize("example", EXAMPLES)
async def test_an_example_trains_in_two_regions_as_its_readme_says(tmp_path: Path, example: str) -> None:
    skip_without(example)
    page = Page()
    script, ranks = page.script(example), page.ranks(example)
    checkout = a_checkout(tmp_path)
    if example == TITAN:
        script = for_a_cpu(script, tmp_path)
    env = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    env |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    output = tmp_path / "output.txt"
    with output.open("wb") as told:
        shell = await asyncio.create_subprocess_exec(
            *("sh", "-e", "-c", script),
            cwd=checkout,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=told,
            stderr=told,
            start_new_session=True,
        )
    cluster = ByHand(checkout / "two-regions" / "state", sorted(ranks), shell)
    try:
        before = await cluster.until_trains()
        after = await cluster.until_commits(4)
        if example == TITAN:  # ranks of fsdp_loop.py come back in tests/e2e/test_sharded_regions.py
            await come_back(cluster, before)
            after = await cluster.until_commits(4)
        for name in cluster.names:
            learner = after[name]["learner"]
            assert (learner["loss"] is not None) == (example != TITAN), "its model returns no loss"
            batch = BATCH_TOKENS * MICRO_BATCHES.get(example, 1) * ranks[name]
            expected = learner["step"] * batch if example != TITAN else learner["tokens"]
            assert learner["tokens"] == expected, "tokens of all ranks and micro-batches"
            assert learner["tokens"] % learner["step"] == 0, "each step has as many tokens"
        assert shell.stdin is not None
        shell.stdin.write(b"go\n")
        assert await asyncio.wait_for(shell.wait(), 600) == 0
        said = output.read_text()
        # Whatever the role: on a machine that stands still an election may be on.
        rows = re.findall(rf"^(\w+) +(?:{'|'.join(Role)}) ", said, re.MULTILINE)
        assert set(rows) == set(cluster.names), "status"
        digests = re.findall(r"^([0-9a-f]{64})  state/(\w+)/final.safetensors$", said, re.MULTILINE)
        assert {name for _, name in digests} == set(cluster.names)
        assert len({digest for digest, _ in digests}) == 1
        cluster.check_equal()
        assert cluster.account().faults == ()
    except AssertionError:
        for log in (output, *sorted((checkout / "two-regions").glob("*.log"))):
            print(f"{log.name}:\n{log.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)  # supervisors, which end what they have started
        await shell.wait()


ROWS = 320
KILLS = ((0, 3), (2, 0), (1, 40), (1, 0), (0, 70))
"""After so many checkpoints of a life, and so many steps more."""

IMPORTS = {name: ("torch", *modules) for name, modules in NEEDS.items()} | {
    "hf_trainer.py": ("torch", "transformers.trainer"),
    "lightning_fit.py": ("torch", "lightning.pytorch", "torchdata.stateful_dataloader"),
}
"""A life that is forked with them begins in a second."""

EPOCH_STEPS = {"hf_trainer.py": 40, "lightning_fit.py": 40, "accelerate_loop.py": 10}
"""The others draw rows, or cut text into them, without end."""


async def until(what: str, is_so: Callable[[], bool], wait_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + wait_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {wait_s:.0f} s: {what}"
        await asyncio.sleep(0.03)


@pytest.mark.long  # tests/integrations/test_positions.py kills a learner of each kind within one process
@pytest.mark.parametrize("example", sorted(NEEDS.keys() - {"llama.py"}))  # its ShardLoader goes by the run's merges
async def test_an_example_that_is_killed_five_times_trains_no_row_again_but_those_since_its_checkpoint(
    tmp_path: Path, example: str
) -> None:
    skip_without(example)
    data = tmp_path / "data"
    write_text(data, ROWS)
    cluster = Cluster(tmp_path / "run", 1)
    (region,) = cluster.regions.values()
    region.env = {**region.env, "OMP_NUM_THREADS": "1"}
    region.settings += (f"learner.preload={','.join(IMPORTS[example])}",)
    run = [str(ROOT / "tests/kit/row_log.py"), str(data)]
    script = str(ROOT / "examples" / example)
    command = [sys.executable, *run, script]
    if example == TITAN:
        settings = ["--job.config_file", str(write_titan_settings(tmp_path))]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command = [sys.executable, *launch, *run, str(ROOT / "tests/kit/titan_on_cpu.py"), script, *settings]
    folder = region.state_dir / "learner" / "checkpoints"
    files_at_kills: list[list[FileName]] = []
    try:
        await region.start(cluster.config, command)
        for number, (checkpoints, steps) in enumerate(KILLS):
            await until(f"life {number} begins", lambda number=number: len(read_lives(data)) == number + 1)
            pid = read_lives(data)[-1][0]
            files = set(newest_first(folder)) - {None}
            for _ in range(checkpoints):
                await until("a checkpoint", lambda files=files: bool(set(newest_first(folder)) - files))
                files |= set(newest_first(folder))
            count = len(read_lives(data)[-1][1])
            await until("steps", lambda count=count, steps=steps: len(read_lives(data)[-1][1]) >= count + steps)
            os.kill(pid, signal.SIGKILL)
            await until("its end", lambda pid=pid: not is_running(pid))
            files_at_kills.append(newest_first(folder))
        await until("the last life trains", lambda: len(read_lives(data)) == 6 and len(read_lives(data)[-1][1]) > 20)
        await cluster.end()
    finally:
        await cluster.clear()
    lives = [steps for _, steps in read_lives(data)]
    told = re.findall(r"lost: (\d+) steps since its checkpoint", (region.state_dir / "logs" / "start.log").read_text())
    assert len(told) == len(KILLS)
    line: list[str] = []  # of each step, its rows, as if nobody had been killed
    begins = {}  # of each incarnation, where its first step is in the line
    checkpoint: FileName | None = None
    for number, steps in enumerate(lives):
        begin = 0 if checkpoint is None else begins[checkpoint.incarnation] + checkpoint.step
        again = line[begin:]
        assert steps[: len(again)] == again[: len(steps)], f"life {number}: it goes on where the checkpoint was"
        line[begin:] = steps + again[len(steps) :]
        if number == len(KILLS):
            break
        checkpoint = next(iter(files_at_kills[number]), None)
        begins[number + 1] = begin
        # A checkpoint counts from the boundary after it is on disk: a kill in between tells of the one before.
        saved = [*(file.step for file in files_at_kills[number] if file.incarnation == number + 1), 0][:2]
        lost, said = [len(steps) - step for step in saved], int(told[number])
        print(f"{example}: life {number} of {len(steps)} steps, {lost[0]} since its checkpoint, told {said}")
        assert lost[0] <= said + 1, "a step may be noted, but not counted yet"
        assert said in {count - uncounted for count in lost for uncounted in (0, 1)}, "exact, for one of both"
    width = EPOCH_STEPS.get(example, 0)
    for epoch in (line[start : start + width] for start in range(0, len(line), width)) if width else ():
        rows = " ".join(epoch).split()
        assert len(set(rows)) == len(rows), "no row twice in an epoch"
        assert len(rows) == ROWS or len(epoch) < width
