"""What published tables leave unsaid, as a table: the software of each source.

Nothing here depends on a measurement. A default of a `Stack` holds for a whole source (or one of its series) and says
where it is known from; a prediction lists every default that it used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .row import Row

GPT: Mapping[str, Any] = {
    "activation": "gelu_tanh",
    "norm": "layernorm",
    "position": "learned",
    "tied_embeddings": True,
    "bias": True,
}
"""Megatron's GPT: learned positions, LayerNorm, biases, GELU, tied embeddings."""
LLAMA: Mapping[str, Any] = {
    "activation": "swiglu",
    "norm": "rmsnorm",
    "position": "rope",
    "tied_embeddings": False,
    "bias": False,
}
NEMOTRON: Mapping[str, Any] = {**LLAMA, "activation": "relu_squared", "norm": "layernorm"}
MPT: Mapping[str, Any] = {**GPT, "bias": False}
MLA: Mapping[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Latent attention of DeepSeek-V2 (arXiv 2405.04434, section 3.1.2) and V3 (arXiv 2412.19437, section 4.2)."""


def conventions(name: str) -> Mapping[str, Any]:
    """What a family of models has besides its sizes, by the model's name."""
    lower = name.lower()
    if "nemotron" in lower:
        return NEMOTRON
    if lower.startswith("mpt"):
        return MPT
    if "neox" in lower:
        return {**GPT, "position": "rope", "tied_embeddings": False}
    if "internlm" in lower:
        return {**LLAMA, "bias": True}
    if "qwen3" in lower:
        return {**LLAMA, "qk_norm": True}
    if "qwen2" in lower:
        return {**LLAMA, "qkv_bias": True}
    if "oss" in lower:
        return {**LLAMA, "bias": True, "rope_scaling": "yarn", "rope_factor": 32.0, "rope_original_positions": 4096}
    return GPT if lower.startswith(("gpt", "bloom", "opt", "mt-nlg")) else LLAMA


@dataclass(frozen=True)
class Stack:
    """What one source's software does: a runtime profile, and values for fields that its tables leave null.

    `pads_vocabulary`: Megatron pads the vocabulary to a multiple of 128*tp (`--make-vocab-size-divisible-by`) and the
    source gives the tokenizer's size. `cuts_vocabulary`: a rank holds the tokenizer's size // tp and no more. `model`,
    `runtime` and `data_parallel` hold fields of those sections. `corrections` replace fields that the rows mark as
    inferred. `power_share`: as in `Machine`, where the source says it of all its machines. `gradient_dtype` is what
    gradients are kept and reduced in, where it is not the profile's, and `sharded_profile` the profile of rows under
    ZeRO-3, where other code runs them; `profile_of_mode` has those of rows by their `mp_mode`. `left_open` has other values
    of defaults that public evidence admits as well. `scalings`: word of a row's precision -> `precision.scaling`.
    `selective`: word of a row's recomputation -> modules that are repeated, the first that fits.
    """

    profile: str
    note: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pads_vocabulary: bool = False
    cuts_vocabulary: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)
    data_parallel: Mapping[str, Any] = field(default_factory=dict)
    corrections: Mapping[str, Any] = field(default_factory=dict)
    gradient_dtype: str | None = None
    power_share: float = 1.0
    left_open: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    sharded_profile: str | None = None
    profile_of_mode: Mapping[str, str] = field(default_factory=dict)
    scalings: Mapping[str, str] = field(default_factory=dict)
    selective: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_NEMO = Stack(
    "megatron-te",
    "NeMo recipes: no recomputation unless the table says so, sequence parallelism with every tensor parallelism",
    {"recompute": "none", "parallel.sp": True},
    # nemo/collections/llm/recipes: pretrain_performance_optimizations sets grad_reduce_in_fp32 = False
    gradient_dtype="bf16",
)
_GPT3_DROPOUT: Mapping[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}

