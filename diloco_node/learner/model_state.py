"""A learner's model as a `state_dict()`: with the merged parameters, or with its own, in whole tensors."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.names import plain_name, replicas_in
from diloco_node.learner.layouts.tensors import ModelTensors, memory_of
from diloco_node.learner.local_fragments import LearnerFragments
from diloco_node.learner.private_hooks import PrivateHook, is_private, living_handles, private_hooks
from diloco_node.learner.ranks import Ranks
from diloco_node.shared_memory import BUSY_MAX_S

if TYPE_CHECKING:
    from diloco_node.learner.daemon_session import LearnerSession

log = logging.getLogger("diloco_node.learner")

MERGED_WORK: Final = "work with the merged model"
"""Activity of a pause that no loop has announced."""

_READERS: Final[set[int]] = set()
"""Threads that read a learner's state now."""


def model_state(
    tensors: ModelTensors,
    ranks: Ranks,
    fragments: LearnerFragments | None,
    vectors_of: Callable[[LearnerFragments], list[Tensor]],
    session: LearnerSession | None = None,
) -> dict[str, Any]:
    """Return the state with these vectors as parameters, as copies on the CPU; {} on ranks other than 0.

    Where ranks hold parts of the model, all of them call it.

    fragments: None: alone, and the state is the model's own. session: no version is applied while it is read here, also
    in another thread than the loop's.

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
    wrappers and of a model of Hugging Face inside: scripts save these by themselves. A tensor in a state is known by
    its memory, whatever it is called. For a model in parts all ranks would have to call it together, so there it is as
    ever.

    hold: is told of merged parameters that a script has. is_over: the model holds the run's result.
    """

    def __init__(self, tensors: ModelTensors, ranks: Ranks, hold: Callable[[Iterable[Tensor]], None]) -> None:
        self.is_over = False
        self._ranks, self._hold = ranks, hold
        # None: the learner has left. Copies of the model have this object for longer.
        self._tensors: ModelTensors | None = tensors
        # None: alone, or the learner has left.
        self._fragments: LearnerFragments | None = None
        self._session: LearnerSession | None = None
        self._is_merging, self._is_asked = False, True
        # Whether a script has a state with merged parameters, which it may load again.
        self._has_merged_state = False
        # Whether a state was loaded into the model since the last step.
        self._was_loaded = False
        self._texts: set[str] = set()
        self._handles: list[RemovableHandle] = []
        # Whether the learner's place says that the script works with the merged parameters.
        self._is_announced = False
        # Process and thread that make the steps, once there is one: another has no pause of the loop to announce.
        self._stepper = (0, 0)
        # By thread the state that is being made, and the merged parameters in it, by key: of modules in modules.
        self._replaced = threading.local()

    def begin(self, fragments: LearnerFragments, session: LearnerSession | None) -> None:
        """Follow the model: it holds the run's parameters, and steps come next."""
        self._fragments, self._session = fragments, session
        if self._tensors is not None:
            self._follow(self._tensors.model, self._tensors, fragments)

    def merge(self, module: nn.Module, *, is_asked: bool = True) -> None:
        """Have this module's states hold the merged parameters, whatever their names. is_asked: by the script."""
        fragments, tensors = self._fragments, self._tensors
        if fragments is None or tensors is None or not fragments.shards.is_first_whole:
            return
        self._is_merging, self._is_asked = True, is_asked
        self._follow(module, tensors, fragments)
        if self._hook_of(module) is None:
            self.tell("save_merged() of a module that has none of the run's parameters changes nothing")
        for member in {module, tensors.model}:
            if any(map(is_private, private_hooks(member, "_load_state_dict_post_hooks").values())):
                continue
            handle = member.register_load_state_dict_post_hook(PrivateHook(self._note_load))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def leave(self) -> None:
        """Let go of the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._fragments = self._session = self._tensors = None
        self._hold = lambda _: None

    def announce(self) -> None:
        """Announce a pause until the next step: the script has merged parameters, to save, upload or evaluate them."""
        if self._stepper != (os.getpid(), threading.get_ident()):
            return
        if (session := self._session) is not None and not session.place.activity:
            self._is_announced = True
            session.pause(MERGED_WORK, since_s=time.monotonic(), limit_s=BUSY_MAX_S)

    def end_pause(self) -> None:
        """End the pause that `announce` has begun."""
        # One inside of it, within which the loop has made a step, goes on.
        if self._is_announced and self._session is not None and self._session.place.activity == MERGED_WORK:
            self._is_announced = False
            self._session.pause("", since_s=0.0, limit_s=0.0)

    def _hook_of(self, module: nn.Module, handles: Callable[[], list[Any]] = living_handles) -> StateHook | None:
        hooks = private_hooks(module, "_state_dict_hooks", handles).values()
        return next((hook for hook in hooks if isinstance(hook, StateHook)), None)

    def _follow(self, module: nn.Module, tensors: ModelTensors, fragments: LearnerFragments) -> None:
        """Hook the module, and what of it is saved by itself; a part of it is only told of."""
        run_ids = {*map(id, tensors.followed.values())}
        replicas, handles = replicas_in(module), cache(living_handles)
        for path, member in module.named_modules():
            is_saved = not plain_name(path and f"{path}.", replicas) or hasattr(member, "save_pretrained")
            is_saved |= member is tensors.model
            if not is_saved and not fragments.shards.is_first_whole:
                continue
            if run_ids.isdisjoint(map(id, _values_of(member))):
                continue
            hook = self._hook_of(member, handles)
            if hook is None:
                hook = StateHook(self, is_inner=bool(path))
                handle = member.register_state_dict_post_hook(hook)
                # Before those of the script: what they make of a state is of the merged parameters, too.
                private_hooks(member, "_state_dict_hooks").move_to_end(handle.id, last=False)
                self._handles.append(handle)
            hook.is_merged |= self._is_merging and is_saved
            hook.paths.add(path)

    def follow(self, hook: StateHook, owner: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        """Set the merged parameters in the state of a module, or tell whose weights it holds; as torch calls a hook."""
        fragments, tensors = self._fragments, self._tensors
        if fragments is None or tensors is None or is_unnoticed():
            return
        if not (hook.is_merged and self._ranks.is_first):
            # A module around it that is followed answers for it; not one of the script's that holds only this part.
            is_covered = hook.is_inner and any(prefix.endswith(f"{path}.") for path in hook.paths)
            if not (is_covered and self._is_merging):
                self.tell(_ELSEWHERE if hook.is_merged else _OF_PART if self._is_merging else _OWN)
            return
        entries = {key: value for key, value in state.items() if key.startswith(prefix) and isinstance(value, Tensor)}
        names = tensors.run_names(entries)
        if any(entries[key] is tensors.followed[name] for key, name in names.items()):
            return self.tell("state_dict(keep_vars=True) holds this region's own parameters: to save, leave it out")
        if names:
            with _reading(self._session):
                full = tensors.full_state(fragments.manifest, fragments.global_vectors(), {}, {*names.values()})
            state.update({key: full[name] for key, name in names.items()})
            self.announce()
        names = self._all_replaced(state, names)
        # A hook between a module and the outer one may have renamed what the inner one's replaced.
        self._hold([value for key in names if isinstance(value := state.get(key), Tensor)])
        if self.is_over:
            return
        self._has_merged_state = True
        if names and not self._is_asked and not _is_saving():
            self.tell(_MERGED)
        own_values = {id(value): value for value in _values_of(owner)}
        places = {*map(memory_of, own_values.values())}
        run_names = {name for name, tensor in tensors.followed.items() if id(tensor) in own_values}
        absent = sorted(run_names - {*names.values()})
        strays = [key for key in entries.keys() - names.keys() if memory_of(entries[key]) not in places]
        strays = sorted(key for key in strays if entries[key].is_floating_point() and entries[key].numel() > 1)
        if not names:  # of adapters that were unloaded
            self.tell("state_dict() has none of the merged parameters: it holds this region's own weights")
        elif absent and strays:
            self.tell(
                f"state_dict() has {strays[0]!r}, which a hook of the script makes of this region's own weights, and "
                f"not {absent[0]!r}: hook the module that save_merged() is given, or save global_state_dict()"
            )
        elif strays:
            self.tell(
                f"state_dict() has {strays[0]!r}, which a hook of the script may make of this region's own weights: "
                "hook the module that save_merged() is given"
            )
        elif any(getattr(module, "merged", False) is True for module in owner.modules()):
            self.tell("state_dict() of merged adapters: the weights below them hold this region's own adapters")

    def _all_replaced(self, state: dict[str, Any], names: dict[str, str]) -> dict[str, str]:
        """Return the keys of the state that hold merged parameters, with the run's names: also those set before."""
        if getattr(self._replaced, "state", lambda: None)() is not state:
            self._replaced.state, self._replaced.names = lambda: None, {}
            with contextlib.suppress(TypeError):  # a plain dict that the script gave
                self._replaced.state = weakref.ref(state)
        merged_names: dict[str, str] = self._replaced.names
        merged_names |= names
        return merged_names

    def _note_load(self, *_: object) -> None:
        self._was_loaded = self._has_merged_state and not self.is_over

    def step(self) -> None:
        """A step comes: tell if a state was loaded into the model before it. After the last step that is no news."""
        self.end_pause()
        self._stepper = os.getpid(), threading.get_ident()
        if self._was_loaded:
            self._was_loaded = False
            self.tell(_LOADED)

    def tell_copy(self, *_: object) -> None:
        """Tell of a copy of the model that is saved."""
        if not is_unnoticed():
            self.tell(_OF_COPY)

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


