"""The same weights give the logits and gradients of Hugging Face's `LlamaForCausalLM` and `GPT2LMHeadModel`.

Bound: that of `test_model_oracle.py` for each side, 38 operations of 108 roundings, so twice 2.5e-4 of a tensor's norm.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shardproof.backend.model.transformer import Microbatch, Stage
from shardproof.backend.numerics import make_numerics
from shardproof.backend.transport.memory import MemoryWorld
from shardproof.core.cluster_presets import cluster_preset
from shardproof.core.layout import Layout
from shardproof.core.model import ModelSpec
from shardproof.core.parameters import TOKEN_TABLE
from shardproof.core.plan import Batch, Numerics, Plan, Precision

transformers = pytest.importorskip("transformers")

BOUND = 2 * 38 * 108 * 2.0**-24
LLAMA = ModelSpec("llama", 2, 48, 100, 6, 3, 8, 101, 64)
GPT2 = ModelSpec(
    "gpt2", 2, 48, 96, 6, 6, 8, 101, 64, activation="gelu_tanh", norm="layernorm", position="learned", tied_embeddings=True, bias=True
)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=100, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
        head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="eager",
        initializer_range=0.1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def llama_names(tensor):
    """Our canonical tensors from a function that gives theirs by name: rows of qkv by group, of up interleaved."""
    ours = {TOKEN_TABLE: tensor("model.embed_tokens.weight")}
    ours |= {"head.norm.weight": tensor("model.norm.weight"), "head.output.weight": tensor("lm_head.weight")}
    for layer in range(2):
        theirs, prefix = f"model.layers.{layer}", f"layers.{layer}"
        q, k, v = (tensor(f"{theirs}.self_attn.{part}_proj.weight").view(3, -1, 48) for part in "qkv")
        gate, up = (tensor(f"{theirs}.mlp.{part}_proj.weight") for part in ("gate", "up"))
        ours |= {
            f"{prefix}.attention.norm.weight": tensor(f"{theirs}.input_layernorm.weight"),
            f"{prefix}.attention.qkv.weight": torch.cat([q, k, v], 1).flatten(0, 1),
            f"{prefix}.attention.output.weight": tensor(f"{theirs}.self_attn.o_proj.weight"),
            f"{prefix}.mlp.norm.weight": tensor(f"{theirs}.post_attention_layernorm.weight"),
            f"{prefix}.mlp.up.weight": torch.stack([gate, up], 1).flatten(0, 1),
            f"{prefix}.mlp.down.weight": tensor(f"{theirs}.mlp.down_proj.weight"),
        }
    return ours


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=101, n_positions=64, n_embd=48, n_layer=2, n_head=6, n_inner=96, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        attn_implementation="eager", initializer_range=0.1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def gpt2_names(tensor):
    """Our canonical tensors: their linear weights are [in, out], their qkv has all queries first."""
    ours = {TOKEN_TABLE: tensor("transformer.wte.weight"), "embedding.positions.weight": tensor("transformer.wpe.weight")}
    for kind in ("weight", "bias"):
        ours[f"head.norm.{kind}"] = tensor(f"transformer.ln_f.{kind}")
        for layer in range(2):
            theirs, prefix = f"transformer.h.{layer}", f"layers.{layer}"
            qkv = tensor(f"{theirs}.attn.c_attn.{kind}").t()
            ours |= {
                f"{prefix}.attention.norm.{kind}": tensor(f"{theirs}.ln_1.{kind}"),
                f"{prefix}.attention.qkv.{kind}": qkv.reshape(3, 6, 8, *qkv.shape[1:]).transpose(0, 1).reshape(qkv.shape),
                f"{prefix}.attention.output.{kind}": tensor(f"{theirs}.attn.c_proj.{kind}").t(),
                f"{prefix}.mlp.norm.{kind}": tensor(f"{theirs}.ln_2.{kind}"),
                f"{prefix}.mlp.up.{kind}": tensor(f"{theirs}.mlp.c_fc.{kind}").t(),
                f"{prefix}.mlp.down.{kind}": tensor(f"{theirs}.mlp.c_proj.{kind}").t(),
            }
    return ours


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("model", "make", "names"), [(LLAMA, llama, llama_names), (GPT2, gpt2, gpt2_names)], ids=["llama", "gpt2"])
def test_logits_and_gradients_are_those_of_transformers(model, make, names):
    torch.manual_seed(0)
    theirs = make().eval()
    with torch.no_grad():  # norms and biases away from their constants
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    parameters = dict(theirs.named_parameters())
    text = torch.randint(0, 101, (2, 19))
    microbatch = Microbatch(0, 0, text[:, :-1].contiguous(), text[:, 1:].contiguous())

    plan = Plan(
        model, cluster_preset("this-host", 1), Layout(), Batch(2, 2, 18), precision=Precision("fp32"), numerics=Numerics("exact")
    )
    transport = MemoryWorld(1).transport(0)
    tp, dp = (transport.group(axis, axis, [0]) for axis in ("tp", "dp"))
    stage = Stage(plan, plan.stages[0], tp=tp, numerics=make_numerics(plan), recorder=transport.recorder)
    stage.load(names(lambda name: parameters[name].detach()))

    logits = theirs(microbatch.tokens).logits
    with torch.no_grad():
        assert relative(stage.logits(microbatch, None), logits) < BOUND
    F.cross_entropy(logits.flatten(0, 1), microbatch.targets.flatten(), reduction="sum").backward()
    losses = stage(microbatch, None)
    torch.autograd.backward(losses, torch.ones_like(losses))
    gradients = stage.gradients.reduce(dp, plan.samples_of)
    if model.tied_embeddings:
        gradients[TOKEN_TABLE] = gradients.pop(f"{TOKEN_TABLE}@embedding") + gradients.pop(f"{TOKEN_TABLE}@output")
    expected = names(lambda name: parameters[name].grad)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(gradients[name], gradient) < BOUND, name
