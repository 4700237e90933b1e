"""The forms of products of exact numerics, and who makes each: the library or our kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

PRODUCT_FORMS = ("project", "contract", "multiply", "weight_gradient", "experts", "heads")
"""Layers that are cut along their outputs, and along their inputs; matrices that nobody cuts; weight gradients;
experts, all three; the heads of an attention that drops probabilities."""


@dataclass(frozen=True)
class ProductChoice:
    """Who makes a form: our `kernels` or else the library, and why, after "since"."""

    kernels: bool
    why: str

    @property
    def by(self) -> str:
        """In words."""
        return "our kernels" if self.kernels else "the library"

    def __str__(self) -> str:
        return f"{self.by}, since {self.why}"


ProductChoices = Mapping[str, ProductChoice]
"""By form, of those that the model has."""


def in_order(forms: Collection[str]) -> tuple[str, ...]:
    """Forms as `PRODUCT_FORMS` has them, each once."""
    return tuple(form for form in PRODUCT_FORMS if form in forms)


def choices_text(choices: ProductChoices) -> str:
    """One line.

    >>> choices_text({"project": ProductChoice(True, "it is so"), "contract": ProductChoice(True, "it is so")})
    'products: project, contract by our kernels, since it is so'
    """
    by_words: dict[str, list[str]] = {}
    for form, choice in choices.items():
        by_words.setdefault(str(choice), []).append(form)
    return "products: " + "; ".join(f"{', '.join(forms)} by {words}" for words, forms in by_words.items())
