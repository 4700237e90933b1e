"""Exact numerics on a CUDA device set the switches of its libraries: seen where CUDA is pretended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardproof.backend.base.determinism import make_exact, switches
from shardproof.verify.pretended.environment import environment

SCRIPT = """
import os, torch
from dataclasses import replace
from shardproof.backend.base.determinism import switches
from shardproof.backend.base.environment import environment
from shardproof.backend.numerics import make_numerics
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Numerics
plan = Plan.from_toml('''
[model]
preset = "tiny-gpt"
[batch]
global = 1
sequence = 8
[cluster]
preset = "this-host"
num_devices = 1
''')
before = switches()
make_numerics(replace(plan, numerics=Numerics("fast")), "cuda")
assert switches() == before, switches()
make_numerics(replace(plan, numerics=Numerics("exact")), "cpu")
assert switches() == before, switches()
try:
    make_numerics(replace(plan, numerics=Numerics("exact")), "cuda")
except Exception as error:
    print(type(error).__name__, error)
else:
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == switches()["cublas_workspace"]
    assert torch.backends.cuda.matmul.allow_tf32 is False
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    assert environment(torch.device("cuda")).items() >= switches().items()
    assert "cublas_workspace" not in environment(torch.device("cpu"))
    print(switches())
"""


def run(folder: Path, **variables: str) -> str:
    """What the script prints on pretended CUDA."""
    given = {**environment(folder), **variables}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None, reason="needs a C++ compiler"
)
def test_exact_numerics_on_cuda_set_them_and_refuse_a_workspace_that_does_not_repeat(tmp_path: Path) -> None:
    assert run(tmp_path).strip() == str(
        {
            "cublas_workspace": ":4096:8",
            "fp32_products": "ieee",
            "bf16_reductions": "fp32",
            "attention": "flash, math",
            "deterministic": "true",
        }
    )
    refused = run(tmp_path, CUBLAS_WORKSPACE_CONFIG=":2048:1")
    assert refused.startswith("PlanError CUBLAS_WORKSPACE_CONFIG=:2048:1") and "Unset it" in refused


def test_nothing_is_set_for_a_processor() -> None:
    before = switches(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    make_exact(torch.device("cpu"))
    assert (switches(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")) == before
