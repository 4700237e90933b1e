"""The sections of a plan that say what a run reads, writes and saves."""

from __future__ import annotations

from dataclasses import KW_ONLY

from ..base.bounds import DEVICES, FACTOR, TABLE, TOKENS, Bound
from ..base.option import Bounded, noun, option


@noun()
class Train(Bounded, section="train"):
    """What `train` and `verify --dynamic` run.

    Smoothing, z losses and multi-token prediction change what is minimised
    (`backend.tensor_parallel.cross_entropy.LossChoice`), not held-out losses.
    """

    steps: int = option("optimizer steps", default=20, minimum=0, read_by="backend.trainer")
    data: str = option(
        "a text file, a folder, a token file, a URL of one, or python-stdlib",
        default="python-stdlib",
        kind="data",
        more=(
            "A token file has the name PREFIX of PREFIX.bin and PREFIX.idx, or is a plain .bin file. Several have "
            'weights: "0.3 news 0.7 books".'
        ),
        read_by="backend.data.corpus",
    )
    _: KW_ONLY
    split: str | None = option(
        "shares of documents for training, validation and tests, in their order: 949,50,1",
        default=None,
        default_note="90,10",
        more="Test documents are left out. Without, every tenth file of a folder is for validation.",
        read_by="backend.data.corpus",
    )
    validation_data: str | None = option(
        "validation text or tokens of its own, named as data",
        default=None,
        kind="data",
        default_note="part of data",
        read_by="backend.data.corpus",
    )
    data_cache: str | None = option(
        "where each host keeps what it has read of data at URLs",
        default=None,
        kind="path",
        default_note="a folder of this user's in TMPDIR",
        more="On a disk of the host. All runs of a user share it.",
        read_by="backend.data.token_files",
    )
    data_cache_bytes: int = option(
        "how large the pieces in data_cache may be together",
        default=16 * 2**30,
        minimum=1,
        more="Indices and texts, which are fetched whole, take as much again at most.",
        read_by="backend.data.token_files",
    )
    load: str | None = option(
        "a folder of Hugging Face (config.json, safetensors), Megatron-LM (torch_dist) or torchtitan",
        default=None,
        kind="path",
        default_note="drawn from seed",
        read_by="backend.ranks.training_rank",
    )
    seed: int = option("seed of weights and data order", default=1234, minimum=0, read_by="backend.ranks.batches")
    learning_rate: float = option(
        "the learning rate, after any warm-up and before any decay",
        default=3e-4,
        minimum=0,
        bound=FACTOR,
        read_by="backend.ranks.training_rank",
    )
    packed: bool = option(
        "attention and positions begin again with every document",
        default=False,
        more="Attention sees no earlier document.",
        read_by="backend.ranks.batches",
    )
    padded: bool = option(
        "a sequence is one document, filled up with ignore_token",
        default=False,
        more="It is cut where it is too long; what fills it up counts for nothing.",
        read_by="backend.ranks.batches",
    )
    ignore_token: int | None = option(
        "an id that is not learned: tokens with this target count for nothing",
        default=None,
        minimum=0,
        bound=TABLE,
        default_note="all count",
        more="Also in the mean: a batch then has as many tokens as have other targets.",
        read_by="backend.tensor_parallel.cross_entropy",
    )
    mtp_loss_weight: float = option(
        "weight of multi-token prediction's mean loss",
        default=0.1,
        minimum=0,
        bound=FACTOR,
        more="The mean is over its modules (DeepSeek-V3, equation 25).",
        read_by="backend.model.multi_token",
    )
    label_smoothing: float = option(
        "share of the target spread over the whole vocabulary",
        default=0.0,
        minimum=0,
        below=1,
        bound=FACTOR,
        more="Held-out losses are without it.",
        read_by="backend.tensor_parallel.cross_entropy",
    )
    z_loss: float = option(
        "factor of (log Z)^2 in every token's loss, Z the sum of exp(logits)",
        default=0.0,
        minimum=0,
        bound=FACTOR,
        more="Held-out losses are without it.",
        read_by="backend.tensor_parallel.cross_entropy",
    )
    router_aux_loss: float = option(
        "factor of the loss for unequally busy experts, per sequence",
        default=0.0,
        minimum=0,
        bound=FACTOR,
        read_by="backend.model.router",
    )
    router_z_loss: float = option(
        "factor of (log Z)^2 of every router's logits",
        default=0.0,
        minimum=0,
        bound=FACTOR,
        read_by="backend.model.router",
    )
    router_jitter: float = option(
        "a router's inputs are scaled by up to 1 - and 1 + this",
        default=0.0,
        minimum=0,
        below=1,
        bound=FACTOR,
        more="By how much is drawn at random.",
        read_by="backend.model.router",
    )
    expert_bias_rate: float = option(
        "what a step adds to or takes from an expert's bias",
        default=0.001,
        minimum=0,
        bound=FACTOR,
        more="It adds where an expert had less than its even share of the tokens, and takes where it had more.",
        read_by="backend.ranks.training_rank",
    )
    eval_every: int | None = option(
        "steps between two held-out losses",
        default=None,
        minimum=1,
        default_note="four of them, evenly spread",
        more="There is one before the first step and one after the last, too.",
        read_by="backend.trainer",
    )
    sample_every: int | None = option(
        "steps between two texts from the model",
        default=None,
        minimum=1,
        default_note="none",
        more="The model goes on with the first held-out tokens, after the last step too. Each token takes "
        "the forwards of a held-out batch.",
        read_by="backend.monitoring.sampling",
    )
    sample_tokens: int = option(
        "tokens of such a text, as far as batch.sequence has room for them",
        default=64,
        minimum=1,
        bound=TOKENS,
        read_by="backend.monitoring.sampling",
    )
    sample_temperature: float = option(
        "what its logits are divided by before it is drawn; 0 takes the most likely token",
        default=0.0,
        minimum=0,
        bound=FACTOR,
        more="What is drawn is a function of train.seed, the step and the place in the text.",
        read_by="backend.monitoring.sampling",
    )
    timeout_s: float = option(
        "without any rank ending an action, after which all are ended",
        default=1800.0,
        above=0,
        bound=Bound(1e8, "three years; what waits for threads counts in 64-bit nanoseconds", least=1e-3),
        more="What each was waiting for is reported.",
        read_by="backend.trainer",
    )
    setup_timeout_s: float = option(
        "from the start of ranks to the first step, after which all are ended",
        default=1800.0,
        above=0,
        bound=Bound(1e8, "three years; what waits for threads counts in 64-bit nanoseconds", least=1e-3),
        more="A checkpoint or weights that are loaded are part of it.",
        read_by="backend.trainer",
    )

    @property
    def adds_router_losses(self) -> bool:
        """True when routers add to the loss that is minimised."""
        return self.router_aux_loss > 0 or self.router_z_loss > 0