_DGXC = replace(
    _NEMO,
    profile="nemo-25.02",
    note=f"{_NEMO.note}; NeMo 2 of containers 25.02 to 25.04 (FW_VERSION in launch.sh of each recipe), which scales fp8 by history and "
    "lets all replicas agree (nemo/collections/llm/recipes/precision/mixed_precision.py)",
)
_NEMO_1 = replace(
    _NEMO,
    note=f"{_NEMO.note}; NeMo 1 does not check gradients unless asked to (megatron_gpt_model.py, setup_mcore_distributed_parallel); it "
    "compiles the squared ReLU (nemo/collections/nlp/modules/common/megatron/utils.py at v2.1.0)",
    data_parallel={"check_gradients": False},
)
_DGXC_DEEPSEEK = replace(
    _DGXC,
    note="NeMo 7a8f1cc (tag v25.05, deepseek_v3/pretraining/setup.sh): one MTP module, tp_comm_overlap=False, first stage one and last "
    "stage two layers short (its scripts/performance/llm/pretrain_deepseek_v3.py)",
    model={"num_mtp_layers": 1},
    runtime={"tp_comm_overlap": False},
)
_MLPERF = replace(
    _NEMO,
    note=(
        f"{_NEMO.note}; the largest fp8 values are found over tensor-parallel ranks (TP_ONLY_AMAX_RED in "
        "conf/custom.yaml, v4.1 to v5.1)"
    ),
    runtime={"amax_reduction": "model"},
)
_VTRAIN = Stack(
    "megatron-deepspeed-2023",
    "Megatron-DeepSpeed (data/README.md of vTrain at f8dda84); 50,257 tokens as in its src/config.py; half precision "
    "as there (ParamInfo)",
    {"model.vocab": 50257, "precision": "fp16"},
    pads_vocabulary=True,
)
_VOCABULARY = Stack(
    "zero-bubble-te",
    "a fork of Megatron-LM of 2024; --fp16 as in its pretrain_gpt.sh",
    model={"tied_embeddings": False},
    corrections={"precision": "fp16"},
)
_TITAN = Stack(
    "torchtitan",
    "torchtitan",
    {"recompute": "selective"},
    scalings={"rowwise": "row", "mxfp8": "block"},
    selective={"core": ("core_attn",), "": ("norm",)},  # it goes by no modules (`Profile.selective_operators`)
)
_TITAN_2025 = replace(
    _TITAN, note=("torchtitan, whose loss is compiled with the model since 2025"), runtime={"fused_loss": True}
)

_XLA: Mapping[str, Any] = {"attention": "fused", "compile": True, "fused_loss": True}
"""Compiled steps with attention of cuDNN."""

_XLA_SELECTIVE = {"save_qkv": ("core_attn", "norm", "mlp"), "": ("norm", "mlp")}
"""XLA's policies of saving projections repeat norms, core and the MLP up to its last product; attention's output, which
MaxText's policy does not save, is not counted (1% to 2% of a step)."""

