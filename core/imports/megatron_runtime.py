"""The flags of a Megatron command on formats, recomputation and what overlaps."""

from __future__ import annotations

import math

from .megatron_flags import RELEASES, UNDER, Direct
from .megatron_layout import FSDP
from .megatron_reading import Reading

_MODULES = {
    "core_attn": "core_attn",
    "layernorm": "norm",
    "mlp": "mlp",
    "mla_up_proj": "mla_up_proj",
    "moe": "moe",
    "moe_act": "moe_act",
    "shared_experts": "shared_experts",
}
"""--recompute-modules -> recompute.modules."""

_GROUPS = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "dp_cp": "dp",
    "pp": "pp",
    "ep": "ep",
    "expt_tp": "etp",
    "expt_dp": "edp",
}
"""--high-priority-stream-groups -> communicators.high_priority."""


def read_runtime(reading: Reading, release: str | None) -> None:
    """Fills the other sections."""
    for row in UNDER[""]:
        if row.key.partition(".")[0] in ("optimizer", "train", "data_parallel", "runtime", "offload"):
            reading.put_row(row)
    _precision(reading)
    _recompute(reading)
    _overlap(reading)
    profile = _profile(reading, release)
    if profile not in ("megatron-te", "megatron-fsdp"):
        reading.drop_defaults("data_parallel", "runtime")


def _precision(reading: Reading) -> None:
    eights = next((flag for flag in ("--fp8-format", "--fp8-hybrid") if reading.given(flag)), None)
    half, brain = reading.given("--fp16"), reading.given("--bf16")
    if eights is not None:
        if eights == "--fp8-format" and reading.text(eights) not in ("hybrid", "e4m3"):
            reading.say(eights, "refused", "known are hybrid and e4m3", "precision.dtype")
        else:
            reading.put("precision.dtype", "fp8", eights)
        _recipe(reading)
        reading.say("--bf16" if brain else "--fp16", "mapped", "what is not in 8 bits", "precision.dtype")
    elif brain or half:
        reading.put("precision.dtype", "bf16" if brain else "fp16", "--bf16" if brain else "--fp16")
    else:
        reading.put("precision.dtype", "fp32", "--bf16", why="neither --bf16 nor --fp16 is given")
    if half and eights is None:
        for row in UNDER["--fp16"]:
            if row.flag == "--loss-scale" or not reading.is_written("--loss-scale"):
                _loss_scale(reading, row)
    if reading.given("--grad-reduce-in-bf16"):
        reading.put("precision.gradient_dtype", "bf16", "--grad-reduce-in-bf16")
    elif reading.given("--accumulate-allreduce-grads-in-fp32"):
        reading.put("precision.gradient_dtype", "fp32", "--accumulate-allreduce-grads-in-fp32")


def _loss_scale(reading: Reading, row: Direct) -> None:
    """One number of loss scaling."""
    value = reading.number(row.flag)
    if value is not None and row.kind == "float" and (value <= 0 or math.frexp(value)[0] != 0.5):
        reading.say(row.flag, "not-modelled", "the loss scales of a plan are powers of two")
    else:
        reading.put_row(row)


def _recipe(reading: Reading) -> None:
    """Which ranks agree on the largest magnitudes."""
    if (recipe := reading.text("--fp8-recipe")) is None:
        return
    if recipe == "delayed":
        reading.put("runtime.amax_reduction", "replicas", "--fp8-recipe")
    elif recipe in ("tensorwise", "mxfp8", "blockwise"):
        reading.put(
            "runtime.amax_reduction",
            "none",
            "--fp8-recipe",
            why="scaled by the tensors at hand; how far a scale reaches is not modelled here",
        )
    else:
        reading.say(
            "--fp8-recipe", "refused", "known are delayed, tensorwise, mxfp8 and blockwise", "runtime.amax_reduction"
        )


def _recompute(reading: Reading) -> None:
    granularity, flag = reading.text("--recompute-granularity"), "--recompute-granularity"
    if granularity is None and reading.given("--recompute-activations"):
        granularity, flag = "selective", "--recompute-activations"
    for older in ("--checkpoint-activations", "--activations-checkpoint-method"):
        if granularity is None and reading.given(older):
            granularity, flag = "full", older
    if granularity is None:
        if reading.given("--moe-layer-recompute"):
            reading.put("recompute.mode", "selective", "--moe-layer-recompute")
            reading.put("recompute.modules", ["moe"], "--moe-layer-recompute")
        return
    if granularity not in ("full", "selective"):
        reading.say(flag, "refused", "known are full and selective", "recompute.mode")
        return
    reading.put("recompute.mode", granularity, flag)
    if reading.is_written("--recompute-activations"):
        reading.say("--recompute-activations", "mapped", "", "recompute.mode")
    if granularity == "full":
        _whole_layers(reading)
    else:
        _modules(reading)


def _whole_layers(reading: Reading) -> None:
    methods = ("--recompute-method", "--activations-checkpoint-method")
    method_flag = next((flag for flag in methods if reading.is_written(flag)), methods[0])
    method = reading.text(method_flag) or "uniform"
    counts = ("--recompute-num-layers", "--activations-checkpoint-num-layers", "--checkpoint-num-layers")
    flag = next((flag for flag in counts if reading.is_written(flag)), counts[0])
    count = reading.integer(flag)
    if method == "block" and count is not None:
        reading.put("recompute.num_layers", count, flag, method_flag)
    elif method == "uniform":
        reading.say(method_flag, "mapped", "all layers", "recompute.mode")
        if count == 1:
            reading.say(flag, "mapped", "every layer keeps its input", "recompute.mode")
        elif count is not None:
            reading.say(
                flag, "not-modelled", f"Megatron keeps the input of every {count}th layer, a plan that of every one"
            )
    elif method != "block":
        reading.say(method_flag, "refused", "known are uniform and block", "recompute.num_layers")
    for spread in ("--distribute-saved-activations", "--distribute-checkpointed-activations"):
        if reading.given(spread):
            reading.put("recompute.distribute", True, spread)


