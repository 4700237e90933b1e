"""The software stacks that `runtime.profile` names, in words; `simulator.stack` says what each one does, and from
which sources."""

from __future__ import annotations

from collections.abc import Mapping

STACKS: Mapping[str, str] = {
    "shardproof": "this package's own backend",
    "megatron-te": "Megatron-Core with Transformer Engine",
    "megatron-fsdp": "Megatron-Core with its own FSDP, as it came in February 2025",
    "nemo-24.05": "Megatron-Core and Transformer Engine in NVIDIA's container 24.05",
    "nemo-25.02": "NeMo 2 in NVIDIA's containers 25.02 to 25.04",
    "torchtitan": "torchtitan: FSDP2, tensor parallelism and pipelining of PyTorch",
    "fsdp": "PyTorch's FullyShardedDataParallel since torch 2.1, under Composer or a plain loop",
    "fsdp-1.13": "the same in PyTorch 1.13",
    "xla": "JAX: a compiled step that gathers and scatters weights (MaxText, PaxML)",
    "nanotron": "nanotron",
    "megatron-2021": "Megatron-LM of early 2021 (v2) and its forks",
    "megatron-2022": "Megatron-LM of 2022 (v3.0) and forks of that time",
    "megatron-2023": "Megatron-LM of 2023 without flash attention",
    "megatron-deepspeed": "Megatron-DeepSpeed of 2021 and 2022, as BLOOM was trained with",
    "megatron-deepspeed-2023": "Megatron-DeepSpeed of 2023, whose stages send to each other directly",
    "deepspeed-zero3": "ZeRO 3 of DeepSpeed of 2021: blocking gathers, no prefetch",
    "zero-bubble": "sail-sg/zero-bubble-pipeline-parallelism at its first version",
    "zero-bubble-te": "sail-sg/VocabularyParallelism: the same with Transformer Engine",
    "zero-bubble-flash": "the V-shaped schedules of it, without Transformer Engine and with flash attention",
}
"""Name -> stack, our own first, as `shardproof presets profiles` lists them."""

SCALING_STACKS = ("torchtitan",)
"""Those of which it is modelled how far the scales of 8-bit operands reach (`precision.scaling`)."""