STACKS: Mapping[str, Stack] = {
    "SC21 Narayanan": Stack(
        "megatron-2021",
        "Megatron-LM of 2021; two layers a chunk: examples/academic_paper_scripts/sc21/run_figure_18.sh",
        {"layers_per_chunk": 2},
        sharded_profile="deepspeed-zero3",
    ),
    "Korthikanti 2022": Stack(
        "megatron-2022",
        "Megatron-LM of 2022; backward all-reduces overlap with the weight gradients (section 6.2, on table 4)",
        runtime={"tp_comm_overlap": True},
    ),
    "vTrain (MICRO24)": _VTRAIN,
    "vtrain_single": replace(
        _VTRAIN,
        profile="megatron-2022",
        note=f"{_VTRAIN.note}; what a step costs once grows with the layers by the traffic of 34 bytes a parameter (tp2, hidden 1024 and "
        "2048), too little for DeepSpeed's preparation of gradients; no recomputation, against use_checkpoint of all "
        "its configurations: "
        "the marginal seconds of a sequence are those of three passes (2.0 ms a layer at hidden 2048; four would "
        "need 71% of the peak over "
        "all kernels), and its own predictor repeats nothing on the last rank (src/predictor.py), which with pp=1 is "
        "the only one; a rank "
        "holds 50,257 // tp tokens, as in src/predictor.py and src/model/gpt_modeling.py: on one device, where that "
        "is odd, the head takes "
        "4.1 times as long as on two",
        pads_vocabulary=False,
        cuts_vocabulary=True,
        corrections={"recompute": "none"},
    ),
    "BLOOM chronicles-prequel": Stack(
        "megatron-deepspeed",
        ("Megatron-DeepSpeed of 2022; 96 heads as in its 'Best TFLOPs' section for hidden 14400"),
        {"model.heads": 96},
    ),
    "MT-NLG 530B (2201.11990)": Stack("megatron-deepspeed", "Megatron-DeepSpeed of 2021"),
    "Megatron-LM README 2020": Stack(
        "megatron-2021",
        "Megatron-LM of 2020, which knows no accumulation (megatron/training.py at v1.0, train_step); --DDP-impl "
        "torch, which reduces "
        "during the backward, in its README's commands",
        {"recompute": "full", "batch.num_microbatches": 1},
        data_parallel={"overlap_grad_reduce": True},
    ),
    "Zero Bubble PP (ICLR24)": Stack(
        "zero-bubble",
        "a fork of Megatron-LM of 2023; sizes of the models fit a tied table of 32,000 tokens (c4 with a "
        "sentencepiece tokenizer)",
        {"model.vocab": 32000},
        pads_vocabulary=True,
    ),
    "PP with Controllable Memory": Stack(
        "zero-bubble",
        "as Zero Bubble PP, by the same authors",
        {"model.vocab": 32000, "precision": "fp16"},
        pads_vocabulary=True,
    ),
    "Vocabulary Parallelism (2411.05288)": _VOCABULARY,
    "vocabpar_vhalf": replace(
        _VOCABULARY,
        profile="zero-bubble-flash",
        note=(f"{_VOCABULARY.note}; V-Half in its zero-bubble branch, without Transformer Engine"),
    ),
    "MegaScale NSDI24": Stack(
        "megatron-2023",
        "Megatron-LM of early 2023 with selective recomputation: overlap of data and pipeline parallelism, flash "
        "attention and fused norms "
        "are named as MegaScale's own (sections 3.2 and 3.3)",
        {"batch.micro": 1, "recompute": "selective", "parallel.sp": True},
        runtime={"tp_comm_overlap": True},
    ),
    "MegaScale-MoE": Stack("megatron-te", "Megatron-LM and MegaScale of 2025", {"batch.micro": 1}),
    "dgxc-benchmarking": _DGXC,
    "dgxc_maxtext": Stack(
        "xla",
        "MaxText: XLA fuses elementwise kernels, attention=cudnn_flash_te, remat_policy=save_qkv_proj, whole copies "
        "over 16 nodes "
        "(tag v25.04.01, maxtext/configure.sh)",
        {"recompute": "selective (save_qkv_proj)", "shard": 128},
        runtime=_XLA,
        selective=_XLA_SELECTIVE,
    ),
    "dgxc_paxml": Stack(
        "xla",
        "PaxML: XLA fuses elementwise kernels, attention of Transformer Engine, SAVE_QKV_OUT_PROJ, whole copies over "
        "16 nodes "
        "(tag v24.11.1, paxml/configure.sh and paxml_mod_configs.py)",
        {"recompute": "selective (save_qkv_out_proj)", "shard": 128},
        runtime=_XLA,
        selective=_XLA_SELECTIVE,
    ),
    "dgxc2502": replace(
        _NEMO_1, note=("NeMo 1 of container 24.12 (tag v25.02.01, configure.sh of llama3.1 and nemotron)")
    ),
    "dgxc2411_gpt3": replace(
        _NEMO_1,
        profile="nemo-24.05",
        note="NeMo 24.05 with NVTE_FUSED_ATTN=0, which leaves FlashAttention 2, NVTE_DP_AMAX_REDUCE_INTERVAL=0, dropout of 0.1 and 12 "
        "chunks (tag v24.11.1, nemo_megatron/launch.sh and gpt3_175b_hydra.yaml)",
        defaults={**_NEMO.defaults, "parallel.vpp": 12},
        model=_GPT3_DROPOUT,
        runtime={"attention": "flash-2", "fused_loss": False, "amax_reduction": "model"},
    ),
    "dgxc2504_gpt3": replace(
        _NEMO_1,
        note="NeMo 24.12; dropout of 0.1 (tag v25.04.01, nemo_megatron/cfg/gpt3_175b_hydra.yaml)",
        model=_GPT3_DROPOUT,
        runtime={"fused_loss": False},
    ),
    "dgxc2502_nem340": replace(
        _NEMO_1,
        note="NeMo 24.09 with NVTE_FUSED_ATTN=0, which leaves FlashAttention 2, and selective recomputation (tag v25.02.01, "
        "nemotron/configure.sh and nemotron4-340b-synth.yaml)",
        defaults={**_NEMO.defaults, "recompute": "selective"},
        runtime={"attention": "flash-2"},
    ),
    "dgxc2504_grok": replace(
        _NEMO_1,
        note="NeMo 24.12 with NVTE_FUSED_ATTN=0, which leaves FlashAttention 2, and model.ub_tp_comm_overlap=true on the command line "
        "(tag v25.04.01, grok1/configure.sh)",
        runtime={"attention": "flash-2", "tp_comm_overlap": True, "fused_loss": False},
    ),
    "dgxc_gb200_grok": replace(
        _DGXC,
        note="NeMo 7a8f1cc (tag v25.05, grok1/setup.sh and launch.sh): tp_comm_overlap=True (its scripts/performance/llm/"
        "pretrain_grok1_314b.py), CUDA graphs",
        runtime={"tp_comm_overlap": True, "cuda_graphs": True},
    ),
    "dgxc_dsv3": _DGXC_DEEPSEEK,
    "dgxc_dsv3_gb200": replace(
        _DGXC_DEEPSEEK,
        note=f"{_DGXC_DEEPSEEK.note}; attention in steps, since on Blackwell cuDNN's fused backward for heads of 192 and 128 needs 9.11 "
        "(TransformerEngine v2.5, fused_attn.cpp) and FlashAttention knows no such heads (its "
        "dot_product_attention/utils.py)",
        runtime={**_DGXC_DEEPSEEK.runtime, "attention": "unfused"},
    ),
    "MLPerf Training v4.1": replace(_MLPERF, data_parallel=_NEMO_1.data_parallel),
    "MLPerf Training v5.0": replace(
        _MLPERF,
        note=f"{_MLPERF.note}; a bucket has 200 parameters, which is one tensor (bucket_size, ibid.)",
        data_parallel={"bucket_bytes": 4 * 200},
    ),
    "MLPerf Training v5.1": replace(
        _MLPERF,
        note="NVIDIA's implementations of Llama 3.1, which do not look gradients through (training_results_v5.1, pretrain.py) "
        "and whose buckets have 134,217,728 parameters (conf/custom.yaml)",
        data_parallel={"check_gradients": False, "bucket_bytes": 4 * 134_217_728},
    ),
    "MLPerf Training v5.1, Cisco": replace(
        _MLPERF,
        note="its own pretrain.py (training_results_v5.1): the callback that overlaps tensor parallelism is left out, gradients are "
        "looked through, and a bucket has 64 parameters (conf/custom.yaml), which is one tensor",
        runtime={**_MLPERF.runtime, "tp_comm_overlap": False},
        data_parallel={"bucket_bytes": 4 * 64},
    ),
    "Megatron-Core README r0.8": Stack(
        "nemo-24.05",
        "Megatron-Core of July 2024 (f2e5db4 brought the table). Its README at core_v0.8.0 overlaps tensor-, data- "
        "and pipeline-parallel "
        "communication: the last is for interleaved stages only (megatron/training/arguments.py), and the 23 layers "
        "of a stage of the 119B "
        "model admit no chunk but one layer; one sequence a microbatch as in "
        "examples/gpt3/train_gpt3_175b_distributed.sh",
        {
            "recompute": "none",
            "parallel.sp": True,
            "parallel.sharding": "distributed optimizer (ZeRO-1)",
            "batch.micro": 1,
            "schedule": "interleaved 1F1B",
            "layers_per_chunk": 1,
        },
        left_open={"batch.micro": (1, 2, 4)},
        runtime={"tp_comm_overlap": True},
    ),
    "Megatron-LM examples/llama": replace(
        _NEMO,
        note="settings of NeMo's performance scripts (its README, section 4): overlapped tensor parallelism",
        runtime={"tp_comm_overlap": True},
    ),
    "Megatron-Bridge perf summary": replace(
        _NEMO,
        note="its performance recipes, which do not look gradients through (scripts/performance/utils/helpers.py at v0.2.0) and scale fp8 "
        "without history",
        runtime={"amax_reduction": "none"},
        data_parallel={"check_gradients": False},
    ),
    "NeMo-Framework-Launcher 24.05": replace(
        _NEMO_1,
        profile="nemo-24.05",
        note="ub_tp_comm_overlap: true in its configurations of GPT-3 and Llama (launcher_scripts/conf/training)",
        runtime={"tp_comm_overlap": True},
    ),
    "Nemotron-4 15B report": Stack(
        "nemo-24.05",
        "Megatron-Core of at most February 2024, to which the container of May is nearest; two sequences a "
        "microbatch and sequence "
        "parallelism as in NVIDIA's configurations of this model (NeMo-Framework-Launcher, "
        "conf/training/nemotron/nemotron_15b.yaml; NeMo, "
        "llm/recipes/nemotron4_15b.py)",
        {"recompute": "none", "batch.micro": 2, "parallel.sp": True},
        left_open={"batch.micro": (1, 2, 4)},
    ),
    "Llama 3 herd": Stack(
        "megatron-te",
        "arXiv 2407.21783, section 3.3.2: no recomputation at 8K; one layer less on either end leaves the first "
        "chunk with only the "
        "embedding and the last with only the head, so a chunk is one layer; gradients are summed over microbatches "
        "in fp32 before they "
        "are scattered, and weights stay gathered, which is ZeRO-1 in what is sent; data parallelism outermost. "
        "Sequence parallelism: "
        "without it activations are 2.5 times the devices' memory",
        {"recompute": "none", "batch.micro": 1, "parallel.vpp": 8, "parallel.sp": True, "order": "tp-cp-ep-pp-dp"},
        corrections={"parallel.sharding": "ZeRO-1"},
        gradient_dtype="fp32",
        left_open={"parallel.vpp": (2, 4, 8)},
    ),
    "MoE Parallel Folding (2504.14960)": Stack(
        "megatron-te",
        "Megatron-Core of 2025, which wants sequence parallelism for experts under tensor parallelism; one sequence "
        "a microbatch and one "
        "layer a chunk as in the authors' benchmarks (yanring/Megatron-MoE-ModelZoo, "
        "runtime_configs/benchmarking/runtime.conf)",
        {
            "recompute": "none",
            "batch.micro": 1,
            "parallel.sp": True,
            "schedule": "interleaved 1F1B",
            "layers_per_chunk": 1,
        },
        left_open={"layers_per_chunk": (1, 7)},
        sharded_profile="megatron-fsdp",
    ),
    "SimuMax B200 (MooreThreads)": Stack("megatron-te", "Megatron-LM 23e00ed with TE 2.11"),
    "nanotron v0.5 (HF)": Stack(
        "nanotron",
        "nanotron; 131,072 tokens as in scripts/scaling_benchmarks.py at 0e0a27e, which the printed sizes confirm; "
        "no recomputation there",
        {"recompute": "none", "model.vocab": 131072},
    ),
    "InternEvo": Stack(
        "megatron-te",
        "InternEvo of 2023: flash-attn 1, gates and norms in steps",
        runtime={"attention": "flash-1", "compile": False},
        data_parallel={"check_gradients": False},
    ),
    "llm-foundry (MosaicML)": Stack(
        "fsdp",
        "Composer with FSDP, of 2023: attention in Triton (scripts/train/benchmarking/submit_benchmarks.py), loss of "
        "flash-attn; "
        "torch 2.1.0, whose checkpoints stop early, and 1.13.1 in the tables of mixed precision PURE (sweep.sh at "
        "b2a43a1 and before)",
        runtime={"attention": "triton", "fused_loss": True},
        profile_of_mode={"PURE": "fsdp-1.13"},
    ),
    "IBM/PyTorch FSDP blog": Stack("fsdp", "PyTorch FSDP"),
    "torchtitan benchmarks": _TITAN,
    "torchtitan async-TP": _TITAN_2025,
    "torchtitan docs A100": _TITAN,
    "torchtitan mxfp8 doc": replace(
        _TITAN_2025,
        note="torchtitan at 6fc499f, compiled, with cuDNN's attention (models/attention.py), whose result selective recomputation by "
        "operations did not keep yet (`_save_list` of models/llama3/infra/parallelize.py); devices limited in power "
        "(its docs/mxfp8.md), "
        "by the same authors to 750 W (pytorch/ao, pull request 3566)",
        defaults={"recompute": "selective (op, with the attention core)"},
        runtime={"compile": True, "fused_loss": True, "attention": "fused"},
        power_share=750 / 1000,
    ),
    "Sailor (SOSP25)": Stack(
        "megatron-deepspeed",
        "its fork of Megatron-DeepSpeed in nvcr.io/nvidia/pytorch:24.10-py3, which lets fp32 products run in TF32; "
        "neither --fp16 nor "
        "--bf16, and no recomputation (eth-easl/sailor at cf2c8e3, ae_scripts/clariden_scripts/run_opt.slurm and "
        "Dockerfile); its layers "
        "drop nothing (third_party/Megatron-DeepSpeed/megatron/model/opt_model.py)",
        {"precision": "fp32", "recompute": "none", "fp32_products": "tf32"},
        pads_vocabulary=True,
        runtime={"dropout": False},
        left_open={"fp32_products": ("tf32", "fp32")},
    ),
}
"""Series, first words of series' names, source and submitter, or source -> what its software does."""


def stack_of(row: Row) -> Stack | None:
    """What ran a row: the stack of its series, else of the longest first words of the series' name that have one (all
    recipes of a release), else of who submitted it, else of its source; None where none is described."""
    words, submitter = row.family.split("_"), str(row["source_ref"]).partition("/")[0]
    names = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((STACKS[name] for name in (*names, f"{row.source}, {submitter}", row.source) if name in STACKS), None)