def _modules(reading: Reading) -> None:
    if (text := reading.text("--recompute-modules")) is None:
        return
    names = text.replace(",", " ").split()
    if strange := [name for name in names if name not in _MODULES]:
        reading.say(
            "--recompute-modules",
            "refused",
            f"{', '.join(strange)}: a plan has {', '.join(_MODULES)}",
            "recompute.modules",
        )
    else:
        reading.put("recompute.modules", [_MODULES[name] for name in names], "--recompute-modules")


def _overlap(reading: Reading) -> None:
    if (bucket := reading.integer("--ddp-bucket-size")) is not None:
        reading.put("data_parallel.bucket_bytes", 4 * bucket, "--ddp-bucket-size", why="elements of four bytes")
    if reading.given("--no-scatter-gather-tensors-in-pipeline"):
        reading.put("runtime.scatter_gather", False, "--no-scatter-gather-tensors-in-pipeline")
    kind = reading.text("--moe-token-dispatcher-type")
    if reading.given("--moe-enable-deepep"):
        reading.put("runtime.dispatch_once", True, "--moe-enable-deepep", "--moe-token-dispatcher-type")
    elif kind == "flex":
        flags = ("--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend")
        reading.put("runtime.dispatch_once", True, *flags)
    elif kind in ("alltoall", "alltoall_seq"):
        reading.say("--moe-token-dispatcher-type", "no-effect", "the profile exchanges tokens in this way")
    elif kind is not None:
        reading.say("--moe-token-dispatcher-type", "not-modelled", "the profile exchanges tokens all to all")
    for flag in ("--enable-cuda-graph", "--external-cuda-graph"):
        if reading.given(flag):
            reading.put("runtime.cuda_graphs", True, flag)
    if (graphs := reading.text("--cuda-graph-impl")) is not None:
        reading.put("runtime.cuda_graphs", graphs != "none", "--cuda-graph-impl")
    if (groups := reading.text("--high-priority-stream-groups")) is not None:
        names = dict.fromkeys(_GROUPS[name] for name in groups.replace(",", " ").split() if name in _GROUPS)
        if names:
            reading.put("communicators.high_priority", list(names), "--high-priority-stream-groups")
        else:
            reading.say("--high-priority-stream-groups", "not-modelled", "these groups have no name in a plan")


def _profile(reading: Reading, release: str | None) -> str:
    """Whose memory and overlap behaviour is modelled."""
    profile, flag, why = "megatron-te", "--transformer-impl", ""
    local = _is_local(reading, release)
    old = release in RELEASES[: RELEASES.index("0.4")] or reading.is_written("--DDP-impl")
    if reading.given("--deepspeed"):
        profile, flag = "megatron-deepspeed-2023", "--deepspeed"
        if reading.is_written("--checkpoint-activations") and not reading.is_written(
            "--use-rotary-position-embeddings"
        ):
            profile = "megatron-deepspeed"
    elif (fsdp := next((each for each in FSDP if reading.given(each)), None)) is not None:
        profile, flag = "megatron-fsdp", fsdp
    elif reading.given("--enable-zero-bubble"):
        profile, flag = ("zero-bubble-flash" if _flash(reading) else "zero-bubble"), "--enable-zero-bubble"
    elif old:
        profile, flag = "megatron-2021", "--DDP-impl"
    elif local:
        profile, why = "megatron-2023", "without Transformer Engine"
    reading.put("runtime.profile", profile, flag, why=why)
    if not local and profile == "megatron-te" and reading.is_written("--transformer-impl"):
        reading.say("--transformer-impl", "mapped", "", "runtime.profile")
    _kernel(reading, local or profile not in ("megatron-te", "megatron-fsdp"))
    return profile


def _is_local(reading: Reading, release: str | None) -> bool:
    implementation = reading.text("--transformer-impl")
    if implementation is None:
        return release in ("0.4", "0.5")
    if implementation not in ("local", "transformer_engine", "inference_optimized"):
        reading.say("--transformer-impl", "refused", "known are local and transformer_engine", "runtime.profile")
    return implementation == "local"


def _flash(reading: Reading) -> bool:
    return any(reading.given(flag) for flag in ("--use-flash-attn", "--use-flash-attn-v2"))


def _kernel(reading: Reading, is_local: bool) -> None:
    """The attention kernel."""
    backend = reading.text("--attention-backend")
    if backend is not None:
        kernel = {"flash": "fused", "fused": "fused", "unfused": "unfused", "local": "unfused", "auto": None}
        if backend not in kernel:
            reading.say("--attention-backend", "refused", f"known are {', '.join(kernel)}", "runtime.attention")
        elif (chosen := kernel[backend]) is not None:
            reading.put("runtime.attention", chosen, "--attention-backend")
        else:
            reading.say("--attention-backend", "no-effect", "the profile takes the best kernel")
    if _flash(reading):
        flag = next(flag for flag in ("--use-flash-attn", "--use-flash-attn-v2") if reading.is_written(flag))
        if is_local:
            reading.put("runtime.attention", "flash-2", flag)
        elif backend is None:
            reading.say(flag, "no-effect", "Transformer Engine takes the best kernel, which is the profile's")
