"""Types of the compiled loops in `csrc`; arrays are C-contiguous, `starts` of uint64. Words that lie in columns
are `[length, runs]`."""

from numpy import ndarray

def runs(words: ndarray, width: int, length: int, starts: ndarray, /) -> tuple[int, int]: ...
def summarize(
    words: ndarray, length: int, starts: ndarray, in_columns: bool, /
) -> tuple[tuple[int, int], int, float, tuple[float, float, float, float, float, float, float, float]]: ...
