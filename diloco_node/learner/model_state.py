"""A learner's model as a `state_dict()`: with the merged parameters, or with its own, in whole tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.names import plain_name, replicas_in
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.local_fragments import LearnerFragments
from diloco_node.learner.ranks import Ranks

log = logging.getLogger("diloco_node.learner")


def model_state(
    tensors: ModelTensors,
    ranks: Ranks,
    fragments: LearnerFragments | None,
    vectors_of: Callable[[LearnerFragments], list[Tensor]],
) -> dict[str, Tensor]:
    """Return the state with these vectors as parameters, as copies on the CPU; {} on ranks other than 0.

    Where ranks hold parts of the model, all of them call it.

    Args:
        fragments: None: alone, and the state is the model's own.

    Raises:
        LearnerError: on another rank of a model that each rank holds, or not called by all that have to.
    """
    is_cut = tensors.is_cut if fragments is None else not fragments.shards.is_first_whole
    if is_cut:
        ranks.meet("global_state_dict() of a model in parts")
    elif fragments is not None and not ranks.is_first:
        raise LearnerError("the parameters are on rank 0 only; broadcast them if other ranks need them")
    if fragments is None:
        return tensors.own_state(is_kept=ranks.is_first or not is_cut)
    whole = fragments.gathered(vectors_of(fragments))
    remainder = tensors.rest_of_state(is_kept=whole is not None)
    return {} if whole is None else tensors.full_state(fragments.manifest, whole, remainder)


@contextlib.contextmanager
def merged_saves(module: nn.Module, tensors: ModelTensors, ranks: Ranks, fragments: LearnerFragments) -> Iterator[None]:
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
    is_asking = not ranks.is_first  # rank 0 alone has the merged parameters

    def replace(path: str, owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        nonlocal is_asking
        # Inside of another's, which replaces it; or in a copy of the module, such as an average, with the same hook.
        if is_asking or (path and prefix) or owner is not members[path]:
            return
        is_asking = True  # what follows asks for names by state_dict() itself
        try:
            full = tensors.full_state(fragments.manifest, fragments.global_vectors(), {})
        finally:
            is_asking = False
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
