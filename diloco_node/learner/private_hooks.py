"""A learner's hooks on a module of the script, of which nothing is pickled with the module.

A reader of the file may not have this package, or let pass only the classes of the model (`weights_only=True`).
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from diloco_node.learner.living_objects import living_objects


class PrivateHook:
    """A hook that stays with its module, in this process. call: what it does, with what torch gives it."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any, **_: Any) -> None:
        """Do it."""
        self._call(*arguments)

    def copied(self) -> PrivateHook | None:
        """Return the hook of a copy of the module; None: it has none."""
        return None

    def pickled(self) -> None:
        """Hear that the module is pickled."""


class PrivateHooks(OrderedDict[int, Any]):
    """A module's hooks of one kind by number, in place of torch's own dictionary of them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivateHooks:
        hooks = {at: hook.copied() if is_private(hook) else copy.deepcopy(hook, memo) for at, hook in self.items()}
        return PrivateHooks({at: hook for at, hook in hooks.items() if hook is not None})

    def __reduce__(self) -> str | tuple[Any, ...]:
        for hook in filter(is_private, self.values()):
            hook.pickled()
        return OrderedDict((at, hook) for at, hook in self.items() if not is_private(hook)).__reduce__()


def is_private(hook: object) -> bool:
    """Whether it is a learner's."""
    return isinstance(hook, PrivateHook)


def living_handles() -> list[RemovableHandle]:
    """Return the handles of all hooks: where modules have many, a search of the process for each takes seconds."""
    return living_objects(RemovableHandle)


def private_hooks(
    module: nn.Module, kind: str, handles: Callable[[], list[RemovableHandle]] = living_handles
) -> PrivateHooks:
    """Return a module's hooks of a kind, such as `_state_dict_hooks`, as a dictionary that keeps ours to itself."""
    before = vars(module)[kind]
    if isinstance(before, PrivateHooks):
        return before
    hooks = vars(module)[kind] = PrivateHooks(before)
    for handle in handles() if before else ():
        if handle.hooks_dict_ref() is before:  # else its hook would stay
            handle.hooks_dict_ref = weakref.ref(hooks)
    return hooks
