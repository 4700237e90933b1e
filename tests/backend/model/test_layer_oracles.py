"""Every layer of a running step, taken by itself, is what plain torch code makes of the same input in fp64: its output,
the gradient of its input, and the gradients of its weights.

An observer keeps what goes into and comes out of each layer of a real step, forward and backward, on every rank. Then
each layer is written again from its paper, as one would on one device, and torch's autograd gives its gradients.

Bound. A product that sums K terms is off by at most K u of its operands' norms, where u = 2^-24 is half a unit of the
last place (Higham 2002, section 3.1), and first-order errors add along a chain. A layer has at most `DEPTH` = 12
products one after the other, counting norms, softmax and activation, forward and backward; the longest sum of these
models has K = 259 terms (the vocabulary). In bf16 every hidden state is rounded to 8 bits, which outweighs the sums: a
layer passes on at most `DEPTH` of them, of 2^-9 each. Errors of independent roundings add as their root, and a gradient
is relative to its own norm, which cancellation may make smaller: twice the bound for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers.plans import plan as exact_plan
from shardproof.backend.data.corpus import Corpus
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import TOKEN_TABLE, parameters
from shardproof.core.plan.plan import Plan

DEPTH, LONGEST_SUM = 12, 259
BOUNDS = {"fp32": 2 * DEPTH * LONGEST_SUM * 2.0**-24, "bf16": 2 * DEPTH * 2.0**-9}
SAMPLES, SEQUENCE = 6, 24

GPT = ModelSpec(
    "gpt",
    2,
    48,
    96,
    6,
    6,
    8,
    259,
    64,
    activation="gelu_tanh",
    norm="layernorm",
    position="learned",
    tied_embeddings=True,
    bias=True,
)
LLAMA = ModelSpec("llama", 2, 48, 100, 12, 6, 8, 259, 64)
QWEN2 = ModelSpec("qwen2", 2, 48, 60, 6, 6, 8, 259, 64, qkv_bias=True, activation="geglu")
QWEN3 = ModelSpec("qwen3", 2, 48, 60, 12, 6, 8, 259, 64, qk_norm=True)
SQUARED = ModelSpec("squared", 2, 48, 54, 6, 6, 10, 259, 64, activation="relu_squared", norm="layernorm")
LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
MLA = ModelSpec("mla", 2, 48, 60, 6, 6, 12, 259, 64, q_lora_rank=28, **LATENT)
WIDE_QUERIES = replace(MLA, name="mla-wide-queries", q_lora_rank=0)
MIXTRAL = ModelSpec("mixtral", 2, 48, 36, 6, 3, 8, 259, 64, num_experts=6, experts_per_token=2)
GROUPED = ModelSpec(
    "grouped",
    2,
    48,
    60,
    6,
    6,
    8,
    259,
    64,
    num_experts=6,
    experts_per_token=3,
    num_shared_experts=2,
    expert_ffn_hidden_size=12,
    first_dense_layers=1,
    router_scores="sigmoid",
    router_scaling=1.5,
    num_router_groups=3,
    router_groups_per_token=2,
    router_group_scores="top_two",
)
RAW = replace(
    GROUPED,
    name="raw",
    num_router_groups=0,
    router_groups_per_token=0,
    router_group_scores="max",
    router_scores="softmax",
    normalized_router_weights=False,
    num_shared_experts=0,
)
MODELS = [GPT, LLAMA, QWEN2, QWEN3, SQUARED, MLA, WIDE_QUERIES]
MIXTURES = [MIXTRAL, GROUPED, RAW]
LAYOUTS = {
    "one device": Layout(),
    "tp3 sp": Layout(tp=3, sequence_parallel=True),
    "tp2 dp3": Layout(tp=2, dp=3),
    "cp2": Layout(cp=2),
}
EXPERT_LAYOUTS = {
    "one device": Layout(),
    "tp3 sp etp1 ep3": Layout(tp=3, sequence_parallel=True, etp=1, ep=3),
    "dp3 ep3": Layout(dp=3, ep=3),
    "tp3 ep2 dp2 etp3": Layout(tp=3, dp=2, ep=2),
}


@dataclass(frozen=True)
class Places:
    """Of every token its position in its document, [samples, s], and which tokens it sees, [samples, s, s]."""

    positions: Tensor
    seen: Tensor


@dataclass
class Seen:
    """What the ranks of a step showed, put together: activations and their gradients are [samples, s, ...], fp64."""

    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def put(
        self, into: dict[str, Tensor], name: str, first_sample: int, tokens: tuple[slice, ...], part: Tensor
    ) -> None:
        whole = into.setdefault(name, torch.full((SAMPLES, SEQUENCE, *part.shape[2:]), torch.nan, dtype=torch.float64))
        samples = slice(first_sample, first_sample + part.shape[0])
        for place, run in zip(tokens, part.split([place.stop - place.start for place in tokens], 1), strict=True):
            whole[samples, place] = run.detach().double()


class Recorder:
    """An observer of one rank that fills a `Seen` shared by all ranks."""

    def __init__(self, seen: Seen, model: ModelSpec):
        self.seen = seen
        self.shapes = {parameter.name: parameter.shape for parameter in parameters(model)}

    def activation(self, name, microbatch, tokens, tensor):
        if not tensor.requires_grad:
            return
        first = microbatch.first_sample
        self.seen.put(self.seen.values, name, first, tokens, tensor)
        tensor.register_hook(lambda gradient: self.seen.put(self.seen.gradients, name, first, tokens, gradient))

    def gradient(self, name, slices, tensor):
        whole = self.seen.weights.setdefault(name, torch.full(self.shapes[name], torch.nan, dtype=torch.float64))
        whole[slices] = tensor.double() * SAMPLES * SEQUENCE  # the step's gradient is that of the mean

    def __getattr__(self, name):
        return lambda *_: None


@dataclass(frozen=True)
class Step:
    """The text of a step, the weights as layers see them, in fp64, and what the ranks showed."""

    tokens: Tensor
    targets: Tensor
    places: Places
    weights: dict[str, Tensor]
    seen: Seen


def spread_weights(model: ModelSpec) -> dict[str, Tensor]:
    """Weights far from their start, so that biases and norms matter and attention is not uniform."""
    generator = torch.Generator().manual_seed(11)
    return {
        p.name: torch.randn(p.shape, generator=generator) * (0.2 if len(p.shape) == 1 else 0.1) + (p.constant or 0.0)
        for p in parameters(model)
    }


def step_rank(transport, payload):
    plan, seen = payload
    rank = TrainingRank(transport, plan, observer=Recorder(seen, plan.model))
    weights = spread_weights(plan.model)
    for stage in rank.stages.values():
        stage.load(weights)
    rank.step(0)


@pytest.fixture(scope="module")
def step_of(tmp_path_factory):
    """`step_of(model, layout, mode, dtype, packed=...)`: a `Step`, each run once. The text is cut into
    documents of 3 to 12 bytes."""
    made = {}
    data, generator = tmp_path_factory.mktemp("data"), torch.Generator().manual_seed(3)
    for number in range(200):
        length = int(torch.randint(3, 12, (), generator=generator))
        text = torch.randint(0, 256, (length,), generator=generator).to(torch.uint8)
        (data / f"{number:03d}").write_bytes(text.numpy().tobytes())

    def run(
        model: ModelSpec,
        layout: Layout = LAYOUTS["one device"],
        mode: str = "exact",
        dtype: str = "fp32",
        packed: bool = False,
    ) -> Step:
        key = model, layout, mode, dtype, packed
        if key not in made:
            plan = exact_plan(
                layout,
                model=model,
                samples=SAMPLES,
                micro=1 if layout.dp == 2 else 2,
                sequence=SEQUENCE,
                dtype=dtype,
                mode=mode,
                gradient_token_block=6,
                reduction_token_block=3,
                data=str(data),
                packed=packed,
            )
            seen = Seen()
            run_threads(MemoryWorld(layout.world_size, timeout_s=60), step_rank, (plan, seen))
            rounded = torch.bfloat16 if dtype == "bf16" else torch.float32
            weights = {name: weight.to(rounded).double() for name, weight in spread_weights(model).items()}
            made[key] = Step(*text_of(plan), weights, seen)
        return made[key]

    return run


def text_of(plan: Plan) -> tuple[Tensor, Tensor, Places]:
    """Tokens, targets and places of the first step. A token sees those before it from the first
    one of its document on."""
    corpus, samples = Corpus.load(plan.train.data), (0, SAMPLES, SEQUENCE, plan.train.seed)
    begins = corpus.documents(*samples) if plan.train.packed else torch.zeros(SAMPLES, SEQUENCE, dtype=torch.int64)
    place = torch.arange(SEQUENCE)
    seen = (place[None, None] <= place[None, :, None]) & (place[None, None] >= begins[..., None])
    return *corpus.batch(*samples), Places(place - begins, seen)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def plain_norm(model: ModelSpec, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if model.norm == "layernorm":
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * w[f"{name}.weight"]
            + w[f"{name}.bias"]
        )
    return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * w[f"{name}.weight"]


def plain_linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def turned(x: Tensor, theta: float, places: Places) -> Tensor:
    """[b, ..., s, d]: pairs (i, i + d/2) as complex numbers times e^(i position theta^(-2i/d))."""
    half = x.shape[-1] // 2
    angles = places.positions.double()[..., None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = angles.view(len(x), *(1,) * (x.dim() - 3), *angles.shape[1:])
    z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([z.real, z.imag], -1)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, places: Places) -> Tensor:
    """[b, ..., s, d], causal inside documents, every score written out."""
    scores = q @ k.transpose(-1, -2) * scale
    hidden = ~places.seen.view(len(q), *(1,) * (q.dim() - 3), *places.seen.shape[1:])
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def plain_attention(model: ModelSpec, w: dict[str, Tensor], name: str, x: Tensor, places: Places) -> Tensor:
    """Rows of qkv by key/value group: the group's queries, its key, its value."""
    b, s, _ = x.shape
    r, d = model.query_heads_per_group, model.head_dim
    rows = plain_linear(w, f"{name}.qkv", x).view(b, s, model.num_kv_heads, r + 2, d)
    # [b, groups, heads of the group, s, d]
    q, k, v = (part.permute(0, 2, 3, 1, 4) for part in rows.split([r, 1, 1], 3))
    if model.qk_norm:
        q, k = plain_norm(model, w, f"{name}.query_norm", q), plain_norm(model, w, f"{name}.key_norm", k)
    if model.position == "rope":
        q, k = turned(q, model.rope_theta, places), turned(k, model.rope_theta, places)
    y = torch.stack([softmax_attention(q[:, :, head], k[:, :, 0], v[:, :, 0], d**-0.5, places) for head in range(r)], 2)
    return plain_linear(w, f"{name}.output", y.permute(0, 3, 1, 2, 4).reshape(b, s, -1))