_MERGED: Final = (
    "state_dict() in mid-run holds the run's merged weights, as the trainer saves them. This region's own values, such "
    "as for an average or to sample from, are in own_state_dict() and named_parameters()"
)


def _is_saving() -> bool:
    """Whether a function of this thread that has not returned is there to save, by its name, as those of trainers."""
    frame: FrameType | None = sys._getframe()
    while (frame := frame and frame.f_back) is not None:
        if any(word in frame.f_code.co_name for word in ("save", "checkpoint", "push_to_hub")):
            return True
    return False


def _values_of(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


class StateHook(PrivateHook):
    """Has SavedStates follow a module's `state_dict()`.

    is_inner: a followed module around it covers it. is_merged: its states are to be. paths: in those that are followed.
    """

    def __init__(self, states: SavedStates, *, is_inner: bool) -> None:
        super().__init__(partial(states.follow, self))
        self._states, self.is_inner, self.is_merged = states, is_inner, False
        self.paths: set[str] = set()

    def copied(self) -> PrivateHook | None:
        """Return what tells of the copy when it is saved; it may be that of a result."""
        return None if self._states.is_over else _CopyHook(self._states.tell_copy)

    def pickled(self) -> None:
        """Tell of it."""
        if not self._states.is_over:
            self._states.tell(
                "the model is pickled with this region's own weights: in a file, save global_state_dict() instead"
            )


class _CopyHook(PrivateHook):
    """Tells whose weights a copy of the model holds, when it is saved."""

    def copied(self) -> _CopyHook:
        return self

    def pickled(self) -> None:
        self()