@noun()
class Checkpoint(Bounded, section="checkpoint"):
    """Where training saves all that it goes on from (`backend.checkpoint`), and how often; None is nowhere."""

    folder: str | None = option(
        "where training saves what it can go on from",
        default=None,
        kind="path",
        default_note="nowhere",
        read_by="backend.checkpoint.resume",
    )
    every: int | None = option(
        "steps between two checkpoints",
        default=None,
        minimum=1,
        default_note="one after the last step",
        more="There is one after the last step too.",
        read_by="backend.checkpoint.saver",
    )
    keep: int | None = option(
        "how many of the newest stay",
        default=None,
        minimum=1,
        default_note="all",
        read_by="backend.checkpoint.storage_choice",
    )
    copies: int | None = option(
        "folder is on each host's own disk, and so many other hosts have a copy of its files",
        default=None,
        minimum=1,
        bound=DEVICES,
        default_note="all hosts see folder",
        more="As many hosts may be lost with their disks.",
        read_by="backend.checkpoint.storage_choice",
    )
    asynchronous: bool = option(
        "whether training goes on while a checkpoint is written",
        default=True,
        more="Every rank then holds a copy of its part in host memory.",
        read_by="backend.checkpoint.saver",
    )
    timeout_s: float = option(
        "until every rank has written its part of a checkpoint, after which the run is ended",
        default=1800.0,
        above=0,
        bound=Bound(1e8, "three years; what waits for threads counts in 64-bit nanoseconds", least=1e-3),
        more="The rank that has not is named.",
        read_by="backend.checkpoint.saver",
    )
    stop_budget_s: float = option(
        "after SIGTERM or SIGUSR1, until the step is done and saved",
        default=25.0,
        above=0,
        bound=Bound(1e8, "three years; what waits for threads counts in 64-bit nanoseconds", least=1e-3),
        more="The run is ended then, saved or not: torchrun, Slurm and Kubernetes kill 30 s after SIGTERM.",
        read_by="backend.trainer",
    )
