"""Types of the compiled half in `csrc`. Addresses and sizes are whole numbers; a call's end is (how, peer)."""

MOST_MEMBERS: int
MOST_ROWS: int

def region_size(size: int, slot_bytes: int, board_bytes: int, /) -> int: ...
def join(
    rank: int,
    bases: tuple[int, ...],
    alive: tuple[int, ...],
    slot_bytes: int,
    board_bytes: int,
    /,
) -> object: ...
def can_read(process: int, address: int, /) -> bool: ...
def pull(handle: object, peer: int, process: int, source: int, target: int, num_bytes: int, /) -> tuple[int, int]: ...
def exchange(
    handle: object,
    sources: tuple[int, ...],
    sent: tuple[int, ...],
    targets: tuple[int, ...],
    received: tuple[int, ...],
    timeout_s: float,
    /,
) -> tuple[int, int]: ...
def gather(
    handle: object, source: int, targets: tuple[int, ...], received: tuple[int, ...], timeout_s: float, /
) -> tuple[int, int]: ...
def tree_sum(
    handle: object,
    sources: tuple[int, ...],
    strides: tuple[int, ...],
    widths: tuple[int, ...],
    rows: tuple[int, ...],
    merges: tuple[int, ...],
    target: int,
    is_shared: bool,
    timeout_s: float,
    /,
) -> tuple[int, int]: ...
def post(handle: object, peer: int, /) -> None: ...
def take(handle: object, peer: int, /) -> None: ...
def wait_posted(handle: object, peer: int, number: int, timeout_s: float, /) -> tuple[int, int]: ...
def wait_taken(handle: object, peer: int, number: int, timeout_s: float, /) -> tuple[int, int]: ...
def close(handle: object, /) -> None: ...
