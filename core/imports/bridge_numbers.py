"""Batches, number formats, recomputation and what else of a Megatron-Bridge configuration is not model or layout."""

from __future__ import annotations

from .table import Sheet

_MODULES = {"layernorm": "norm"}
"""Names of recompute_modules that are others in a plan."""


def put_batch(sheet: Sheet) -> None:
    sheet.put("batch.micro", sheet.value("train.micro_batch_size"), "train.micro_batch_size")
    if sheet.value("train.global_batch_size") is None:
        sheet.assumed.append("the file lacks a global batch: --global-batch gives it.")
    else:
        sheet.put("batch.global", sheet.value("train.global_batch_size"), "train.global_batch_size")
    flags = ("dataset.sequence_length", "dataset.seq_length", "model.seq_length")
    sequence = next((sheet.value(flag) for flag in flags if sheet.value(flag)), None)
    if sequence is None:
        sheet.assumed.append("the file does not say how long sequences are: --sequence does.")
    else:
        sheet.put("batch.sequence", sequence, *flags)
    if sheet.value("train.train_iters") is not None:
        sheet.put("train.steps", sheet.value("train.train_iters"), "train.train_iters")
    sheet.put("train.seed", sheet.value("rng.seed"), "rng.seed")
    if sheet.value("checkpoint.save"):
        sheet.put("checkpoint.folder", sheet.value("checkpoint.save"), "checkpoint.save")
        if sheet.value("checkpoint.save_interval"):
            sheet.put("checkpoint.every", sheet.value("checkpoint.save_interval"), "checkpoint.save_interval")


def put_numbers(sheet: Sheet) -> None:
    _put_precision(sheet)
    _put_recompute(sheet)
    name = sheet.value("optimizer.optimizer")
    if name not in ("adam", "adamw"):
        sheet.refuse("optimizer.optimizer", "only AdamW is read from this file; state and time of others differ.")
    betas = [float(sheet.value(f"optimizer.adam_beta{number}")) for number in (1, 2)]
    sheet.put("optimizer.betas", betas, "optimizer.adam_beta1", "optimizer.adam_beta2")
    if sheet.value("optimizer.lr") is not None:
        sheet.put("train.learning_rate", float(sheet.value("optimizer.lr")), "optimizer.lr")
    if sheet.value("optimizer.optimizer_cpu_offload"):
        sheet.put(
            "offload.optimizer",
            float(sheet.value("optimizer.optimizer_offload_fraction")),
            "optimizer.optimizer_offload_fraction",
        )
    if sheet.value("model.cpu_offloading"):
        sheet.put(
            "offload.activations", sheet.value("model.cpu_offloading_num_layers"), "model.cpu_offloading_num_layers"
        )
    overlap = [
        flag for flag in ("comm_overlap.tp_comm_overlap", "model.tp_comm_overlap") if sheet.value(flag) is not None
    ]
    if overlap:
        sheet.put("runtime.tp_comm_overlap", any(sheet.value(flag) for flag in overlap), *overlap)
    if sheet.value("model.pipeline_model_parallel_size") > 1 and sheet.value("model.overlap_p2p_comm") is not None:
        sheet.put("runtime.p2p_overlap", sheet.value("model.overlap_p2p_comm"), "model.overlap_p2p_comm")
        if not sheet.value("model.overlap_p2p_comm") and sheet.value("model.batch_p2p_comm") is not None:
            sheet.put("runtime.p2p_batched", sheet.value("model.batch_p2p_comm"), "model.batch_p2p_comm")
    if sheet.value("model.overlap_moe_expert_parallel_comm"):
        sheet.put("runtime.ep_comm_overlap", True, "model.overlap_moe_expert_parallel_comm")
    if sheet.value("model.moe_enable_deepep") or sheet.value("model.moe_token_dispatcher_type") == "flex":
        sheet.put("runtime.dispatch_once", True, "model.moe_enable_deepep", "model.moe_token_dispatcher_type")
    graphs = sheet.value("model.enable_cuda_graph") or sheet.value("model.external_cuda_graph")
    sheet.put(
        "runtime.cuda_graphs",
        bool(graphs or sheet.value("model.cuda_graph_impl") not in (None, "none")),
        "model.enable_cuda_graph",
        "model.cuda_graph_impl",
    )


def _put_precision(sheet: Sheet) -> None:
    recipe = sheet.value("mixed_precision")
    fp8 = (
        sheet.value("mixed_precision.fp8") or sheet.value("model.fp8") or (isinstance(recipe, str) and "fp8" in recipe)
    )
    fp16 = (
        sheet.value("mixed_precision.fp16")
        or sheet.value("model.fp16")
        or (isinstance(recipe, str) and "fp16" in recipe)
    )
    bf16 = (
        sheet.value("mixed_precision.bf16")
        or sheet.value("model.bf16")
        or (isinstance(recipe, str) and "bf16" in recipe)
    )
    dtype = "fp8" if fp8 else "bf16" if bf16 else "fp16" if fp16 else "fp32"
    sheet.put("precision.dtype", dtype, "mixed_precision.bf16", "mixed_precision.fp8", "model.bf16", "model.fp8")


def _put_recompute(sheet: Sheet) -> None:
    mode, number = sheet.value("model.recompute_granularity"), sheet.value("model.recompute_num_layers")
    if mode is None:
        for flag in ("method", "num_layers", "modules"):
            sheet.say(f"model.recompute_{flag}", "no-effect", "nothing is computed again")
        return
    sheet.put("recompute.mode", mode, "model.recompute_granularity")
    if mode == "selective":
        modules = [
            _MODULES.get(str(each), str(each)) for each in sheet.value("model.recompute_modules") or ["core_attn"]
        ]
        sheet.put("recompute.modules", modules, "model.recompute_modules")
    elif sheet.value("model.recompute_method") == "block" and number is not None:
        sheet.put("recompute.num_layers", number, "model.recompute_num_layers")
    elif number not in (None, 1):
        why = "several layers keep one input together, and are computed again together; modelled is one each"
        sheet.say("model.recompute_num_layers", "not-modelled", why)
    if sheet.value("model.distribute_saved_activations"):
        sheet.put("recompute.distribute", True, "model.distribute_saved_activations")