def plain_mlp(model: ModelSpec, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    up = plain_linear(w, f"{name}.up", x)
    match model.activation:
        case "swiglu":
            up = up[..., 0::2] * torch.sigmoid(up[..., 0::2]) * up[..., 1::2]
        case "geglu":
            up = up[..., 0::2] * 0.5 * (1 + torch.erf(up[..., 0::2] / 2**0.5)) * up[..., 1::2]
        case "relu_squared":
            up = up.clamp(min=0) ** 2
        case "gelu_tanh":
            up = 0.5 * up * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3)))
    return plain_linear(w, f"{name}.down", up)


def plain_latent_attention(model: ModelSpec, w: dict[str, Tensor], name: str, x: Tensor, places: Places) -> Tensor:
    """DeepSeek-V2, equations 37 to 47: every head has a key of its own besides the rotary one that all share."""
    b, s, _ = x.shape
    heads, nope, rope, value = model.num_heads, model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    if model.q_lora_rank:
        queries = plain_linear(
            w, f"{name}.q_up", plain_norm(model, w, f"{name}.q_norm", plain_linear(w, f"{name}.q_down", x))
        )
    else:
        queries = plain_linear(w, f"{name}.q", x)
    down = plain_linear(w, f"{name}.kv_down", x)
    up = plain_linear(w, f"{name}.kv_up", plain_norm(model, w, f"{name}.kv_norm", down[..., :-rope])).view(
        b, s, heads, nope + value
    )
    shared_key = turned(down[..., -rope:], model.rope_theta, places)
    outputs = []
    for head, query in enumerate(queries.view(b, s, heads, nope + rope).unbind(2)):
        q = torch.cat([query[..., :nope], turned(query[..., nope:], model.rope_theta, places)], -1)
        k = torch.cat([up[:, :, head, :nope], shared_key], -1)
        outputs.append(softmax_attention(q, k, up[:, :, head, nope:], (nope + rope) ** -0.5, places))
    return plain_linear(w, f"{name}.output", torch.cat(outputs, -1))


