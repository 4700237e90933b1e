"""Faults on purpose. `drop` is the one that `verify --inject` puts into a proof; the others are real bugs of other stacks, each as the same
mistake in this backend, by which `verify --mutations` shows what a proof sees (`catalog`, `run`)."""

from ..run.drop import DropReduction, drop_reduction, parse_fault

__all__ = ["DropReduction", "drop_reduction", "parse_fault"]
