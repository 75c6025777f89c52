"""A learner's model as a `state_dict()`: with the merged parameters, or with its own, in whole tensors."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.names import plain_name, replicas_in
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.local_fragments import LearnerFragments
from diloco_node.learner.ranks import Ranks

if TYPE_CHECKING:
    from diloco_node.learner.daemon_session import LearnerSession

log = logging.getLogger("diloco_node.learner")

_READERS: Final[set[int]] = set()
"""Threads that read a learner's state now."""


def model_state(
    tensors: ModelTensors,
    ranks: Ranks,
    fragments: LearnerFragments | None,
    vectors_of: Callable[[LearnerFragments], list[Tensor]],
    session: LearnerSession | None = None,
) -> dict[str, Tensor]:
    """Return the state with these vectors as parameters, as copies on the CPU; {} on ranks other than 0.

    Where ranks hold parts of the model, all of them call it.

    Args:
        fragments: None: alone, and the state is the model's own. session: no version is applied while it is read here,
            also in another thread than the loop's.

    Raises LearnerError: on another rank of a model that each rank holds, or not called by all that have to.
    """
    is_cut = tensors.is_cut if fragments is None else not fragments.shards.is_first_whole
    if is_cut:
        ranks.meet("global_state_dict() of a model in parts")
    elif fragments is not None and not ranks.is_first:
        raise LearnerError("the parameters are on rank 0 only; broadcast them if other ranks need them")
    if fragments is None:
        return tensors.host_state(is_whole=True, is_kept=ranks.is_first or not is_cut)
    with _reading(None if is_cut else session):
        whole = fragments.gathered(vectors_of(fragments))
        remainder = tensors.host_state(is_whole=False, is_kept=whole is not None)
        return {} if whole is None else tensors.full_state(fragments.manifest, whole, remainder)


@contextlib.contextmanager
def _reading(session: LearnerSession | None) -> Iterator[None]:
    """No version is applied meanwhile, and hooks leave alone what this thread asks for names by `state_dict()`."""
    thread = threading.get_ident()
    _READERS.add(thread)
    try:
        with contextlib.nullcontext() if session is None else session.link.lock:
            yield
    finally:
        _READERS.discard(thread)


@contextlib.contextmanager
def merged_saves(
    module: nn.Module,
    tensors: ModelTensors,
    ranks: Ranks,
    fragments: LearnerFragments,
    session: LearnerSession | None,
) -> Iterator[None]:
    """Within it the module's `state_dict()` holds the merged parameters: trainers save the run's model in mid-run, too.

    So does that of the module below wrappers, and of a model of Hugging Face inside, which scripts save by itself.
    Rank 0 has them. For a model in parts all ranks would have to call it together, so there it is as ever.
    """
    if not fragments.shards.is_first_whole:
        if ranks.is_first:
            log.warning("checkpoints of the trainer hold this region's own weights; `export` writes the merged ones")
        yield
        return
    replicas = replicas_in(module)
    copies: list[nn.Module] = []

    def replace(path: str, owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        # Inside of another's, which replaces it; or in a copy of the module, such as an average, with the same hook.
        if not ranks.is_first or threading.get_ident() in _READERS or (path and prefix):
            return  # rank 0 alone has the merged parameters
        if owner is not members[path]:
            if not path and not prefix and not copies:
                log.warning("state_dict() of a copy of the model: that holds this region's own weights, not the merged")
                copies.append(owner)
            return
        with _reading(session):
            full = tensors.full_state(fragments.manifest, fragments.global_vectors(), {})
        for name in [name for name in state if name.startswith(prefix)]:
            values = full.get(plain_name(path + name.removeprefix(prefix), replicas))
            if values is not None:
                state[name] = values

    members = {path and f"{path}.": member for path, member in module.named_modules()}
    handles = [
        member.register_state_dict_post_hook(partial(replace, path))
        for path, member in members.items()
        if not plain_name(path, replicas) or hasattr(member, "save_pretrained")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