def plain_mixture(model: ModelSpec, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """One token after the other, one expert after the other."""
    if not model.layer_is_moe(int(name.split(".")[1])):
        return plain_mlp(model, w, name, x)
    rows = [plain_experts(model, w, name, token) for token in x.flatten(0, 1)]
    y = torch.stack(rows).view_as(x)
    return y + plain_mlp(model, w, f"{name}.shared", x) if model.num_shared_experts else y


def plain_experts(model: ModelSpec, w: dict[str, Tensor], name: str, token: Tensor) -> Tensor:
    logits = w[f"{name}.router.weight"] @ token
    scores = logits.softmax(0) if model.router_scores == "softmax" else logits.sigmoid()
    allowed = set(range(model.num_experts))
    if model.num_router_groups:
        size = model.num_experts // model.num_router_groups
        best = {
            group: sum(sorted(scores.tolist()[group * size : (group + 1) * size])[-2:])
            for group in range(model.num_router_groups)
        }
        groups = sorted(best, key=best.__getitem__)[-model.router_groups_per_token :]
        allowed = {group * size + member for group in groups for member in range(size)}
    chosen = sorted(allowed, key=lambda expert: scores[expert].item())[-model.experts_per_token :]
    weights = scores[chosen]
    if model.normalized_router_weights:
        weights = weights / weights.sum()
    total = torch.zeros_like(token)
    for weight, expert in zip(weights, chosen, strict=True):
        up = w[f"{name}.experts.up.weight"][expert] @ token
        activated = up[0::2] * torch.sigmoid(up[0::2]) * up[1::2]
        total = total + weight * model.router_scaling * (w[f"{name}.experts.down.weight"][expert] @ activated)
    return total


LAYERS = {
    "layers.1.attention.norm": (plain_norm, "layers.0.output"),
    "layers.1.attention": (plain_attention, "layers.1.attention.norm"),
    "layers.1.mlp": (plain_mlp, "layers.1.mlp.norm"),
}
"""Layer -> its plain form, and the activation that goes into it."""


def check_layer(layer: str, model: ModelSpec, step, bound: float) -> None:
    weights, seen, places = step.weights, step.seen, step.places
    plain, source = LAYERS[layer]
    plain = {plain_attention: plain_latent_attention}.get(plain, plain) if model.is_mla else plain
    plain = {plain_mlp: plain_mixture}.get(plain, plain) if model.is_moe else plain
    x = seen.values[source].clone().requires_grad_()
    own = {name: weight.clone().requires_grad_() for name, weight in weights.items() if name.startswith(f"{layer}.")}
    if layer != "layers.1.attention.norm":
        own = {name: weight for name, weight in own.items() if not name.startswith(f"{layer}.norm.")}
    y = plain(model, own, layer, x, *([places] if layer == "layers.1.attention" else []))
    assert relative(seen.values[layer], y) < bound
    y.backward(seen.gradients[layer])
    # what the residual stream carries past a norm is added to the gradient of the norm's input
    passed = seen.gradients["layers.1.attention"] if plain is plain_norm else 0.0
    assert relative(seen.gradients[source] - passed, x.grad) < bound
    assert own
    for name, weight in own.items():
        assert relative(seen.weights[name], weight.grad) < bound, name


@pytest.mark.parametrize(("mode", "layout"), [*(("exact", name) for name in LAYOUTS), ("fast", "tp3 sp")])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_attention_mlp_and_norm_are_those_of_plain_torch(step_of, model, layout, mode):
    step = step_of(model, LAYOUTS[layout], mode)
    for layer in LAYERS:
        check_layer(layer, model, step, BOUNDS["fp32"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [GPT, LLAMA, MLA], ids=lambda model: model.name)
def test_attention_and_positions_begin_again_with_every_packed_document(step_of, model, layout):
    step = step_of(model, LAYOUTS[layout], packed=True)
    assert (step.places.positions.diff(dim=1) < 0).any(1).all(), "every sample has several documents"
    check_layer("layers.1.attention", model, step, BOUNDS["fp32"])


@pytest.mark.parametrize(
    ("mode", "layout"), [*(("exact", name) for name in EXPERT_LAYOUTS), ("fast", "tp3 sp etp1 ep3")]
)
@pytest.mark.parametrize("model", MIXTURES, ids=lambda model: model.name)
def test_experts_are_those_of_a_loop_over_tokens(step_of, model, layout, mode):
    check_layer("layers.1.mlp", model, step_of(model, EXPERT_LAYOUTS[layout], mode), BOUNDS["fp32"])


@pytest.mark.parametrize("layout", ["one device", "tp3 sp"])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
def test_layers_in_bf16_are_those_of_plain_torch_within_their_roundings(step_of, model, layout):
    step = step_of(model, LAYOUTS[layout], "exact", "bf16")
    for layer in LAYERS:
        check_layer(layer, model, step, BOUNDS["bf16"])


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
def test_embedding_and_head_are_those_of_plain_torch(step_of, model, layout, packed):
    step = step_of(model, LAYOUTS[layout], packed=packed)
    tokens, targets, seen = step.tokens, step.targets, step.seen
    own = {
        name: weight.clone().requires_grad_()
        for name, weight in step.weights.items()
        if name.startswith(("embedding", "head"))
    }
    looked_up = F.one_hot(tokens, model.vocab_size).double() @ own[TOKEN_TABLE]
    if model.position == "learned":
        looked_up = looked_up + own["embedding.positions.weight"][step.places.positions]
    assert torch.equal(seen.values["embedding.output"].float(), looked_up.float())
    looked_up.backward(seen.gradients["embedding.output"])

    x = seen.values["layers.1.output"].clone().requires_grad_()
    logits = (
        plain_norm(model, own, "head.norm", x) @ own[TOKEN_TABLE if model.tied_embeddings else "head.output.weight"].T
    )
    losses = logits.exp().sum(-1).log() - logits.gather(-1, targets[..., None]).squeeze(-1)
    assert relative(seen.values["head.losses"], losses) < BOUNDS["fp32"]
    losses.sum().backward()
    assert relative(seen.gradients["layers.1.output"], x.grad) < BOUNDS["fp32"]
    for name, weight in own.items():
        assert relative(seen.weights[name], weight.grad) < BOUNDS["fp32"], name


@pytest.mark.parametrize("layer", LAYERS)
def test_a_wrong_weight_would_be_seen(step_of, layer):
    step = step_of(LLAMA)
    weights, seen = step.weights, step.seen
    name = next(
        name for name in weights if name.startswith(f"{layer}.") and (".norm." not in name or layer.endswith("norm"))
    )
    changed = {**weights, name: weights[name] * (1 + 1e-2)}
    with pytest.raises(AssertionError):
        check_layer(layer, LLAMA, replace(step, weights=changed), BOUNDS["fp32"])
    lost = replace(seen, weights={**seen.weights, name: seen.weights[name] * 0.99})
    with pytest.raises(AssertionError):
        check_layer(layer, LLAMA, replace(step, seen=lost), BOUNDS["fp32"])
