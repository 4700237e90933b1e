"""Products by our kernels end to end, by the door that users take: 0 different bits against one device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.verify.pretended.environment import environment

pytest.importorskip("triton")

PLAN = """
[model]
preset = "tiny-gpt"
num_layers = 1
hidden_size = {hidden}
num_heads = {heads}
num_kv_heads = {heads}
ffn_hidden_size = 40
vocab_size = 257
{model}
[cluster]
preset = "this-host"
num_devices = {heads}
[layout]
tp = {heads}
[batch]
global = 2
sequence = 10
[precision]
dtype = "{dtype}"
[numerics]
mode = "exact"
gradient_token_block = 4
{numerics}
[train]
steps = 1
"""

EXPERTS = """
[model]
preset = "tiny-moe"
num_layers = 1
hidden_size = 16
num_heads = 2
num_kv_heads = 2
expert_ffn_hidden_size = 16
vocab_size = 257
num_experts = 4
experts_per_token = 2
[cluster]
preset = "this-host"
num_devices = 2
[layout]
tp = 2
ep = 2
etp = 1
[batch]
global = 2
sequence = 8
[precision]
dtype = "bf16"
[numerics]
mode = "exact"
gradient_token_block = 4
triton_products = ["all"]
"""

CONTEXT = """
[model]
preset = "tiny-llama"
num_layers = 1
vocab_size = 257
[cluster]
preset = "this-host"
num_devices = 4
[layout]
tp = 2
cp = 2
sequence_parallel = true
[batch]
global = 2
sequence = 32
[precision]
dtype = "fp32"
[numerics]
mode = "exact"
gradient_token_block = 8
triton_products = ["all"]
"""

ALL = 'triton_products = ["all"]'


def plan_text(heads: int, dtype: str, *, model: str = "", numerics: str = "") -> str:
    """Uneven leaves: three ranks share 40 units, and a sequence ends in half a block."""
    return PLAN.format(hidden=8 * heads, heads=heads, dtype=dtype, model=model, numerics=numerics)


def shardproof(folder: Path, text: str, env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """A verb with a plan."""
    verb, *others = options
    (folder / "plan.toml").write_text(text)
    command = [sys.executable, "-m", "shardproof", verb, str(folder / "plan.toml"), *others]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def proved(folder: Path, text: str, env: dict[str, str], *options: str) -> tuple[set[str], str]:
    """The forms that kernels made, and the fingerprint, of a proof that holds."""
    done = shardproof(folder, text, env, "verify", "--dynamic", "--steps", "1", "--json", *options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["ok"] and report["tensors_different"] == 0 and report["assumptions"]["kernel-products"]
    by_kernels = {form for form, choice in report["products"].items() if choice["by"] == "our kernels"}
    return by_kernels, report["fingerprint"]


DENSE = {"project", "contract", "weight_gradient"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "forms"),
    [
        (plan_text(2, "fp32", numerics=ALL), DENSE),
        (plan_text(3, "fp32", numerics=ALL), DENSE),
        (plan_text(3, "bf16", model="attention_dropout = 0.2", numerics=ALL), DENSE | {"heads"}),
        (EXPERTS, DENSE | {"multiply", "experts"}),
        (CONTEXT, DENSE),
    ],
    ids=["tp2 fp32", "tp3 fp32", "tp3 bf16 dropout", "tp2 ep2 bf16", "tp2 cp2 fp32"],
)
def test_kernels_interpreted_have_the_bits_of_one_device(tmp_path: Path, text: str, forms: set[str]) -> None:
    found, _ = proved(tmp_path, text, {**os.environ, "TRITON_INTERPRET": "1"})
    assert found == forms


@pytest.mark.full
def test_forms_are_chosen_apart_and_change_bits(tmp_path: Path) -> None:
    env, prints = {**os.environ, "TRITON_INTERPRET": "1"}, set()
    for given in (["none"], ["contract", "weight_gradient"]):
        text = plan_text(2, "fp32", numerics=f"triton_products = {json.dumps(given)}")
        found, fingerprint = proved(tmp_path, text, env)
        assert found == set(given) - {"none"}
        prints.add(fingerprint)
    assert len(prints) == 2


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None,
    reason="needs a C++ compiler",
)


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(("heads", "dtype", "given"), [(2, "bf16", ""), (3, "fp32", ALL)])
def test_compiled_kernels_on_one_pretended_gpu_have_the_bits_of_one_device(
    tmp_path: Path, heads: int, dtype: str, given: str
) -> None:
    """In bf16 the probe sends products to kernels, in fp32 the plan does."""
    env = dict(environment(tmp_path, devices=1, capability=(8, 0)))
    found, _ = proved(tmp_path, plan_text(heads, dtype, numerics=given), env, "--device", "cuda")
    assert found == DENSE


@needs_compiler
@pytest.mark.full
def test_ranks_over_nccl_choose_together_and_ledgers_record_and_compare_it(tmp_path: Path) -> None:
    env = dict(environment(tmp_path, devices=2, capability=(8, 0)))
    said = []
    for name, given in (("measured", ""), ("library", 'triton_products = ["none"]')):
        text = plan_text(2, "bf16", numerics=given)
        done = shardproof(tmp_path, text, env, "train", "--transport", "nccl", "--ledger", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        said.append([line for line in done.stderr.splitlines() if line.startswith("products: ")])
    (line,), none = said
    assert line.startswith("products: project, contract, weight_gradient by our kernels, since the library would widen")
    assert none == []
    for rank in range(2):
        header = json.loads((tmp_path / "measured" / f"rank-{rank}.jsonl").read_text().splitlines()[0])
        assert header["numerics"]["triton_products"] == ["project", "contract", "weight_gradient"]
    command = [sys.executable, "-m", "shardproof", "verify", str(tmp_path / "measured"), "--against"]
    done = subprocess.run([*command, str(tmp_path / "library")], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "numerics.triton_products is ['project', 'contract', 'weight_gradient'] and was []" in done.stdout
