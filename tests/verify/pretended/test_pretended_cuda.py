"""Steps of plans on pretended CUDA: bits of one device, no race; and what is made wrong is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.core.plan.plan import Plan
from shardproof.verify.pretended.changes import CHANGES, PLANS
from shardproof.verify.pretended.environment import environment
from shardproof.verify.pretended.examine import examined

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None,
    reason="needs a C++ compiler",
)

TENSORS = """
import torch
a = torch.arange(6.0, device="cuda:2").view(2, 3).requires_grad_()
b = torch.nn.functional.silu(a) @ a.t()
b.sum().backward()
c = a.detach().cpu().requires_grad_()
d = torch.nn.functional.silu(c) @ c.t()
d.sum().backward()
assert b.device == torch.device("cuda:2") and torch.allclose(b.detach().cpu(), d.detach())
assert torch.allclose(a.grad.cpu(), c.grad)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    assert torch.cuda.current_stream() == stream
    e = torch.cat([a.detach(), a.detach()])[:, 1:].contiguous()
torch.cuda.current_stream().wait_stream(stream)
assert e.tolist() == [[1, 2], [4, 5]] * 2 and e.nonzero().shape == (8, 2)
x = torch.empty(0, device="cuda").resize_(3).fill_(2)
assert x.sum().item() == 6 and torch.arange(3, device="cuda")[x > 1].tolist() == [0, 1, 2]
try:
    a + c
except RuntimeError as error:
    assert "same device" in str(error), error
else:
    raise AssertionError("tensors of two devices were added")
print("right")
"""


def test_tensors_on_pretended_cuda_are_those_of_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TENSORS]
    done = subprocess.run(command, env=dict(environment(tmp_path)), capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


def test_a_process_without_the_environment_has_no_cuda() -> None:
    import torch

    assert not torch.cuda.is_available() or torch.version.cuda is not None


@pytest.mark.parametrize("plan", ["tp2-pp2", pytest.param("dp2-zero1", marks=pytest.mark.full)])
def test_a_step_has_the_bits_of_one_device_and_no_race(plan: str) -> None:
    found = examined(Plan.from_toml(PLANS[plan]))
    assert found.ok and found.races, found.text()


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp2-zero3", "ep2", "tp2-overlap"])
def test_steps_of_other_plans(plan: str) -> None:
    test_a_step_has_the_bits_of_one_device_and_no_race(plan)


FEW = ("what is handed over is taken at once", "the norm is read before the update")


@pytest.mark.parametrize(
    "change", [pytest.param(each, id=each.what, marks=() if each.what in FEW else pytest.mark.full) for each in CHANGES]
)
def test_what_is_made_wrong_is_found(change) -> None:
    found = examined(Plan.from_toml(PLANS[change.plan]), change=change.what)
    assert found.bits_different == 0  # what a device may do later is done at once here
    assert change.rule in found.rules, found.text()


def test_a_file_that_is_not_there_is_named() -> None:
    command = [sys.executable, "-m", "shardproof.verify.pretended", "no-such-plan.toml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "no-such-plan.toml" in done.stderr
