"""What each pipeline rank does, and in which order: actions, builders, lowering, passes, search, CSV,
timelines. Knows no plan."""

from .catalog import CATALOG, build, default_name
from .lower import lower
from .passes import add_unshard, merge_backward, split_backward
from .search import SearchResult, search_schedule

__all__ = [
    "CATALOG",
    "SearchResult",
    "add_unshard",
    "build",
    "default_name",
    "lower",
    "merge_backward",
    "search_schedule",
    "split_backward",
]
