"""The end of a run for its training script: the wish for it, and the final parameters in the model.

When the run is over every rank's model holds exactly what `final.safetensors` does, without the few own steps that were
made meanwhile: what a script or a callback saves, evaluates or goes on with from `should_stop` on is the run's result.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Final

from diloco_node.core.bounds import REASON_BYTES
from diloco_node.errors import LearnerError
from diloco_node.learner.local_fragments import LearnerFragments
from diloco_node.learner.process_signals import LearnerPlace, start_of
from diloco_node.learner.ranks import Ranks
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, PlaceMark, request_area
from diloco_node.wire.learner_link import NO_SNAPSHOT, UNATTACHED, Failed, VersionOffered

if TYPE_CHECKING:
    from diloco_node.learner.boundary import StepBoundaries
    from diloco_node.learner.daemon_session import LearnerSession

FINAL_WAIT_S: Final = 60.0
"""A daemon that has finished the run offers its last versions within moments; it may be a new one by then."""

LATE_STEP: Final = (
    "a step after the run's end is in no model: it is undone, and so are those that follow. Leave the loop at "
    "should_stop"
)

log = logging.getLogger("diloco_node.learner")


_leavers: Final[set[int]] = set()
"""Numbers of processes of which an attach has left, or was refused: this one, or those that it was forked from. A mark
alone may be of the life before: in a container of its own that had this number, too."""


def failure(error: BaseException) -> Failed:
    """Return the last word of a learner that an exception ends, whatever text it has."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception as second:  # noqa: BLE001 - the script's own class fails at its text
        text = f"{type(error).__name__}, whose text fails with a {type(second).__name__}"
    return Failed(text.encode(errors="replace").decode()[:1000])


@contextlib.contextmanager
def refusals_noted() -> Iterator[None]:
    """Leave word for the supervisor if `attach` refuses this process: its script may catch that, and exit with 0."""
    try:
        yield
    except Exception as error:
        if os.environ.get("DILOCO_SUPERVISOR") and os.environ.get("DILOCO_SOCKET") and LearnerPlace.is_free():
            log.error("attach() refuses this script: %s", error)
            _change_mark(partial(_own_mark, failure(error).reason))
        raise


def note_refusal_of_rank(error: BaseException) -> None:
    """Leave word for the supervisor in the mark of rank 0, which waits for this rank, and hears of nothing."""
    _change_mark(lambda last: None if last is None or last.has_left else replace(last, fault=failure(error).reason))


def _own_mark(fault: str, last: PlaceMark | None) -> PlaceMark | None:
    pid = os.getpid()
    # The learner may be another rank, or the process that has started this one.
    is_free = last is None or (not (last.has_left and pid in _leavers) if last.pid == pid else not start_of(last.pid))
    if not is_free:
        return None
    if last is not None and last.has_left and last.pid != pid:
        return replace(last, fault=fault)  # of this life or of the one before: the supervisor knows
    _leavers.add(pid)
    return PlaceMark(pid, fault=fault)


def remember(mark: PlaceMark) -> PlaceMark:
    """Return a mark of this process, which may attach again: that it has left is known then."""
    if mark.has_left:
        _leavers.add(os.getpid())
    return mark


def _change_mark(change: Callable[[PlaceMark | None], PlaceMark | None]) -> None:
    """Write what the learner's mark is to be, if that is anything, and somebody keeps it."""
    memory = Path(os.environ.get("DILOCO_SUPERVISOR", ""))
    with contextlib.suppress(LearnerError), request_area(memory, PLACE_AREA, PLACE_BYTES) as area:
        if mark := change(PlaceMark.decode(area[:])):
            area[:] = mark.encode()


def mark_of_earlier(memory: Path) -> tuple[mmap.mmap, bool] | None:
    """Return the area with the mark of an attach of this process that has left, or was refused, and whether it has
    left; None: there was none."""
    if os.getpid() not in _leavers:
        return None
    with contextlib.suppress(LearnerError):  # a learner may come before its region
        area = request_area(memory, PLACE_AREA, PLACE_BYTES)
        last = PlaceMark.decode(area[:])
        if last is not None and last.pid == os.getpid():
            return area, last.has_left
        area.close()
    return None


def _last_errors() -> tuple[BaseException | None, ...]:
    """Return what ends a process of multiprocessing, and any other, if an exception does."""
    return sys.exc_info()[1], getattr(sys, "last_value", None)


def note_end(area: mmap.mmap) -> Callable[[], object]:
    """Have the mark in the area say that this process came to its end, unless an exception ends it, or a kill: scripts
    need not close what `attach` returned. Returns what takes that back."""
    handled = _last_errors()

    def write() -> None:
        error = next((error for error in _last_errors() if error is not None and error not in handled), None)
        mark = PlaceMark.decode(area[:])
        is_good = error is None or (isinstance(error, SystemExit) and not error.code)
        if mark is not None and mark.pid == os.getpid() and is_good:
            area[:] = replace(mark, has_ended=True).encode()

    return Finalize(None, write, exitpriority=0).cancel


