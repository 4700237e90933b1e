"""Operations that a `SumObserver` sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..base.observe import SumObserver


class Observable(Protocol):
    """What has an observer, or None."""

    observer: SumObserver | None


This = TypeVar("This", bound=Observable)
Operands = ParamSpec("Operands")
Result = TypeVar("Result")


def observed(
    operation: Callable[Concatenate[This, Operands], Result],
) -> Callable[Concatenate[This, Operands], Result]:
    """A method that shows its operands and its result."""

    @wraps(operation)
    def shown(self: This, *operands: Operands.args, **more: Operands.kwargs) -> Result:
        result = operation(self, *operands, **more)
        if self.observer is not None:
            self.observer.computed(operation.__name__, (*operands, *more.values()), result)
        return result

    return shown
