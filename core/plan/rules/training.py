"""The rules of number formats, loss scales, checkpoints and training data. `table` has them in order."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...machine.cluster import ClusterSpec
from ..data_names import named_data, split_of
from ..runtime import Runtime
from ..sections import ALL_PRODUCTS, NO_PRODUCTS, Numerics, Precision
from ..stacks import SCALING_STACKS
from ..train import Checkpoint, Train

ADAPTING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "loss_scale_hysteresis")
"""How a loss scale adapts itself."""


def loss_scales_are_powers_of_two(precision: Precision) -> Iterator[str]:
    """Fp16 scales losses by powers of two, which change no bits."""
    given = [name for name in ("loss_scale", *ADAPTING) if getattr(precision, name) != getattr(Precision, name)]
    if given and precision.dtype != "fp16":
        yield (
            f'{given[0]}={getattr(precision, given[0])} scales losses for fp16, but dtype="{precision.dtype}". '
            "Leave it out, or use fp16."
        )
        return
    if precision.loss_scale is not None and (other := next((name for name in given if name in ADAPTING[:3]), None)):
        yield (
            f"loss_scale={precision.loss_scale:g} is a constant, so {other}={getattr(precision, other):g} is about "
            "nothing. "
            "Leave one of the two out."
        )
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        value = getattr(precision, name)
        if value is not None and math.frexp(value)[0] != 0.5:
            yield f"{name}={value:g} is no power of two. Use {2.0 ** round(math.log2(value)):g}."
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            f"min_loss_scale={precision.min_loss_scale:g} is above "
            f"initial_loss_scale={precision.initial_loss_scale:g}. "
            f"Use min_loss_scale <= {precision.initial_loss_scale:g}."
        )


def scalings_are_modelled(precision: Precision, runtime: Runtime) -> Iterator[str]:
    """Only operands of 8 bits have scales, and of some stacks alone it is modelled how far they reach."""
    if precision.scaling is None:
        return
    if precision.dtype != "fp8":
        yield (
            f'scaling="{precision.scaling}" is about operands of 8 bits, but dtype="{precision.dtype}". Leave it '
            "out, or use fp8."
        )
    elif runtime.profile not in SCALING_STACKS:
        names = " or ".join(SCALING_STACKS)
        yield (
            f'scaling="{precision.scaling}" is modelled for {names}, and not for runtime.profile="{runtime.profile}". '
            f'Leave it out, or use runtime.profile="{names}".'
        )


def products_are_named_once(numerics: Numerics) -> Iterator[str]:
    """The kernels of exact numerics make all products, none, or those that are named."""
    given = numerics.triton_products or ()
    whole = next((each for each in (NO_PRODUCTS, ALL_PRODUCTS) if each in given), None)
    if whole is not None and len(given) > 1:
        yield f"triton_products={list(given)} has {whole!r} among others. Give {[whole]}, or the others alone."
    if numerics.triton_products is not None and numerics.mode != "exact":
        yield 'triton_products is about exact numerics, but mode="fast". Leave it out, or use mode="exact".'


def checkpoints_have_a_folder(checkpoint: Checkpoint) -> Iterator[str]:
    """What is saved is saved somewhere."""
    for name in ("every", "keep"):
        if checkpoint.folder is None and (value := getattr(checkpoint, name)) is not None:
            yield (
                f"{name}={value} is about checkpoints, but there is no folder for them. Set checkpoint.folder, or "
                f"leave {name} out."
            )


def dtype_has_peak(precision: Precision, cluster: ClusterSpec) -> Iterator[str]:
    """The cluster has a rate for it."""
    if precision.dtype not in cluster.peak_flops_per_s:
        known = sorted(cluster.peak_flops_per_s)
        yield f'dtype="{precision.dtype}" has no peak rate on cluster {cluster.name}. Use one of {", ".join(known)}.'


def padding_is_distinguished(train: Train, runtime: Runtime) -> Iterator[str]:
    """Padded documents have a token that counts for nothing, and only they can be trimmed."""
    if train.padded and train.packed:
        yield "packed=true puts several documents into a sequence and padded=true one. Leave one of the two out."
    if train.padded and train.ignore_token is None:
        yield "padded=true fills sequences up with ignore_token, which is not given. Use train.ignore_token = 0, say."
    if runtime.trim_padding and not train.padded:
        yield (
            "trim_padding=true leaves padding out, but padded=true is not set. Set train.padded = true, or leave "
            "trim_padding out."
        )


def data_are_split_once(train: Train) -> Iterator[str]:
    """Validation data are a part of the data, or data of their own."""
    if train.split is None:
        return
    if train.validation_data is not None:
        yield (
            f'split="{train.split}" cuts validation data off, and validation_data names others. Leave one of the two '
            "out."
        )
    try:
        shares = split_of(train.split)
    except ValueError as error:
        yield f'split="{train.split}" does not say how documents are split: {error}. Use "949,50,1", say.'
    else:
        if not (shares[0] and shares[1]) and train.validation_data is None:
            yield f'split="{train.split}" leaves no documents for training or none for validation. Use "949,50,1", say.'


def weights_are_positive(train: Train) -> Iterator[str]:
    """Every source of a blend has a share."""
    for key in ("data", "validation_data"):
        for weight, name in named_data(getattr(train, key) or ""):
            if weight <= 0:
                yield f"{key} has {name} with weight {float(weight):g}. Use a positive weight, or leave it out."
