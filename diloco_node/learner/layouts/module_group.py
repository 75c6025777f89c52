"""Several modules that one loop trains, such as a model and a loss with weights of its own, as one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from diloco_node.errors import LearnerError


class ModuleGroup(nn.Module):
    """The modules side by side. Names are those inside each module: those of one model stay as they are without others.

    Raises LearnerError: two of them have a parameter or a buffer of the same name.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        # Not registered: that would put a prefix before each name.
        self.__dict__["members"] = tuple(members)
        names = [name for member in members for name in member.state_dict()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise LearnerError(
                f"attach() was given several modules, and {len(twice)} names stand in more than one, such as "
                f"{twice[0]!r}: put the modules into one nn.ModuleDict, and attach that"
            )

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """All modules below, with their names inside their member."""
        for member in self.__dict__["members"]:
            yield from member.named_modules(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, with their names inside their member."""
        for member in self.__dict__["members"]:
            yield from member.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """All buffers, with their names inside their member."""
        for member in self.__dict__["members"]:
            yield from member.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The states of all in one."""
        return {name: value for member in self.__dict__["members"] for name, value in member.state_dict().items()}
