"""The flags of a Megatron command about experts and their routers."""

from __future__ import annotations

import ast
import re

from ..model.expert_layers import pattern_of
from .megatron_flags import RELEASES, UNDER
from .megatron_reading import Reading


def read_experts(reading: Reading, layers: int | None, hidden: int | None) -> bool:
    """Experts and their routers; True for a model that has some."""
    text = reading.text("--num-experts")
    if text is None:
        return False
    counts = {int(each) for each in re.findall(r"\d+", text)}
    if len(counts) != 1 or not re.fullmatch(r"[\d\s\[\],]+", text):
        reading.say(
            "--num-experts", "refused", "layers have different numbers of experts, in a plan one", "model.num_experts"
        )
        return False
    (count,) = counts
    if count <= 1:
        reading.say("--num-experts", "no-effect", "one expert is a dense layer")
        return False
    reading.put("model.num_experts", count, "--num-experts")
    rows = {row.key: reading.put_row(row) for row in UNDER["--num-experts"]}
    width = rows["model.expert_ffn_hidden_size"] or _filled(reading, "ffn_hidden_size")
    if width is not None and rows["model.expert_ffn_hidden_size"] is None:
        reading.put("model.expert_ffn_hidden_size", width)
    _dense_layers(reading, layers)
    _shared_experts(reading, width)
    _router(reading)
    _group_scores(reading, rows["model.experts_per_token"], rows["model.router_groups_per_token"])
    return True


def _filled(reading: Reading, name: str) -> int | None:
    given = reading.values.get("model", {}).get(name)
    return None if given is None else given.value


def _dense_layers(reading: Reading, layers: int | None) -> None:
    if (text := reading.text("--moe-layer-freq")) is None:
        return
    pattern = layer_pattern(text)
    if isinstance(pattern, int) and layers is not None:
        pattern = [int(layer % pattern == 0) for layer in range(layers)] if pattern > 0 else None
    if isinstance(pattern, list) and layers in (None, len(pattern)):
        found = pattern_of([number for number, moe in enumerate(pattern) if moe], len(pattern))
        if found is not None:
            reading.put("model.first_dense_layers", found[0], "--moe-layer-freq")
            reading.put("model.expert_layer_step", found[1], "--moe-layer-freq")
            return
    why = "in a plan every n-th layer after the first dense ones has experts, up to the last"
    reading.say("--moe-layer-freq", "refused", why, "model.expert_layer_step")


def layer_pattern(text: str) -> int | list[int] | None:
    """A number, or the list that a sum of products of lists makes, as `([0]*3+[1]*58)`; None for anything else."""

    def value(node: ast.AST) -> int | list[int]:
        match node:
            case ast.Constant(value=int() as number):
                return int(number)
            case ast.List(elts=elements):
                return [element for each in elements if isinstance(element := value(each), int)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                first, second = value(left), value(right)
                if isinstance(first, list) and isinstance(second, list) and len(first) + len(second) <= 10_000:
                    return first + second
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                first, second = value(left), value(right)
                if isinstance(first, list) and isinstance(second, int) and len(first) * second <= 10_000:
                    return first * second
        raise ValueError(text)

    try:
        return value(ast.parse(text.strip().strip("'\""), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _shared_experts(reading: Reading, width: int | None) -> None:
    size = reading.integer("--moe-shared-expert-intermediate-size")
    if not size or width is None:
        return
    flag = "--moe-shared-expert-intermediate-size"
    reading.put("model.num_shared_experts", 1 if size % width else size // width, flag)
    if size % width:
        reading.put("model.shared_expert_ffn_hidden_size", size, flag)
    if reading.given("--moe-shared-expert-gate"):
        reading.put("model.shared_expert_gate", True, "--moe-shared-expert-gate")


def _router(reading: Reading) -> None:
    """Scores, weights, balance, and a bias where other products have one (megatron/core/transformer/moe/router.py,
    since core 0.15)."""
    before = reading.version in RELEASES[: RELEASES.index("0.15")] or reading.given("--deepspeed")
    if (_filled(reading, "bias") or _filled(reading, "mlp_bias")) and not before:
        reading.put("model.router_bias", True)
    scores = reading.text("--moe-router-score-function") or "softmax"
    if scores not in ("softmax", "sigmoid"):
        reading.say("--moe-router-score-function", "refused", "a plan has softmax and sigmoid", "model.router_scores")
    else:
        reading.put("model.router_scores", scores, "--moe-router-score-function")
        before = reading.given("--moe-router-pre-softmax")
        reading.put("model.normalized_router_weights", scores == "sigmoid" or not before, "--moe-router-pre-softmax")
    balance = reading.text("--moe-router-load-balancing-type") or "aux_loss"
    factor = reading.text("--moe-aux-loss-coeff")
    if balance in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"):
        value = 0.0 if balance == "none" or factor is None else _factor(reading, factor)
        flags = ("--moe-aux-loss-coeff", "--moe-router-load-balancing-type")
        if value is not None:
            why = "" if balance in ("none", "seq_aux_loss") or not value else "a plan's is per sequence"
            reading.put("train.router_aux_loss", value, *flags, why=why)
    else:
        reading.say("--moe-router-load-balancing-type", "not-modelled", "tokens are spread by a loss or a bias")
        reading.say("--moe-aux-loss-coeff", "not-modelled", "tokens are spread by a loss or a bias")


def _factor(reading: Reading, text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        reading.say("--moe-aux-loss-coeff", "refused", "a plan has one such loss", "train.router_aux_loss")
        return None


def _group_scores(reading: Reading, chosen: int | None, groups: int | None) -> None:
    """Megatron adds up the best topk / group_topk scores of a group."""
    if not groups or not chosen:
        return
    if chosen // groups == 2:
        reading.put("model.router_group_scores", "top_two", "--moe-router-group-topk")
    elif chosen // groups > 2:
        reading.assume(
            f"groups of experts are chosen by the sum of their best {chosen // groups} scores; a plan adds up one or "
            "two, which costs the same."
        )
