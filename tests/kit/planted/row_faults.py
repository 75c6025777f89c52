"""Faults in who trains which rows of the data."""

from typing import Any

from diloco_node.core.data_shards import SHARDS
from diloco_node.core.row_book import RowBook
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.planting import Fault
from tests.kit.planted.learner_faults import spoil_learners


def _merge_any_rows(core: Any) -> None:
    """No region asks whose rows they are: else nobody merges them."""
    for account in (core.history.account, core.ledger._entry_gate._meaning._account):
        account.shards.fault = lambda _: ""


def _own_everything(core: Any) -> None:
    _merge_any_rows(core)
    history = core.history
    shards = tuple(range(SHARDS))
    history.shards = lambda run_id, region, incarnation: (
        history.roster.changes,
        shards,
        history.account.shards.starts(region, incarnation, shards),
    )


def _begin_anew(core: Any) -> None:
    _merge_any_rows(core)
    core.history.account.shards.starts = lambda region, incarnation, shards: (0,) * len(shards)


def _forget_named(host: Host) -> None:
    spoil_learners(host, lambda learner: setattr(learner, "book", RowBook(len(learner.parts), {})))


ROW_FAULTS = (
    Fault(
        "two-owners",
        "a shard of the data has one owner",
        spoil=_own_everything,
    ),
    Fault(
        "rows-again",
        "a life begins a shard behind the rows that lives before have named",
        spoil=_begin_anew,
        plant=_forget_named,
    ),
)
