"""A learner's model as a `state_dict()`: with the merged parameters, or with its own, in whole tensors."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
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


def is_unnoticed() -> bool:
    """Whether this thread is in `unnoticed`."""
    return threading.get_ident() in _READERS


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
    """The answer of `state_dict()` of the model, its parts, a module around it, and their copies, while a learner is
    here.

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
        # Whether a script has a state with merged parameters, which it may load again.
        self._has_merged_state = False
        self._texts: set[str] = set()
        # By the module's address.
        self._hooks: dict[int, StateHook] = {}
        self._handles: list[RemovableHandle] = []

    def begin(self, fragments: LearnerFragments, session: LearnerSession | None) -> None:
        """Follow the model: it holds the run's parameters, and steps come next."""
        self._fragments, self._session = fragments, session
        if self._tensors is not None:
            self._follow(self._tensors.model, self._tensors, fragments)

    def merge(self, module: nn.Module) -> None:
        """Have the states of this module hold the merged parameters, whatever their names are in it."""
        fragments, tensors = self._fragments, self._tensors
        if fragments is None or tensors is None or not fragments.shards.is_first_whole:
            return
        self._is_merging = True
        self._follow(module, tensors, fragments)
        if id(module) not in self._hooks:
            self.tell("save_merged() of a module that has none of the run's parameters changes nothing")
        for member in {module, tensors.model}:
            handle = member.register_load_state_dict_post_hook(_LoadHook(self))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def leave(self) -> None:
        """Let go of the modules, as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
        self._fragments = self._session = self._tensors = None

    def _follow(self, module: nn.Module, tensors: ModelTensors, fragments: LearnerFragments) -> None:
        """Hook the module, and what of it is saved by itself; a part of it is only told of."""
        run_names = {id(tensor): name for name, tensor in tensors.followed.items()}
        replicas = replicas_in(module)
        for path, member in module.named_modules():
            is_saved = not plain_name(path and f"{path}.", replicas) or hasattr(member, "save_pretrained")
            if not is_saved and not fragments.shards.is_first_whole:
                continue
            member_replicas = replicas_in(member) if replicas else ()
            values = *member.named_parameters(remove_duplicate=False), *member.named_buffers(remove_duplicate=False)
            names = {
                plain_name(name, member_replicas): run_names[id(value)]
                for name, value in values
                if id(value) in run_names
            }
            if not names:
                continue
            hook = self._hooks.get(id(member))
            if hook is None:
                hook = self._hooks[id(member)] = StateHook(self, names, member_replicas, is_inner=bool(path))
                self._handles.append(member.register_state_dict_post_hook(hook))
            hook.is_merged |= self._is_merging and is_saved

    def follow(self, hook: StateHook, owner: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Set the merged parameters in the state of a module, or tell whose weights it holds."""
        fragments, tensors = self._fragments, self._tensors
        if fragments is None or tensors is None or is_unnoticed():
            return
        own_names = {
            name: plain_name(name.removeprefix(prefix), hook.replicas) for name in state if name.startswith(prefix)
        }
        names = {name: hook.names[plain] for name, plain in own_names.items() if plain in hook.names}
        is_merged = hook.is_merged and self._ranks.is_first
        if names and is_merged:
            with _reading(self._session):
                full = tensors.full_state(fragments.manifest, fragments.global_vectors(), {})
            state.update({name: full[run_name] for name, run_name in names.items()})
        if self.is_over:
            return
        self._has_merged_state |= is_merged
        if not is_merged:
            self.tell(_ELSEWHERE if hook.is_merged else _OF_PART if self._is_merging else _OWN)
        elif not names:  # of adapters that were unloaded
            self.tell("state_dict() has none of the merged parameters, by name: it holds this region's own weights")
        elif any(getattr(module, "merged", False) is True for module in owner.modules()):
            self.tell("state_dict() of merged adapters: the weights below them hold this region's own adapters")

    def note_load(self) -> None:
        """A state was loaded into the model in mid-run."""
        if self._has_merged_state and not self.is_over and self._fragments is not None:
            self.tell(_LOADED)

    def tell(self, text: str) -> None:
        """Tell once whose weights are saved."""
        if text not in self._texts:
            self._texts.add(text)
            log.warning("%s", text)


_OWN: Final = (
    "state_dict() in mid-run holds this region's own weights. To save the run's, take `export` or global_state_dict(); "
    "or call save_merged(model): it then holds the merged ones, copies on the CPU, but not of a model in parts"
)
_OF_PART: Final = (
    "state_dict() of a part of the model holds this region's own weights: to save the run's, take it from "
    "global_state_dict(), or call save_merged(part)"
)
_ELSEWHERE: Final = (
    "state_dict() of this rank holds this region's own weights, that of rank 0 the merged ones. Where each rank saves "
    "its own, as a distributed checkpoint does: have rank 0 save it, with no_dist=True"
)
_OF_COPY: Final = (
    "state_dict() of a copy of the model: unless global_state_dict() was loaded into it, it holds this region's own "
    "weights"
)
_LOADED: Final = (
    "load_state_dict() in mid-run: since save_merged() a state_dict() has the merged weights, and to load it again "
    "undoes this region's last steps. To put weights back, take own_state_dict()"
)


class StateHook:
    """Has SavedStates follow a module's `state_dict()`.

    names: of merged parameters and buffers in the module, without wrappers, each with its name in the run. replicas: as
    `plain_name` takes them. is_inner: a module around it that is followed as well covers it. is_merged: its states are
    to be.
    """

    def __init__(
        self, states: SavedStates, names: Mapping[str, str], replicas: tuple[str, ...], *, is_inner: bool
    ) -> None:
        self.names, self.replicas, self.is_inner, self.is_merged = names, replicas, is_inner, False
        self._states = states

    def __call__(self, owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        """As torch calls it."""
        if not (self.is_inner and prefix):
            self._states.follow(self, owner, state, prefix)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        """Tell of the copy when it is saved; it may be that of a result."""
        return _SILENT if self._states.is_over else _CopyHook(self._states)

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay here, when the module is saved as a whole: who loads it may not have this package."""
        if not self._states.is_over:
            self._states.tell(
                "the model is pickled with this region's own weights: in a file, save global_state_dict() instead"
            )
        return partial, (_SILENT.func, *_SILENT.args)


class _CopyHook:
    """Tells whose weights a copy of the model holds, when it is saved."""

    def __init__(self, states: SavedStates) -> None:
        self._states = states

    def __call__(self, *_: object) -> None:
        if not is_unnoticed():
            self._states.tell(_OF_COPY)

    def __deepcopy__(self, memo: object) -> _CopyHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self()
        return partial, (_SILENT.func, *_SILENT.args)


class _LoadHook:
    """Hears of loads into the model; not into its copies."""

    def __init__(self, states: SavedStates) -> None:
        self._states = states

    def __call__(self, *_: object) -> None:
        self._states.note_load()

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _SILENT

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_SILENT.func, *_SILENT.args)
