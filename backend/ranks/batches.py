"""`Batches`: the microbatches of one rank, read by one rank of each tensor-parallel group and handed to the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...core.plan.batch_sizes import samples_before
from ...core.plan.plan import Plan
from ..base.microbatch import Microbatch
from ..data.corpus import Corpus
from ..data.read_ahead import ReadAhead
from ..model.multi_token import later_targets
from ..tensor_parallel.cross_entropy import ignored_target
from ..tensor_parallel.data import TensorSpec, broadcast, context_part
from ..transport.base import Transport
from ..transport.mesh import Mesh


class Batches:
    """This rank's microbatches of training and held-out data. All ranks of a tensor-parallel group ask for the
    same, in the same order.

    `corpus` is the data, on the one rank of such a group that opens it, else None; `num_counted` is how many tokens of
    the global batch that was read last count in its loss.
    """

    def __init__(self, plan: Plan, mesh: Mesh, transport: Transport):
        self._plan = plan
        self._sizes = plan.batch
        self._mesh = mesh
        self._transport = transport
        self.corpus = Corpus.of(plan) if mesh.coordinates["tp"] == 0 else None
        self.num_counted = self.num_tokens
        self._ahead = ReadAhead(self._read)

    def begin_batches_of(self, plan: Plan) -> None:
        """From here on global batches are those of `plan`; which samples a step begins with is still said by the whole
        run's."""
        self._plan = plan
        self.num_counted = self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of one global batch."""
        return self._plan.batch.global_size * self._plan.batch.sequence

    def training(self, step: int, loss_scale: float) -> list[Microbatch]:
        """The microbatches of the global batch `step`, whose losses are multiplied by `loss_scale`."""

        def read(corpus: Corpus, lo: int, hi: int) -> tuple[Tensor, ...]:
            if not corpus.is_remote or (lo, hi) != self._samples:
                return self._read((step, lo, hi))
            return self._ahead.get((step, lo, hi), (step + 1, lo, hi) if step + 1 < self._plan.train.steps else None)

        return self._microbatches(self._batch(read), step, loss_scale)

    def _read(self, samples: tuple[int, int, int]) -> tuple[Tensor, ...]:
        """The samples `lo <= i < hi` of the global batch `step`, of `(step, lo, hi)`."""
        assert self.corpus is not None, "only the rank that has the data reads them"
        (step, lo, hi), plan = samples, self._plan
        before = samples_before(self._sizes, step)
        chosen = before + lo, before + hi, plan.batch.sequence, plan.train.seed
        if plan.train.padded:
            return self.corpus.padded(*chosen, ignored_target(plan.train))
        return (*self.corpus.batch(*chosen), *([self.corpus.documents(*chosen)] if plan.train.packed else []))

    def validation(self) -> list[Microbatch]:
        """The microbatches of the first held-out global batch."""

        def read(corpus: Corpus, lo: int, hi: int) -> tuple[Tensor, ...]:
            samples = lo, hi, self._plan.batch.sequence
            if self._plan.train.padded:
                return corpus.padded_validation(*samples, ignored_target(self._plan.train))
            return (
                *corpus.validation_batch(*samples),
                *([corpus.validation_documents(*samples)] if self._plan.train.packed else []),
            )

        return self._microbatches(self._batch(read))

    def prompt(self, num_tokens: int) -> list[int] | None:
        """The first held-out tokens, on a rank that reads the data."""
        return None if self.corpus is None else self.corpus.validation_batch(0, 1, num_tokens)[0][0].tolist()

    def repeated(self, tokens: Sequence[int]) -> list[Microbatch]:
        """Microbatches in which each sample has the same tokens, as one document, and targets that mean nothing."""
        (lo, hi), cp, cp_rank = self._samples, self._plan.layout.cp, self._mesh.coordinates["cp"]
        own = context_part(torch.tensor([tokens] * (hi - lo)), cp, cp_rank).to(self._transport.device)
        batch = {"tokens": own, "targets": torch.zeros_like(own)}
        if self._plan.train.packed:
            batch["documents"] = torch.zeros_like(own)
        return self._microbatches(batch)

    def _batch(self, read: Callable[[Corpus, int, int], tuple[Tensor, ...]]) -> Mapping[str, Tensor]:
        """This rank's samples, from the rank of its group that reads the samples `[lo, hi)` of the global batch."""
        (lo, hi), cp, cp_rank = self._samples, self._plan.layout.cp, self._mesh.coordinates["cp"]
        spec = TensorSpec((hi - lo, self._plan.batch.sequence // cp), torch.int64)
        specs, own = (
            dict.fromkeys(("tokens", "targets", *(["documents"] if self._plan.train.packed else [])), spec),
            None,
        )
        if num_later := self._plan.model.num_mtp_layers:
            specs["later"] = TensorSpec((*spec.shape, num_later), torch.int64)
        if self.corpus is not None:
            whole = dict(zip(("tokens", "targets", "documents"), read(self.corpus, lo, hi), strict=False))
            if num_later:
                whole["later"] = later_targets(
                    whole["targets"], num_later, ignored_target(self._plan.train), whole.get("documents")
                )
            own = {name: context_part(each, cp, cp_rank) for name, each in whole.items()}
        # every group counts for itself, from the data of all
        if (ignored := self._plan.train.ignore_token) is not None:
            specs["counted"] = TensorSpec((), torch.int64)
            if own is not None and self.corpus is not None:
                own["counted"] = (read(self.corpus, 0, self._plan.batch.global_size)[1] != ignored).sum()
        with self._transport.recorder.layer("data"):
            batch = broadcast(own, self._mesh.tp, specs=specs, device=self._transport.device)
        self.num_counted = max(1, int(batch["counted"])) if "counted" in batch else self.num_tokens
        return batch

    @property
    def _samples(self) -> tuple[int, int]:
        """The samples of the global batch that are this rank's."""
        return self._plan.samples_of(self._mesh.coordinates["dp"])

    def _microbatches(
        self, batch: Mapping[str, Tensor], step: int | None = None, loss_scale: float = 1.0
    ) -> list[Microbatch]:
        """This data-parallel rank's samples, cut into microbatches in order."""
        (lo, hi), size, counted_share = self._samples, self._plan.batch.micro_size, self.num_counted / self.num_tokens
        microbatches = [
            Microbatch(
                index,
                lo + rows.start,
                batch["tokens"][rows],
                batch["targets"][rows],
                step,
                counted_share,
                loss_scale=loss_scale,
                later=batch["later"][rows] if "later" in batch else None,
                documents=batch["documents"][rows] if "documents" in batch else None,
            )
            for index, rows in enumerate(slice(first, first + size) for first in range(0, hi - lo, size))
        ]
        return [self._with_lengths(each) for each in microbatches] if self._plan.train.padded else microbatches

    def _with_lengths(self, microbatch: Microbatch) -> Microbatch:
        """A microbatch of padded documents, which with `runtime.trim_padding` ends with the longest of them.

        It then still has whole blocks of tokens, so that the products of the blocks that are left, and the trees over
        them, are those of the whole sequence without what padding adds to them: nothing.
        """
        counted = microbatch.targets != ignored_target(self._plan.train)
        places = torch.arange(1, counted.shape[1] + 1, device=counted.device)
        lengths = tuple((counted * places).amax(1).tolist())
        if not self._plan.runtime.trim_padding:
            return replace(microbatch, lengths=lengths)
        leaves = self._plan.leaf_sizes
        block = math.lcm(leaves.gradient_token_block, leaves.reduction_token_block)
        size = min(-(-max(1, *lengths) // block) * block, self._plan.batch.sequence)
        return replace(
            microbatch,
            lengths=lengths,
            tokens=microbatch.tokens[:, :size].contiguous(),
            targets=microbatch.targets[:, :size].contiguous(),
        )


def whole_shape(hidden_size: int, microbatch: Microbatch) -> tuple[int, ...]:
    """The shape of hidden states [b, s, h] of all tokens of a microbatch."""
    return (*microbatch.tokens.shape, hidden_size)
