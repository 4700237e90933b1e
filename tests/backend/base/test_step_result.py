"""Results of a run's steps come out as they went in, and take so many bytes each."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from shardproof.backend.base.step_result import StepResult, StepResults

numbers = st.floats(allow_nan=False)
counts = st.integers(0, 2**53)
results = st.builds(
    StepResult,
    step=counts,
    loss=numbers,
    grad_norm=numbers,
    elapsed_s=numbers,
    num_tokens=counts,
    validation_loss=st.none() | numbers,
    aux_loss=numbers,
    mtp_loss=numbers,
    loss_scale=numbers,
    skipped=st.booleans(),
    learning_rate=numbers,
    num_microbatches=counts,
)


@given(st.lists(results, max_size=8), st.slices(8))
def test_results_come_out_as_they_went_in(given_results: list[StepResult], part: slice) -> None:
    found = StepResults()
    for each in given_results:
        found.append(each)
    for stored in (found, pickle.loads(pickle.dumps(found))):
        assert list(stored) == given_results and stored[part] == given_results[part]
    if given_results:
        assert found[-1] == given_results[-1]
        assert {name: type(getattr(found[0], name)) for name in ("step", "skipped", "num_tokens")} == {
            "step": int,
            "skipped": bool,
            "num_tokens": int,
        }


def test_a_step_takes_as_many_bytes_as_its_docstring_says() -> None:
    found = StepResults()
    lengths = []
    for step in range(2):
        found.append(StepResult(step, 1.0, 2.0, 3.0, 4))
        lengths.append(len(found._numbers) * found._numbers.itemsize)
    assert lengths == [88, 176]