class EndWish:
    """The script's wish that the run ends, on its way from any rank to the daemon.

    reason: of this rank's script, until it is passed on. final_by_s: until when the last versions are waited for,
    monotonic. has_result: the model has the final parameters. has_told_late: people know that later steps are undone.
    """

    def __init__(self) -> None:
        self.reason, self.final_by_s = "", math.inf
        self._is_made = self.has_result = self.has_told_late = False

    def make(self, reason: str) -> None:
        """Keep the first reason, cut to what a message takes. Later ones change nothing."""
        if self._is_made:
            log.info("the end of the run is wanted already; not again: %s", reason)
            return
        self._is_made = True
        text = str(reason).encode(errors="replace")[:REASON_BYTES].decode(errors="ignore")
        self.reason = text.strip() or "the training script wants it"

    def pass_on(self, ranks: Ranks, session: LearnerSession | None) -> None:
        """Tell the daemon. All ranks call it."""
        reasons = [text.decode() for text in ranks.all_bytes(self.reason.encode()) if text]
        self.reason = ""
        if session is not None and reasons:
            session.want_end(reasons[0])


def end_on_final(boundaries: StepBoundaries, foreign: str = "") -> bool:
    """Pass the wish on, and leave the final parameters in the model if the run is over; whether it holds them.

    All ranks call it. Where the script has ended their process group, they hold what their last step has left.

    foreign: what the script wrote to the model after its last step, in words; it is told that this is replaced.

    Raises LearnerError: another rank is gone, or the daemon refuses this learner.
    """
    ranks, fragments, session = boundaries.ranks, boundaries.fragments, boundaries.session
    if not ranks.can_meet:  # what the last step has left is known to each rank
        if session is not None and boundaries.wish.reason:
            session.want_end(boundaries.wish.reason)
        return boundaries.wish.has_result
    boundaries.wish.pass_on(ranks, session)
    versions = () if session is None else session.final_versions
    if ranks.share_bytes(b"1" if versions else b"") != b"1":
        return False

    def has_all() -> bool:
        positions = zip(fragments.positions, versions, strict=False)
        return all(position.base_version >= version for position, version in positions)

    now_s = time.monotonic()
    boundaries.wish.final_by_s = min(boundaries.wish.final_by_s, now_s + FINAL_WAIT_S)
    for _ in boundaries.settle(
        boundaries.wish.final_by_s - now_s,
        until=lambda: has_all() or boundaries.terminate.is_late(),
        is_in_step=boundaries.is_crossing.is_set(),
    ):
        pass
    if ranks.share_bytes(b"1" if has_all() else b"") == b"1":
        if foreign:
            boundaries.warn(
                f"{foreign.partition(':')[0]}: the run's final parameters replace that, as in final.safetensors"
            )
        _place_final(fragments, session)
        boundaries.wish.has_result = True
        return True
    if session is not None:
        boundaries.warn(
            "the run is over, but its last versions did not come here: take final.safetensors, not this model"
        )
    return False


def undo_late_step(boundaries: StepBoundaries) -> None:
    """Put the result back after a step past the run's end, for it is what a script saves next. All ranks call it."""
    boundaries.fragments.revert.end()
    _place_final(boundaries.fragments, boundaries.session)
    if not boundaries.wish.has_told_late:
        boundaries.wish.has_told_late = True
        boundaries.warn(LATE_STEP)


def is_at_end(boundaries: StepBoundaries, was_over: bool, has_result: bool) -> bool:
    """Share whether the run is over for these ranks: where it ended while they waited to leave, with its parameters.

    was_over: they knew it before they left. has_result: the model held its parameters then. A region that was removed
    has none to wait for.
    """
    session = boundaries.session
    end = b"" if session is None or not session.stop_reason else b"result" if session.final_versions else b"none"
    end = boundaries.ranks.share_bytes(end)
    # A process that had to go before the last versions came is followed by another; else nobody waits for them again.
    is_settled = was_over and (has_result or end == b"none" or not boundaries.are_asked_to_stop())
    return bool(end) and (is_settled or end_on_final(boundaries))


def _place_final(fragments: LearnerFragments, session: LearnerSession | None) -> None:
    """Set the model to the global parameters, as a new process is set to them."""
    whole = fragments.gathered(fragments.global_vectors())
    # A daemon that comes now is told of no fragment as unattached, and writes to no slot that is read here.
    with contextlib.nullcontext() if session is None else session.link.lock:
        for index, position in enumerate(fragments.positions):
            fragments.positions[index] = UNATTACHED
            offer = VersionOffered(index, position.base_version, NO_SNAPSHOT, slot=fragments.slots[index])
            fragments.apply(offer, None if whole is None else whole[index])
            fragments.positions[index] = position  # as the daemon knows it
