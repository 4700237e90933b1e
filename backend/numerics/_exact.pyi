"""Types of the compiled loops in `csrc`; arrays are C-contiguous."""

from numpy import ndarray

def exact_sum(numbers: ndarray, squares: bool, /) -> tuple[int, int]: ...
