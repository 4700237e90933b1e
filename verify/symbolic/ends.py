"""Both ends of the model and multi-token prediction on expressions: token lookup, logits and losses;
see `symbolic_layers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ...core.layout.stage_parameters import Usage
from ...core.model.blocks import num_losses
from ...core.model.parameters import (
    Parameter,
    embedding_parameters,
    head_parameters,
    mtp_parameters,
    token_table,
)
from ...core.program import Collective, Op, Operations, sequences_are_cut
from .expressions import Expression, apply, exactly_summed, symbol
from .layers import Linear, Ranks, lookup_part, named, summed_leaves
from .parts import Gradients, WholeLinear, mapped, norm_gradients, normed, residual
from .tensors import Part

Works = Sequence[Sequence[Op]]
"""Of every tensor-parallel rank, the works of one block."""


def embedding(ranks: Ranks, works: Works) -> Gradients:
    """Both tables' gradients use the tokens that the backward of the token table gathers, and a norm those that a rank
    holds."""
    table, *others = embedding_parameters(ranks.plan.model)
    usage = Usage(table, "embedding" if ranks.plan.model.shares_table else "")
    norm, positions = ([], others) if ranks.plan.model.position == "learned" else (others, [])
    x, dnormed = lookup(ranks, "embedding.tokens", works), ranks.hidden(symbol("dy"))
    gradients = norm_gradients(ranks, norm, dnormed, x)
    dx = mapped("norm gradient", dnormed, x) if norm else dnormed
    gradients[usage.key], dy = lookup_gradient(ranks, "embedding.tokens", works, usage, dx)
    for parameter in positions:
        own = Usage(parameter)
        gradients[own.key] = ranks.settle_gradient(
            own, [replace(p, value=apply("position rows", p.value, own.key)) for p in dy]
        )
    return gradients


def head(ranks: Ranks, works: Works) -> Gradients:
    """Final norm, logits, the loss of every token, and back."""
    norm = [parameter for parameter in head_parameters(ranks.plan.model) if parameter.name.startswith("head.norm")]
    usage = _output_usage(ranks)
    return _predicted(ranks, "head.", works, norm, usage, key=usage.key, ahead=num_losses(ranks.plan.model) > 1)


def multi_token(ranks: Ranks, works: Works, depth: int, prefix: str) -> Gradients:
    """A module of multi-token prediction but for its transformer layer: lookup, norms, projection, and
    its own use of the head."""
    parameters = list(mtp_parameters(ranks.plan.model, depth))

    def norm(name: str) -> list[Parameter]:
        return [parameter for parameter in parameters if parameter.name.startswith(f"{prefix}{name}.")]

    table = Usage(token_table(ranks.plan.model), "output")
    hidden, embedded = ranks.hidden(symbol("x")), lookup(ranks, f"{prefix}embedding.tokens", works)
    weight = next(parameter for parameter in parameters if parameter.name == f"{prefix}projection.weight")
    projection = WholeLinear(ranks, f"{prefix}projection", Usage(weight), None)
    forward, back, of_weight = (named(prefix, works, what) for what in ("forward", "input_gradient", "weight_gradient"))
    joined = mapped("joined", normed(norm("embedding_norm"), embedded), normed(norm("hidden_norm"), hidden))
    projection.forward(forward("projection"), joined)
    usage = _output_usage(ranks)
    own_usage, ahead = _renamed(usage, f"{prefix}head."), depth + 2 < num_losses(ranks.plan.model)
    gradients = _predicted(ranks, f"{prefix}head.", works, norm("norm"), own_usage, key=usage.key, ahead=ahead)
    djoined, own = projection.backward(back("projection"), of_weight("projection"), ranks.hidden(symbol("dy")), joined)
    gradients.update(own)
    gradients.update(norm_gradients(ranks, norm("embedding_norm"), djoined, embedded))
    gradients.update(norm_gradients(ranks, norm("hidden_norm"), djoined, hidden))
    dembedded = mapped("norm gradient", djoined, embedded)
    rows, _ = lookup_gradient(ranks, f"{prefix}embedding.tokens", works, _renamed(table, prefix), dembedded)
    gradients[table.key] = rows
    return gradients


def lookup(ranks: Ranks, name: str, works: Works) -> list[Part]:
    """Rows of the token table."""
    _, x = ranks.walk(named("", works, "forward")(name), [lookup_part(ranks, t) for t in range(ranks.tp)], [])
    return ranks.settle("forward", name, x, ranks.hidden(symbol("x")))


def lookup_gradient(
    ranks: Ranks, name: str, works: Works, usage: Usage, dy: list[Part]
) -> tuple[list[Part], list[Part]]:
    """(gradient of the table, the output's gradient of all tokens)."""
    operations, whole = named("", works, "input_gradient")(name), (0, ranks.sequence)
    if sequences_are_cut(ranks.plan):  # the last collective is for the tokens' ids
        whole = 0, ranks.keys
        _, ids = ranks.walk([own[-1:] for own in operations], [Part(symbol("ids"), (0, ranks.sequence))] * ranks.tp, [])
        if any(part.tokens != whole for part in ids):
            ranks.note("the ids of the other context-parallel ranks' tokens are missing")
            dy = [replace(part, value=symbol("without ids")) for part in dy]
        operations = [own[:-1] for own in operations]
    _, dy = ranks.walk(operations, dy, [])
    dy = ranks.settle("input gradient", name, dy, [Part(symbol("dy"), whole)] * ranks.tp)
    ranks.walk(named("", works, "weight_gradient")(name), dy, [])

    def rows(tp_rank: int, part: Part) -> Part:
        value = ranks.in_order_of(apply("embedding rows", part.value, usage.key), *part.tokens)
        return Part(value, part.tokens, ranks.own_leaves(usage.parameter, tp_rank))

    return ranks.settle_gradient(usage, ranks.each(rows, dy)), dy


def _output_usage(ranks: Ranks) -> Usage:
    model = ranks.plan.model
    table = token_table(model) if model.tied_embeddings else list(head_parameters(model))[-1]
    return Usage(table, "output" if model.tied_embeddings else "")


def _renamed(usage: Usage, prefix: str) -> Usage:
    """A use of a parameter under a name of its own: each is compared with its own on one device."""
    return replace(usage, parameter=replace(usage.parameter, name=f"{prefix}{usage.parameter.name}"))


def _predicted(
    ranks: Ranks, prefix: str, works: Works, norm: Sequence[Parameter], usage: Usage, *, key: str, ahead: bool
) -> Gradients:
    """A norm, logits, the loss of every token, and back. `key` is that of the output table's gradient; with `ahead` a
    module of multi-token prediction uses the normed state too."""
    forward, back, weight = (named(prefix, works, what) for what in ("forward", "input_gradient", "weight_gradient"))
    output, x = Linear(ranks, f"{prefix}output", usage, None), ranks.hidden(symbol("hidden"))
    hidden = normed(norm, x)
    if ranks.plan.model.logit_multiplier != 1:
        hidden = mapped("logit factor", hidden)
    logits = output.forward(forward("output"), hidden)
    sums = _loss(ranks, f"{prefix}loss", forward("loss"), logits)
    dlogits = [replace(part, value=apply("loss gradient", part.value, *sums)) for part in logits]
    dnormed, gradients = output.backward(back("output"), weight("output"), dlogits, hidden)
    if ranks.plan.model.logit_multiplier != 1:
        dnormed = mapped("logit factor", dnormed)
    if ahead:
        dnormed = residual(dnormed, ranks.hidden(symbol("gradient from ahead")))
    return {key: gradients[usage.key], **norm_gradients(ranks, norm, dnormed, x)}


def _loss(ranks: Ranks, name: str, operations: Sequence[Operations], logits: list[Part]) -> list[Expression]:
    """The first collective completes the maximum, the others the sum of exponentials (with label smoothing of logits
    too) together with the target's logit."""
    num_leaves = ranks.plan.leaf_sizes.vocab.num_leaves
    first = [[each for each in own if isinstance(each, Collective)][:1] for own in operations]
    rest = [own[len(head) :] for own, head in zip(operations, first, strict=True)]
    tokens = (0, ranks.sequence)
    own = [range(*ranks.plan.leaf_sizes.vocab.owned(ranks.tp, tp_rank)) for tp_rank in range(ranks.tp)]
    maximum = [Part(symbol("maximum"), tokens, maximum=frozenset(leaves), per_token=True) for leaves in own]
    _, maximum = ranks.walk([tuple(head) for head in first], maximum, [])
    maximum = [Part(apply("maximum", logits[0].value, *sorted(part.maximum or ())), part.tokens) for part in maximum]
    maximum = ranks.settle("forward", f"{name} maximum", maximum, [Part(symbol("maximum"), tokens)] * ranks.tp)

    def over_vocabulary(what: str, tp_rank: int) -> Part:
        terms = {leaf: apply(what, logits[tp_rank].value, maximum[tp_rank].value, leaf) for leaf in own[tp_rank]}
        return replace(summed_leaves(ranks, tokens, terms, num_leaves, (len(terms),)), per_token=True)

    def target(tp_rank: int) -> Part:
        terms = (apply("target", logits[tp_rank].value, maximum[tp_rank].value, leaf) for leaf in own[tp_rank])
        return Part(exactly_summed(terms), tokens, exactly=True, per_token=True)

    sums: list[tuple[str, Callable[[int], Part]]] = [(name, partial(over_vocabulary, "exponentials"))]
    if ranks.plan.train.label_smoothing:
        sums.append((f"{name} logits", partial(over_vocabulary, "shifted logits")))
    results = []
    for label, make in (*sums, (f"{name} target", target)):
        _, parts = ranks.walk(rest, [make(tp_rank) for tp_rank in range(ranks.tp)], [])
        results.append(ranks.settle("forward", label, parts, [Part(symbol("sum"), tokens)] * ranks.tp)[0].value)
    return results
