"""A learner's model as a `state_dict()`: with the merged parameters, or with its own, in whole tensors."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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

_SILENT: Final = partial(sys.audit, "diloco_node.state_dict")
"""A hook that does nothing, of Python's own."""


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
def unnoticed() -> Iterator[None]:
    """Hooks leave alone what this thread asks for by `state_dict()`."""
    thread = threading.get_ident()
    is_outer = thread not in _READERS
    _READERS.add(thread)
    try:
        yield
    finally:
        if is_outer:
            _READERS.discard(thread)


@contextlib.contextmanager
def _reading(session: LearnerSession | None) -> Iterator[None]:
    """No version is applied meanwhile."""
    with unnoticed(), contextlib.nullcontext() if session is None else session.link.lock:
        yield


class SavedStates:
    """The answer of `state_dict()` of the model, of a module around it, and of their copies, until the learner leaves.

    The region's own weights, which is told once. After `merge` it is the merged ones on rank 0, also of modules below
    wrappers and of a model of Hugging Face inside: scripts save these by themselves. For a model in parts all ranks
    would have to call it together, so there it is as ever.

    Attributes:
        is_over: the model holds the run's result.
    """

    def __init__(self, tensors: ModelTensors, ranks: Ranks) -> None:
        self.is_over = False
        self._ranks = ranks
        # None: the learner has left. Copies of the model have this object for longer.
        self._tensors: ModelTensors | None = tensors
        # None: alone, or the learner has left.
        self._fragments: LearnerFragments | None = None
        self._session: LearnerSession | None = None
        self._is_merging = False
        self._texts: set[str] = set()
        # By the module's address.
        self._handles: dict[int, RemovableHandle] = {}

    def begin(self, fragments: LearnerFragments, session: LearnerSession | None) -> None:
        """Follow the model: it holds the run's parameters, and steps come next."""
        self._fragments, self._session = fragments, session
        if self._tensors is not None:
            self._follow(self._tensors.model, self._tensors)

    def merge(self, module: nn.Module) -> None:
        """Have the states of this module hold the merged parameters."""
        fragments, tensors = self._fragments, self._tensors
        if fragments is not None and tensors is not None and fragments.shards.is_first_whole:
            self._is_merging = True
            self._follow(module, tensors)

    def leave(self) -> None:
        """Let go of the modules, as they were."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._fragments = self._session = self._tensors = None

    def _follow(self, module: nn.Module, tensors: ModelTensors) -> None:
        replicas = replicas_in(module)
        for name, member in module.named_modules():
            path = name and f"{name}."
            if not plain_name(path, replicas) or hasattr(member, "save_pretrained"):
                if (handle := self._handles.get(id(member))) is not None:
                    handle.remove()
                hook = StateHook(self, path, replicas)
                names = [plain_name(path + name, replicas) for name, _ in member.named_parameters()]
                hook.is_expected = not path or not tensors.followed.keys().isdisjoint(names)
                self._handles[id(member)] = member.register_state_dict_post_hook(hook)

    def follow(self, hook: StateHook, owner: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Set the merged parameters in the state of a member of the model, or tell whose weights it holds."""
        fragments, tensors = self._fragments, self._tensors
        if fragments is None or tensors is None or threading.get_ident() in _READERS:
            return
        names = [name for name in state if name.startswith(prefix)]
        plain_names = {name: plain_name(hook.path + name.removeprefix(prefix), hook.replicas) for name in names}
        if not self._is_merging or not self._ranks.is_first:
            if not self.is_over and not tensors.followed.keys().isdisjoint(plain_names.values()):
                self.tell(_ELSEWHERE if self._is_merging else _OWN)
        elif not (hook.path and prefix):  # else inside of another's, which replaces it
            with _reading(self._session):
                full = tensors.full_state(fragments.manifest, fragments.global_vectors(), {})
            merged = {name: full[plain] for name, plain in plain_names.items() if plain in full}
            state.update(merged)
            if not self.is_over and not merged and hook.is_expected:
                self.tell("state_dict() has none of the merged parameters, by name: it holds this region's own weights")
            elif not self.is_over and any(getattr(module, "merged", False) is True for module in owner.modules()):
                self.tell("state_dict() of merged adapters: the weights below them hold this region's own adapters")

    def tell(self, text: str) -> None:
        """Tell once whose weights are saved."""
        if text not in self._texts:
            self._texts.add(text)
            log.warning("%s", text)


_OWN: Final = (
    "state_dict() in mid-run holds this region's own weights. To save the run's, take `export` or global_state_dict(); "
    "or call save_merged(model): it then holds the merged ones, copies on the CPU, but not of a model in parts"
)
_ELSEWHERE: Final = (
    "state_dict() of this rank holds this region's own weights, that of rank 0 the merged ones. Where each rank saves "
    "its own, as a distributed checkpoint does: have rank 0 save it, with no_dist=True"
)
_OF_COPY: Final = (
    "state_dict() of a copy of the model: unless global_state_dict() was loaded into it, it holds this region's own "
    "weights"
)


class StateHook:
    """Has SavedStates follow a member's `state_dict()`.

    path: of the member in the model, "" or with a dot at its end. is_expected: it has merged parameters, or should.
    """

    def __init__(self, states: SavedStates, path: str, replicas: tuple[str, ...]) -> None:
        self.path, self.replicas, self.is_expected, self._states = path, replicas, True, states

    def __call__(self, owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        """As torch calls it."""
        self._states.follow(self, owner, state, prefix)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        """Tell of the copy when it is saved; it may be that of a result."""
        return _SILENT if self._states.is_over else _CopyHook(self._states, self.path, self.replicas)

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay here, when the module is saved as a whole: who loads it may not have this package."""
        if not self._states.is_over:
            self._states.tell(
                "the model is pickled with this region's own weights: in a file, save global_state_dict() instead"
            )
        return partial, (_SILENT.func, *_SILENT.args)


class _CopyHook(StateHook):
    def __call__(self, *_: object) -> None:
        self._states.tell(_OF_COPY)

    def __reduce__(self) -> tuple[Any, ...]:
        self._states.tell(_OF_COPY)
        return partial, (_SILENT.func, *_SILENT.args)
