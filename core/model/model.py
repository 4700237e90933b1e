"""`ModelSpec`: a decoder transformer as numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..base.option import FieldProblem, noun
from .model_fields import ModelFields
from .model_rules import model_problems


@noun()
class ModelSpec(ModelFields):
    """A decoder (`core.model.model_fields` has its fields), which keeps the rules of `core.model.model_rules`.

    Raises `ModelError` with every rule that is broken.
    """

    def _problems(self, wrong: Collection[str]) -> Iterator[FieldProblem]:
        return model_problems(self, wrong)
