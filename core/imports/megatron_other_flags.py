"""The arguments of Megatron-LM and its forks that have no key in a plan, as data: status, why, and which they are.

How flags are written: `megatron_flags.COMBINED`. Behind a colon stands the default, which changes nothing.
"""

from __future__ import annotations

from .account import Status

OTHERS: tuple[tuple[Status, str, str], ...] = (
    (
        "no-effect",
        "it watches the run, and the step is the same",
        """
log-interval=:100 tensorboard-dir= log-params-norm log-num-zeros-in-grad tensorboard-log-interval=:1
tensorboard-queue-size=:1000 log-timers-to-tensorboard log-batch-size-to-tensorboard@-0.8
no-log-learnig-rate-to-tensorboard@-0.8 no-log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard
log-memory-to-tensorboard timing-log-level=:0 no-barrier-with-level-1-timing timing-log-option=:minmax
log-world-size-to-tensorboard wandb-project= wandb-exp-name= wandb-save-dir= profile profile-step-start=:10
profile-step-end=:12 profile-ranks=+ log-throughput@0.5 log-progress@0.5 enable-one-logger@0.5-0.7
one-logger-project=:megatron-lm@0.5 one-logger-entity=:hwinf_dcm@0.5-0.7 one-logger-run-name=@0.5 test-mode@0.6
moe-per-layer-logging@0.6 log-straggler@0.7 disable-straggler-on-startup@0.7 straggler-ctrlr-port=:65535@0.7
straggler-minmax-count=:1@0.7 check-weight-hash-across-dp-replicas-interval=@0.7 no-one-logger@0.8
one-logger-async@0.8 app-tag-run-name=@0.8 app-tag-run-version=:0.0.0@0.8 logging-level=@0.8
log-level= log-level-replica= enable-ft-package@0.9
config-logger-dir=@0.9 use-pytorch-profiler@0.9 record-memory-history@0.10 memory-snapshot-path=:snapshot.pickle@0.10
calc-ft-timeouts@0.11 run-workload-inspector-server@0.12 result-rejected-tracker-filename=@0.12 log-energy@0.13
wandb-entity=@0.15 ft-num-warmup-iters=:5@0.16 dump-param-to-param-group-map=@0.16 rl-profile@0.19
rl-profile-dir=@0.19 otel-enabled@0.20 otel-service-name=@0.20 otel-span-groups=@0.20
disable-log-loss-scale-to-tensorboard@0.16 log-memory-interval=@0.16 log-device-memory-used@0.16
log-max-attention-logit@0.16 save-wgrads-interval=@0.16 save-dgrads-interval=@0.16
pytorch-profiler-collect-shapes@0.17 pytorch-profiler-collect-callstack@0.17 pytorch-profiler-collect-chakra@0.17
flight-recorder-dump-path=@0.17 flight-recorder-trace-buffer-size=:2000@0.17 no-flight-recorder-dump-on-timeout@0.17
disable-flight-recorder-dump-on-timeout@0.17 flight-recorder-include-stack-trace@0.17
no-flight-recorder-include-only-active@0.17 disable-flight-recorder-include-only-active@0.17
no-flight-recorder-extra-dump-on-exec@0.17 disable-flight-recorder-extra-dump-on-exec@0.17 record-shapes@0.18
nvtx-ranges@0.18 gpu-sniff-test-interval=@0.18 save-params-interval=@0.18 save-activations-interval=@0.18
save-tokens-per-expert-interval=@0.18 moe-routing-trace-path=@0.19 moe-routing-trace-max-training-iters=@0.19
moe-routing-trace-capture-logits@0.19 moe-routing-trace-capture-hidden-states@0.19 moe-routing-trace-dump-weights@0.19
""",
    ),
    (
        "no-effect",
        "checkpoints: what is saved and read is the same to a step",
        """
override-lr-scheduler@-2.6 use-checkpoint-lr-scheduler@-2.6 save= save-interval= no-save-optim no-save-rng load=
no-load-optim no-load-rng finetune override-opt_param-scheduler use-checkpoint-opt_param-scheduler
exit-on-missing-checkpoint pretrained-checkpoint=@0.6 ckpt-step=@0.6 use-dist-ckpt@0.6 auto-detect-ckpt-format@0.6
dist-ckpt-format=@0.6 ckpt-fully-parallel-save@0.6 async-save@0.7 ckpt-fully-parallel-load@0.7
ckpt-assume-constant-structure@0.7 no-ckpt-fully-parallel-save@0.8 dist-ckpt-strictness=:assume_ok_unexpected@0.8
s3-cache-path=@0.8-0.12 persistent-save-interval=@0.9 non-persistent-save-interval=@0.9 non-persistent-ckpt-type=@0.9
non-persistent-global-ckpt-dir=@0.9 non-persistent-local-ckpt-dir=@0.9
non-persistent-local-ckpt-algo=:fully_parallel@0.9 ckpt-format=:torch_dist@0.9 ckpt-convert-format=@0.9
ckpt-convert-save=@0.9 ckpt-convert-update-legacy-dist-opt-format@0.9 no-use-tokenizer-model-from-checkpoint-args@0.10
replication@0.11 replication-jump=@0.11 replication-factor=:2@0.11 use-persistent-ckpt-worker@0.12
load-model-opt-format@0.13-0.14 object-storage-cache-path=@0.13 disable-msc@0.13 save-retain-interval=@0.14
load-main-params-from-ckpt@0.14 no-strict-fsdp-dtensor-load@0.14 override-opt-param-scheduler@0.15
use-checkpoint-opt-param-scheduler@0.15 dist-ckpt-save-pre-mcore-014@0.15 dist-ckpt-optim-fully-reshardable@0.15
distrib-optim-fully-reshardable-mem-efficient@0.15 dist-ckpt-workers=:1@0.17 enable-msc@0.18
override-ckpt-iteration=@0.19 ckpt-drop-redundant-extra-state@0.20
disable-use-tokenizer-model-from-checkpoint-args@0.16 disable-ckpt-fully-parallel-save@0.16-0.16
disable-strict-fsdp-dtensor-load@0.16 async-strategy=:nvrx@0.17 async-ckpt-cpu-priority=:10@0.17
async-ckpt-io-priority=:3@0.17 ckpt-fully-parallel-load-exchange-algo=:broadcast@0.17
ckpt-fully-parallel-save-process-group=:dp@0.17 ckpt-fully-parallel-load-process-group=:dp@0.17
async-ckpt-use-cpu-shm@0.18 no-ckpt-load-validate-sharding-integrity@0.18
disable-ckpt-load-validate-sharding-integrity@0.18 verify-integrity@0.18 no-stream-ckpt-dequant@0.19-0.19
disable-stream-ckpt-dequant@0.19-0.19 ckpt-fully-parallel-load-per-rank-objects@0.20 ckpt-pg-tensors-cache-path=@0.20
ckpt-pg-tensors-cache-create@0.20 no-save-tokenizer-assets@0.20 disable-save-tokenizer-assets@0.20
""",
    ),
    (
        "no-effect",
        "it names data or says how files are read, and a step has as many tokens",
        """
data-path=* split= vocab-file= merge-file= mask-prob=:0.15 short-seq-prob=:0.1 mmap-warmup@-2.6 num-workers=:2
data-impl=:infer@-2.6 titles-data-path= use-one-sent-docs dataloader-type= sample-rate=:1.0 train-data-path=*
valid-num-workers=
valid-data-path=* test-data-path=* data-cache-path= tokenizer-model= no-data-sharding mock-data@0.5
no-mmap-bin-files@0.6 no-create-attention-mask-in-dataloader@0.6 num-dataset-builder-threads=:1@0.7
tiktoken-pattern=@0.8 tiktoken-num-special-tokens=:1000@0.8 tiktoken-special-tokens=+@0.8-0.17
renormalize-blend-weights@0.9-0.10 data-args-path=@0.10 per-split-data-args-path=@0.10
mid-level-dataset-surplus=:0.005@0.13 sft-tokenizer-prompt-format=:nemotron-h-aligned@0.13 full-validation@0.14
multiple-validation-sets@0.14 tokenizer-metadata=@0.15 legacy-tokenizer@0.15-0.16 trust-remote-code@0.15
tokenizer-special-tokens=+@0.16 tokenizer-sentencepiece-legacy@0.16 tokenizer-hf-use-fast@0.16-0.17
tokenizer-hf-include-special-tokens@0.16-0.17 per-dataset-sequences-path=@0.16 dataloader-fast-cache-load@0.16
dataloader-defer-npy-index-mmap@0.16 allow-ambiguous-pad-tokens@0.16 fim-data@0.16 fim-rate=:0.5@0.16
fim-spm-rate=:0.5@0.16 fim-split-sample=@0.16 fim-fragment-rate=@0.16 fim-no-prefix=@0.16 fim-prefix-token=@0.16
fim-middle-token=@0.16 fim-suffix-token=@0.16 fim-pad-token=@0.16 fim-eod-token=@0.16 tokenizer-hf-no-use-fast@0.17
tokenizer-hf-no-include-special-tokens@0.17 dataloader-inter-document-masking@0.19 validation-set-names=+@0.18
no-pad-vocab-size@0.18 disable-pad-vocab-size@0.18 no-tokenizer-sentencepiece-ignore-extra-whitespaces@0.18
disable-tokenizer-sentencepiece-ignore-extra-whitespaces@0.18 null-tokenizer-eod-id=@0.18
null-tokenizer-pad-id=:-1@0.18 chat-template=@0.18 use-gigatoken@0.20
""",
    ),
    (
        "no-effect",
        "it is about held-out data, and the training step is the same",
        """
eval-iters=:100 eval-interval= iterations-to-skip=+@0.12 phase-transition-iterations=@0.16 start-eval-at-iter=@0.18
eval-global-batch-size=@0.18 eval-micro-batch-size=@0.18
""",
    ),
    (
        "no-effect",
        "it says when the run ends or begins again",
        """
exit-interval= skip-train-iteration-range=+ distributed-backend=:nccl local_rank=@-0.8 adlr-autoresume
adlr-autoresume-interval=:1000
exit-duration-in-mins= lazy-mpu-init exit-signal-handler manual-gc manual-gc-interval=:0 no-manual-gc-eval
distributed-timeout-minutes=:10 train-sync-interval=@0.9 local-rank=@0.9 check-for-spiky-loss@0.10
rerun-mode=:validate_results@0.10 check-for-large-grads@0.12 disable-gloo-process-groups@0.12 inprocess-restart@0.13
inprocess-max-iterations=@0.13 inprocess-monitor-thread-interval=:1.0@0.13
inprocess-monitor-process-interval=:1.0@0.13 inprocess-progress-watchdog-interval=:1.0@0.13
inprocess-heartbeat-interval=:30@0.13 inprocess-soft-timeout=:60@0.13 inprocess-hard-timeout=:90@0.13
inprocess-heartbeat-timeout=:60@0.13 inprocess-barrier-timeout=:120@0.13 inprocess-completion-timeout=:120@0.13
inprocess-last-call-wait=:1@0.13 inprocess-termination-grace-time=:1@0.13 inprocess-granularity=:node@0.13
inprocess-active-world-size=@0.13 inprocess-empty-cuda-cache@0.13 enable-experimental@0.13
distributed-timeout-seconds-after-init=@0.15 fake-process-group@0.16 exit-signal=@0.16
exit-signal-handler-for-dataloader@0.16 disable-manual-gc-eval@0.16 exit-signal-handler-for-training@0.17
""",
    ),
    (
        "no-effect",
        "it is about generation of text, not about training",
        """
inference-batch-times-seqlen-threshold=:-1 max-tokens-to-oom=:12000 output-bert-embeddings flash-decode@0.10
inference-max-seq-length=:2560@0.10 inference-rng-tracker@0.11 inference-max-requests=:8@0.12
inference-dynamic-batching@0.12 inference-dynamic-batching-buffer-size-gb=:40.0@0.12
inference-dynamic-batching-buffer-guaranteed-fraction=:0.2@0.12-0.15
inference-dynamic-batching-buffer-overflow-factor=@0.12-0.15
inference-dynamic-batching-max-requests-override=@0.12-0.15 inference-dynamic-batching-max-tokens-override=@0.12-0.15
inference-dynamic-batching-chunk-size=:256@0.13-0.14 symmetric-ar-type=@0.13 nccl-all-reduce-for-prefill@0.13
mlp-chunks-for-prefill=:1@0.13 inference-dynamic-batching-num-cuda-graphs=:16@0.14 cache-mla-latents@0.14
inference-max-batch-size=@0.15-0.16 inference-dynamic-batching-block-size=:256@0.15
inference-dynamic-batching-track-paused-request-events@0.15 decode-only-cuda-graphs@0.15
inference-dynamic-batching-unified-memory-level=:0@0.15 disable-chunked-prefill@0.15-0.16
moe-pad-experts-for-cuda-graph-inference@0.15 use-legacy-static-engine@0.16
inference-dynamic-batching-paused-buffer-size-gb=@0.16 inference-dynamic-batching-max-requests=@0.16
inference-dynamic-batching-max-tokens=@0.16 enable-chunked-prefill@0.16
inference-dynamic-batching-cuda-graph-max-tokens=:16384@0.16-0.17
inference-dynamic-batching-cuda-graph-mixed-prefill-count=:16@0.16 inference-logging-step-interval=:0@0.16
inference-wandb-logging@0.16 inference-coordinator-port=@0.16 refit-method=:gloo@0.16
inference-dynamic-batching-mamba-memory-ratio=@0.17 inference-dynamic-batching-track-generated-token-events@0.17
num-speculative-tokens=:0@0.17 inference-dynamic-batching-prefix-caching@0.17
inference-dynamic-batching-prefix-caching-eviction-policy=:ref_zero@0.17
inference-dynamic-batching-prefix-caching-coordinator-policy=:load_balanced@0.17
inference-dynamic-batching-prefix-caching-routing-alpha=:0.5@0.17
inference-dynamic-batching-prefix-caching-mamba-gb=@0.17 inference-text-gen-server-logging@0.17
mamba-inference-conv-states-dtype=:bf16@0.17 mamba-inference-ssm-states-dtype=:bf16@0.17
inference-use-synchronous-zmq-collectives@0.17 inference-cuda-graph-all-prefills@0.18
inference-dynamic-batching-sampling-backend=:torch@0.18 inference-disable-ep-consensus@0.18
inference-cuda-graph-max-tokens=:512@0.19 inference-dynamic-batching-cuda-graph-sizing-distribution=:exponential@0.19
inference-dynamic-batching-async-sched-mode=:legacy@0.19 inference-dynamic-batching-logprobs-mode=:raw_logprobs@0.19
inference-shards=@0.19 inference-fuse-tp-communication@0.16 inference-disable-triton-nvls-kernels@0.17
inference-grouped-gemm-backend=:vllm@0.17 inference-moe-disable-fused-quant-kernels@0.17
inference-cuda-graph-scope=@0.18 inference-moe-token-dispatcher-type=:nvls@0.18
""",
    ),
    (
        "no-effect",
        "models with encoders, of images or for retrieval read it, and decoders do not",
        """
ict-head-size= ict-load= bert-load= query-in-block-prob=:0.1 report-topk-accuracies=+@-2.0 faiss-use-gpu@-2.0
block-data-path= indexer-batch-size=:128 indexer-log-interval=:1000 bert-no-binary-head decoder-seq-length=
retriever-seq-length=:256@-0.15 biencoder-projection-dim=:0 biencoder-shared-query-context-model evidence-data-path=
retriever-report-topk-accuracies=+ retriever-score-scaling embedding-path= num-classes=:1000 img-dim=:224@-2.6
num-channels=:3 patch-dim=:16 bert-embedder-type=:megatron img-h=:224 img-w=:224 classes-fraction=:1.0
data-per-class-fraction=:1.0 head-lr-mult=:1.0 vision-pretraining vision-pretraining-type=:classify
vision-backbone-type=:vit swin-backbone-type=:tiny mask-type=:random mask-factor=:1.0 iter-per-epoch=:1250
dino-local-img-size=:96 dino-local-crops-number=:10 dino-head-hidden-size=:2048 dino-bottleneck-size=:256
dino-freeze-last-layer=:1 dino-norm-last-layer dino-warmup-teacher-temp=:0.04 dino-teacher-temp=:0.07
dino-warmup-teacher-temp-epochs=:30
""",
    ),
    (
        "no-effect",
        "these are all that newer releases have",
        """
DDP-impl=:local@-2.6 use-contiguous-buffers-in-ddp@-2.5 no-contiguous-buffers-in-local-ddp@-2.6
no-clone-scatter-output-in-embedding no-async-tensor-model-parallel-allreduce@-0.16 no-persist-layer-norm
use-mcore-models data-parallel-random-init no-initialization no-delay-grad-reduce@-0.8 delay-param-gather@-0.8
disable-async-tensor-model-parallel-allreduce@0.16-0.16 disable-clone-scatter-output-in-embedding@0.16
""",
    ),
    (
        "refused",
        "reinforcement learning generates text between its steps, and a plan has no such phase",
        """
perform-rl-step@0.15 rl-prompts-per-eval=:32@0.15 grpo-prompts-per-step=:32@0.15 grpo-group-size=:2@0.15
grpo-iterations=:2@0.15 grpo-clamp-eps-lower=:0.01@0.15 grpo-clamp-eps-upper=:0.01@0.15 grpo-kl-beta=:0.001@0.15
grpo-entropy-term-weight=:0.0@0.15 grpo-filter-groups-with-same-reward@0.15 grpo-default-temperature=:1.0@0.15-0.15
grpo-default-top-p=:0@0.15-0.15 langrl-inference-server-type=:inplace_megatron@0.15-0.16
langrl-inference-server-conversation-template=@0.15-0.16 langrl-external-server@0.15-0.16 langrl-env-config=@0.15
rl-offload-optimizer-during-inference@0.15 rl-offload-kv-cache-during-training@0.15-0.16
rl-remove-kv-cache-during-training@0.15-0.16 rl-reset-cuda-graphs@0.15-0.16 rl-partial-rollouts@0.15
rl-inference-logprobs-is-correction@0.15 rl-importance-sampling-truncation-coef=@0.15
rl-calculate-intra-group-similarity@0.15-0.15 rl-use-sequence-packing@0.15
rl-sequence-packing-bin-size=:8192@0.15-0.15 rl-sequence-packing-algo=:fifo@0.15 rl-default-temperature=:1.0@0.16
rl-default-top-p=:0@0.16 rl-default-top-k=:-1@0.16 rl-sequence-packing-max-sequences-per-bin=:50@0.16
rl-training-cuda-graphs@0.16 rl-inference-tensor-model-parallel-size=@0.16
rl-inference-pipeline-model-parallel-size=@0.16 rl-inference-expert-model-parallel-size=@0.16
rl-inference-expert-tensor-model-parallel-size=@0.16 rl-inference-model-unified-memory-level=:0@0.16
rl-offload-inference-model-weights-when-idle@0.16 rl-verify-model-weights-swap@0.16
rl-parallel-generation-tasks=@0.16-0.18 rl-skip-bos-token@0.16 rl-num-parallel-generations=@0.17-0.18
rl-num-parallel-generation-batches=@0.17-0.18 rl-generation-batch-size=@0.17-0.18
rl-kv-cache-management-mode=:persist@0.17 rl-persist-cuda-graphs@0.17 rl-inference-parsers=*@0.17
rl-generation-lag=@0.19 rl-submission-granularity=:B@0.19 rl-consumption-granularity=:B@0.19
rl-max-inflight-requests=@0.20 rl-durable-rollout-bank@0.20 rl-rollout-bank-dir=@0.20
rl-rollout-bank-max-bytes=:0@0.20
""",
    ),
    (
        "refused",
        "retrieval adds an encoder and cross attention, which no plan has",
        """
retro-workdir=@-0.5 retro-add-retriever@-0.15 retro-cyclic-train-iters=@-0.15 retro-encoder-layers=:2@-0.15
retro-encoder-hidden-dropout=:0.1@-0.15 retro-encoder-attention-dropout=:0.1@-0.15 retro-num-neighbors=:2@-0.15
retro-num-retrieved-chunks=:2@-0.15 retro-return-doc-ids@-0.5 retro-no-verify-neighbor-count@-0.15
retro-attention-gate=:1@0.5-0.15 retro-project-dir=@0.6-0.15
""",
    ),
    (
        "refused",
        "layers of state-space models or of several kinds are not those of a plan",
        """
hybrid-attention-ratio=:0.0@0.8-0.16 hybrid-mlp-ratio=:0.0@0.8-0.16 hybrid-override-pattern=@0.8
heterogeneous-layers-config-path=@0.12 heterogeneous-layers-config-encoded-json=@0.12 mamba-state-dim=:128@0.12
mamba-head-dim=:64@0.12 mamba-num-groups=:8@0.12 is-hybrid-model@0.12 mamba-num-heads=@0.13
disable-mamba-mem-eff-path@0.13 linear-attention-freq=@0.16 hybrid-layer-pattern=@0.17
mamba-training-ssm-states-dtype=@0.19 experimental-attention-variant=@0.16 dsa-indexer-n-heads=@0.16
dsa-indexer-head-dim=@0.16 dsa-indexer-topk=@0.16 dsa-indexer-loss-coeff=@0.16 dsa-indexer-use-sparse-loss@0.16
linear-conv-kernel-dim=:4@0.16 linear-key-head-dim=:128@0.16 linear-value-head-dim=:128@0.16
linear-num-key-heads=:16@0.16 linear-num-value-heads=:32@0.16 mtp-use-repeated-layer@0.17
mtp-hybrid-override-pattern=@0.17 dsa-indexer-topk-freq=:1@0.19 dsa-indexer-skip-topk-offset=:0@0.19
dsa-kernel-backend=:none@0.19 dsa-indexer-rope-interleaved@0.19 no-dsa-indexer-rotate-activation@0.19
disable-dsa-indexer-rotate-activation@0.19 no-dsa-indexer-scoring-relu@0.19 disable-dsa-indexer-scoring-relu@0.19
dsa-indexer-k-norm-epsilon=@0.19 dsa-indexer-k-norm-fp32@0.19 mtp-hsm@0.20 enable-mhc-connections@0.20
mhc-num-residual-streams=:4@0.20 mhc-sinkhorn-iterations=:20@0.20 mhc-init-gating-factor=:0.01@0.20
mhc-recompute-layer-num=@0.20 gdp-num-householder=:3@0.20 gdp-cutedsl-kernel@0.20
gdp-num-chunk-states-to-recompute=:2@0.20
""",
    ),
    (
        "refused",
        "this file or module of code is not read",
        """
spec=* yaml-cfg=@0.6
""",
    ),
    (
        "refused",
        "weights that are not trained, or trained otherwise than by AdamW, are not those of a plan",
        """
skip-train freeze-all-layers@0.19 logits-save-top-k=@0.19 logits-save-top-p=@0.19 logits-save-top-p-min-k=:1@0.19
logits-save-dir=@0.19 logits-save-dtype=:fp16@0.19 logits-load-dir=@0.19 logits-load-decode-threads=:4@0.19
logits-load-prefetch-factor=:3@0.19 logits-load-msc-prefetch-depth=:2@0.19 logits-load-kd-loss-alpha=:1.0@0.19
logits-load-ignore-errors@0.19 use-mup@0.17 mup-width-mult=:1.0@0.17 mup-base-hidden-size=@0.17
mup-embedding-mult=:1.0@0.17 mup-output-mult=:1.0@0.17 mup-base-head-dim=@0.17 mup-attn-scale-power=:1.0@0.17
""",
    ),
    (
        "refused",
        "no plan has this cut over ranks",
        """
decoder-num-layers= pipeline-model-parallel-split-rank=@-0.13 standalone-embedding-stage@-0.10
moe-extended-tp@0.7-0.16 encoder-tensor-model-parallel-size=:0@0.9-0.13
encoder-pipeline-model-parallel-size=:0@0.9-0.13 use-torch-fsdp2@0.10 torch-fsdp2-no-reshard-after-forward@0.13
enable-full-sharding-in-hsdp@0.14 create-all-gather-group@0.16 outer-dp-sharding-strategy=:no_shard@0.16
gtp-remat-reduce-scatter-with-fp32-accumulation@0.20 gtp-remat-nccl-ub@0.20 gtp-expert-remat-nccl-ub@0.20
max-seqlen-per-dp-cp-rank=@0.16 hybrid-context-parallel@0.16 mtp-standalone@0.16
tensor-parallel-num-weight-shards=@0.19 expert-tensor-parallel-num-weight-shards=@0.19 gtp-remat-opt-in-modules=+@0.20
""",
    ),
    (
        "refused",
        "no plan has a layer with it",
        """
apply-residual-connection-post-layernorm moe-token-dropping@0.5-0.6 kitchen-config-file=@0.13
kitchen-recipe-number=@0.13 fp4-format=@0.15 fp4-recipe=:nvfp4@0.15 fp4-param-gather@0.15-0.17
attention-output-gate@0.16 use-kitchen-attention@0.16
kitchen-attention-backend=:sdpa@0.16 fp4-quantizer-factory=@0.16 moe-latent-size=@0.16
""",
    ),
    (
        "not-modelled",
        "the plan keeps its learning rate and weight decay",
        """
warmup= decoupled-lr=@0.6 decoupled-min-lr=@0.6 apply-wd-to-qk-layernorm@0.16 no-weight-decay-cond-type=@0.16
""",
    ),
    (
        "not-modelled",
        "a plan draws its first weights in its own way",
        """
init-method-std=:0.02 use-cpu-initialization init-method-xavier-uniform te-rng-tracker@0.11
init-model-with-meta-device@0.12 embedding-init-method-std=@0.14
""",
    ),
    (
        "not-modelled",
        "it changes the numbers that a step computes a little, and no cost is counted for it",
        """
apply-query-key-layer-scaling attention-softmax-in-fp32 fp32-allreduce@-2.0 reset-position-ids reset-attention-mask
eod-mask-loss no-query-key-layer-scaling@-2.6 fp16-lm-cross-entropy sgd-momentum=:0.9
rotary-interleaved@0.5 calculate-per-token-loss@0.7 moe-token-drop-policy=:probs@0.7
deterministic-mode@0.8 error-injection-rate=:0@0.10 error-injection-type=:transient_error@0.10
relative-attention-num-buckets=:32@0.11 relative-attention-max-distance=:128@0.11 first-last-layers-bf16@0.12
num-layers-at-start-in-bf16=:1@0.12 num-layers-at-end-in-bf16=:1@0.12 mrope-section=+@0.12
disable-bf16-reduced-precision-matmul@0.12 moe-router-dtype=@0.12 qk-l2-norm@0.13
moe-router-force-load-balancing@0.13 moe-apply-probs-on-input@0.13 sft@0.13
muon-momentum=:0.9@0.16 muon-no-split-qkv@0.16 muon-use-nesterov@0.16-0.17
muon-scale-mode=:spectral@0.16 muon-fp32-matmul-prec=:medium@0.16 muon-num-ns-steps=:5@0.16
muon-tp-mode=:duplicated@0.16 muon-extra-scale-factor=:1.0@0.16 muon-coefficient-type=:quintic@0.17
muon-scalar-optimizer=:adam@0.17 lion-beta1=:0.95@0.17 lion-beta2=:0.98@0.17 muon-nesterov@0.18
muon-use-syrk@0.20
output-logit-dtype=@0.20 qk-clip@0.16 qk-clip-alpha=:0.5@0.16 qk-clip-threshold=:100@0.16
moe-enable-routing-replay@0.16 batch-invariant-mode@0.16 moe-router-force-biased=@0.17 mtp-detach-heads@0.19
moe-router-quantile-balancing-ema=:0.0@0.19 batch-invariant-backend=:te_native@0.20
""",
    ),
    (
        "not-modelled",
        "which kernels a stack fuses is that of its profile",
        """
no-scaled-masked-softmax-fusion@-2.0 scaled-upper-triang-masked-softmax-fusion=@-2.0 no-bias-dropout-fusion
no-masked-softmax-fusion tp-comm-overlap-cfg= disable-tp-comm-split-ag disable-tp-comm-split-rs
disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad no-gradient-accumulation-fusion no-bias-swiglu-fusion@0.5
no-rope-fusion@0.5 moe-grouped-gemm@0.5 disable-tp-comm-overlap-ag@0.6 disable-tp-comm-overlap-rs@0.6
tp-comm-overlap-rs-dgrad@0.7 tp-comm-bootstrap-backend=:nccl@0.10 moe-use-legacy-grouped-gemm@0.11-0.16
moe-permute-fusion@0.11 cross-entropy-fusion-impl=:native@0.12 no-gradient-reduce-div-fusion@0.12
use-fused-weighted-squared-relu@0.14 moe-router-fusion@0.14 use-te-activation-func@0.15 te-precision-config-file=@0.16
disable-jit-fuser@0.16 optimizer-cuda-graph@0.17 mla-down-proj-fusion@0.17 no-tp-comm-bulk-wgrad@0.16
no-tp-comm-bulk-dgrad@0.16 no-tp-comm-overlap-ag@0.16 no-tp-comm-overlap-rs@0.16 no-tp-comm-split-ag@0.16
no-tp-comm-split-rs@0.16 fused-residual-rmsnorm@0.17 use-transformer-engine-op-fuser@0.18
use-grouped-gemm-for-dense-mlp@0.18 moe-single-grouped-weight@0.18 moe-single-grouped-bias@0.18
moe-permute-fusion-into-hybridep@0.18 flash-attention-version=@0.19 use-grouped-gemm-for-shared-expert@0.19
moe-use-grouped-tensor@0.20
""",
    ),
    (
        "not-modelled",
        "how formats of 8 bits are scaled and kept is that of the profile",
        """
fp8-margin=:0 fp8-interval=:1 fp8-amax-history-len=:1 fp8-amax-compute-algo=:most_recent no-fp8-wgrad
fp8-param-gather@0.9 keep-fp8-transpose-cache-when-using-custom-fsdp@0.12-0.13 reuse-grad-buf-for-mxfp8-param-ag@0.13
moe-router-padding-for-fp8@0.13 keep-fp8-transpose-cache@0.14 fp8-quantizer-factory=@0.16 disable-fp8-wgrad@0.16
moe-router-padding-for-quantization@0.16 fp8-output-proj@0.18 moe-dispatch-fwd-dtype=:bf16@0.20
moe-combine-bwd-dtype=:bf16@0.20
""",
    ),
    (
        "not-modelled",
        "formats and places of optimizer state and gradients are those of the profile",
        """
fp32-residual-connection use-precision-aware-optimizer@0.11 main-grads-dtype=:fp32@0.11 main-params-dtype=:fp32@0.11
exp-avg-dtype=:fp32@0.11 exp-avg-sq-dtype=:fp32@0.11 optimizer-cpu-offload@0.12 optimizer-offload-fraction=:1.0@0.12
use-torch-optimizer-for-cpu-offload@0.12 overlap-cpu-optimizer-d2h-h2d@0.12 no-pin-cpu-grads@0.12
no-pin-cpu-params@0.12 ddp-reduce-scatter-with-fp32-accumulation@0.16
ddp-param-name-patterns-for-fp32-local-accumulation=+@0.17 megatron-fsdp-main-params-dtype=:fp32@0.17
megatron-fsdp-main-grads-dtype=:auto@0.17 megatron-fsdp-grad-comm-dtype=:auto@0.17
""",
    ),
    (
        "not-modelled",
        "how collectives and buckets are cut and issued is that of the profile",
        """
use-ring-exchange-p2p nccl-communicator-config-path= defer-embedding-wgrad-compute@0.8 wgrad-deferral-limit=:0@0.8
ddp-average-in-collective@0.8 no-align-grad-reduce@0.9 overlap-param-gather-with-optimizer-step@0.9
no-align-param-gather@0.9 microbatch-group-size-per-virtual-pipeline-stage=@0.10
overlap-p2p-communication-warmup-flush@0.10 moe-shared-expert-overlap@0.10 pipeline-model-parallel-comm-backend=@0.12
ddp-num-buckets=@0.12 ddp-pad-buckets-for-high-nccl-busbw@0.12 suggested-communication-unit-size=@0.12
use-nccl-ub@0.13 use-sharp@0.13 fsdp-double-buffer@0.13 moe-deepep-num-sms=@0.13 delay-wgrad-compute@0.13
sharp-enabled-group=@0.14 disable-symmetric-registration@0.15 fsdp-manual-registration@0.16
no-use-layer-wise-param-layout@0.18 megatron-fsdp-enable-fine-grained-param-gather@0.18
megatron-fsdp-max-pool-double-buffer@0.19 fsdp-db-use-persist-buf-on-alloc-fail@0.19 megatron-fsdp-version=:1@0.20
ep-overlap-early-attn-memory-release@0.16 moe-hybridep-num-sms=@0.16 disable-align-grad-reduce@0.17
overlap-dispatch-backward-with-experts-wgrad@0.18 high-priority-a2a-comm-stream@0.18
moe-hybridep-num-blocks-permute=@0.18 moe-hybridep-num-blocks-unpermute=@0.18
moe-hybridep-num-sms-preprocessing=:108@0.18 moe-paged-stash@0.18 moe-paged-stash-page-size=:64@0.18
moe-paged-stash-buffer-size-factor-cuda=:1.1@0.18 moe-paged-stash-buffer-size-factor-cpu=:0.0@0.18
moe-hybridep-pad-uneven-dispatch-inputs@0.19 moe-flex-dispatcher-num-sms=@0.19 moe-ncclep-static-shape@0.19-0.19
moe-ncclep-zero-copy@0.19 delay-offload-until-cuda-graph@0.19
""",
    ),
    (
        "not-modelled",
        "what is kept for backward passes is that of the keys that are given",
        """
empty-unused-memory-level=:0 fine-grained-activation-offloading@0.16 offload-modules=+@0.16
min-offloaded-tensor-size=@0.16 cpu-offloading-retain-pinned-cpu-buffers@0.17
fine-grained-offloading-max-inflight-offloads=@0.18 delta-offload-bytes-across-pp-ranks=:0@0.19
activation-offload-fraction=:1.0@0.19
""",
    ),
    (
        "not-modelled",
        "graphs are of whole actions",
        """
cuda-graph-warmup-steps=:3@0.11 cuda-graph-scope=+@0.12 cuda-graph-modules=+@0.18
""",
    ),
    (
        "not-modelled",
        "experts are as the other arguments say",
        """
moe-pad-expert-input-to-capacity@0.7 moe-use-upcycling@0.9 moe-upcycling-granularity=:1@0.13
moe-mlp-glu-interleave-size=@0.18 moe-expert-rank-capacity-factor=@0.18 moe-shared-expert-glu-interleave-size=@0.19
""",
    ),
    (
        "not-modelled",
        "arguments of the checkpoint may win over those that are written here",
        """
use-checkpoint-args use-mp-args-from-checkpoint-args@0.10
""",
    ),
    (
        "not-modelled",
        "layers of another implementation have other kernels",
        """
use-legacy-models@0.8-0.17 mlp-chunks-for-training=:1@0.18
""",
    ),
    (
        "no-effect",
        "a fork: its data, tokenizer, files or ways to watch a run",
        """
patch-tokenizer-type= max-padding-length= dataset= epochs= keep-last= tokenizer-name-or-path=
valid-weighted-split-paths-path= train-weighted-split-paths-path= train-weighted-split-paths=*
valid-weighted-split-paths=* test-weighted-split-paths=* kill-switch-path= log-optimizer-states-to-tensorboard
codecarbon-dir= data-path2= train-data=* valid-data=* test-data=* data-folder= data-dir= train-mode= return-data-index
train-data-exact-num-epochs= no-load-lr-state reset-iteration reset-progress universal-checkpoint repeated-dataloader
load-iteration= hf-ckpt-dir= enable-exactly-numeric-match no-paired-barrier zero-bubble-pipeline-timers-start-iter=
zero-bubble-pipeline-timers-end-iter= log-path= dataloader-save= tee= output-meg-ds-ratio-file= dataset-ratios-path=
abort-on-unmet-fused-kernel-constraints trigger-path= loss-on-targets-only norm-target-loss train-idx-path=
train-doc-idx-path= train-sample-idx-path= train-shuffle-idx-path= intermediate-size= distributed-checkpointing
hf-tokenizer-path= eval-fp32 no-train bnb= merge-iter=
""",
    ),
    (
        "not-modelled",
        "a fork: the learning rate's schedule by tokens",
        """
lr-decay-tokens= lr-warmup-tokens= train-tokens=
""",
    ),
    (
        "not-modelled",
        "a fork: this file of DeepSpeed's is not read; the other arguments are",
        """
deepspeed_config= deepspeed-config= ds-config= deepspeed_mpi
""",
    ),
    (
        "not-modelled",
        "a fork: how DeepSpeed checkpoints, cuts and issues what the other arguments say",
        """
deepspeed-activation-checkpointing partition-activations contigious-checkpointing checkpoint-in-cpu
synchronize-each-layer profile-backward zero-contigious-gradients zero-reduce-scatter zero-reduce-bucket-size=
zero-allgather-bucket-size= no-pipeline-parallel memory-centric-tiled-linear tile-factor=
remote-device= use-pin-memory cpu-optimizer cpu_torch_adam scattered-embeddings split-transformers
sync-tp-duplicated-parameters create-moe-param-group moe-train-capacity-factor= moe-eval-capacity-factor=
moe-min-capacity= disable-moe-token-dropping use-tutel enable-expert-tensor-parallelism inference ds-inference
mlp-type= use-llama2-rotary-position-embeddings no-pre-communication-optimization enable-optimizer-post-validation
enable-zb-runtime zero-bubble-max-pending-backward= zero-bubble-adaptive-memory-limit-percentile=
allow-padding-num-layers interleave-group-size= enable-zbh1-exact-semantics use-flash-attn-builder
use-flash-attn-triton force-ds-sequence-parallel gas= cpu-offloading optimizer-offload-policy= auto-offload-time
recompute-lgd offload-continuous-buffers offload-chunk-num= cpu-offload offload-time=
""",
    ),
    (
        "not-modelled",
        "a fork: it changes the numbers that a step computes a little, and no cost is counted for it",
        """
use-te rotary-scale-factor= mup-attn-mult= mup-input-mult= mos kd data-efficiency-curriculum-learning
random-ltd norm-head force-positions=
""",
    ),
    (
        "refused",
        "a fork: positions that are added to attention scores are not those of a plan",
        """
use-alibi-mask position-encoding-2d
""",
    ),
    (
        "refused",
        "a fork: nothing is trained, the model is only evaluated",
        """
eval-only=
""",
    ),
    (
        "refused",
        "a fork: this layer is not one of a plan",
        """
attention-head-type= transformer-type= disable-bias-linear-fc disable-bias-attn-fc geglu enable-shared-expert
ds-sequence-parallel-fpdt bitfit use-bnb-optimizer mup load-teacher= num-layers-teacher= hidden-size-teacher=
num-attention-heads-teacher= num-experts-teacher=+ kd-beta-ce=
""",
    ),
    (
        "refused",
        "models of images, audio or several inputs are not one decoder",
        """
language-model-type= vision-model-type= freeze-LM freeze-ViT allow-missing-vision-projection-checkpoint prompt-path=
pixel-shuffle use-tiling use-thumbnail max-num-tiles= image-tag-type= disable-vision-class-token
tokenizer-prompt-format= use-tile-tags special-tokens=* num-frames= packing-seq-length= packing-buffer-size=
recompute-vision language-model-checkpoint= model-provider= dataset-provider= vision-tower= image-folder= image-size=
patch-size= freeze-clip-vision-tower freeze-llm tune-mm-mlp-adapter mm-projector-type= use-area-weighted-aspect-ratio
dynamic-resolution
""",
    ),
)
"""Status, why, flags. The first that has a flag counts."""
