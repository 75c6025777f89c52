"""The shards of the data as a daemon gives them, for tests without one."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from diloco_node.core.data_shards import region_shards
from diloco_node.core.types import CarryMode, Codec, MergeRule
from diloco_node.learner.region_shards import HERE
from diloco_node.wire.learner_link import ShardsGiven, Welcome


def shards_given(
    run_id: str, region: str, names: Iterable[str], *, changes: int = 0, starts: Mapping[int, int] | None = None
) -> ShardsGiven:
    """A region's shards among these members, begun at these rows."""
    own = region_shards(run_id, region, names)
    return ShardsGiven(changes, own, tuple((starts or {}).get(shard, 0) for shard in own))


def begin(
    run_id: str,
    region: str,
    names: Iterable[str],
    *,
    changes: int = 0,
    starts: Mapping[int, int] | None = None,
    folder: Path = Path("/nowhere"),
    fragments: int = 2,
) -> None:
    """Be the learner of a region, as a new process is."""
    HERE.clear()
    names = tuple(names)
    welcome = Welcome(
        region=region,
        region_index=0,
        regions=names,
        incarnation=1,
        run_id=run_id,
        fragments=fragments,
        sync_every=4,
        merge=MergeRule.RDA,
        codec_up=Codec.INT4,
        carry=CarryMode.CARRY,
        carry_steps_limit=100,
        global_step=0,
        manifest_digest="",
        wants_initial_state=False,
        state_dir=str(folder),
    )
    HERE.begin(welcome, is_first=True)
    HERE.follow(HERE.recall(shards_given(run_id, region, names, changes=changes, starts=starts)))


def follow(run_id: str, region: str, names: Iterable[str], *, changes: int = 1) -> None:
    """Hear of other members."""
    HERE.follow(HERE.recall(shards_given(run_id, region, names, changes=changes)))
