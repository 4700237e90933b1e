"""Types of the compiled loops in `csrc`; arrays are C-contiguous."""

from numpy import ndarray

def exact_sum(numbers: ndarray, squares: bool, /) -> tuple[int, int]: ...
def token_sums(
    address: int,
    samples: int,
    tokens: int,
    width: int,
    sample_stride: int,
    token_stride: int,
    block: int,
    whole: bool,
    target: int,
    /,
) -> None: ...
