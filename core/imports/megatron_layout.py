"""The flags of a Megatron command that lay the run over ranks and in time."""

from __future__ import annotations

import re

from ..layout.stages import num_stages_written
from .megatron_flags import UNDER
from .megatron_model import Model
from .megatron_reading import Reading

FSDP = ("--use-megatron-fsdp", "--use-custom-fsdp")
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


def read_layout(reading: Reading, model: Model, devices: int | None) -> None:
    """Fills [layout] and [schedule]."""
    sizes = {}
    for row in UNDER[""]:
        if row.key.startswith(("layout.", "batch.")) and (model.is_moe or row.key not in ("layout.ep", "layout.etp")):
            sizes[row.key.partition(".")[2]] = reading.put_row(row)
    tp, pp, cp = (sizes.get(axis) or 1 for axis in ("tp", "pp", "cp"))
    if reading.given("--sequence-parallel"):
        if tp > 1:
            reading.put("layout.sequence_parallel", True, "--sequence-parallel")
        else:
            reading.say("--sequence-parallel", "no-effect", "Megatron turns it off where tensor parallelism is 1")
    if reading.given("--use-tp-pp-dp-mapping"):
        reading.put("layout.order", "tp-cp-ep-pp-dp", "--use-tp-pp-dp-mapping")
    vpp = _stages(reading, model.num_layers, pp)
    _schedule(reading, pp, vpp)
    cp = _context(reading, cp)
    _sharding(reading, devices, tp * pp * cp)


def _context(reading: Reading, cp: int) -> int:
    """How keys and values reach the other parts of a sequence; the size of context parallelism."""
    if (ulysses := reading.integer("--ds-sequence-parallel-size")) is not None and ulysses > 1:
        reading.put("layout.cp", ulysses, "--ds-sequence-parallel-size")
        reading.put("layout.cp_inner", ulysses, "--ds-sequence-parallel-size")
        return ulysses
    sizes = reading.text("--hierarchical-context-parallel-sizes")
    kinds = dict.fromkeys((reading.text("--cp-comm-type") or "p2p").split())
    if len(kinds) != 1:
        reading.say("--cp-comm-type", "refused", "in a plan all layers exchange in one way", "runtime.context_parallel")
        return cp
    (kind,) = kinds
    if kind == "a2a":
        reading.put("layout.cp_inner", cp, "--cp-comm-type")
    elif kind == "a2a+p2p":
        numbers = re.findall(r"\d+", sizes or "")
        if len(numbers) == 2:
            reading.put("layout.cp_inner", int(numbers[0]), "--hierarchical-context-parallel-sizes", "--cp-comm-type")
        else:
            reading.say(
                "--cp-comm-type", "refused", "it needs two --hierarchical-context-parallel-sizes", "layout.cp_inner"
            )
    elif kind in ("p2p", "all_gather", "allgather"):
        chosen = "ring" if kind == "p2p" else "all_gather"
        if reading.is_written("--cp-comm-type"):
            reading.put("runtime.context_parallel", chosen, "--cp-comm-type")
    else:
        reading.say(
            "--cp-comm-type", "refused", "known are p2p, all_gather, a2a and a2a+p2p", "runtime.context_parallel"
        )
    return cp


def _stages(reading: Reading, layers: int | None, pp: int) -> int:
    """Which layers each stage has; stages per rank."""
    if (written := reading.text("--pipeline-model-parallel-layout")) is not None:
        reading.put("layout.stages", written, "--pipeline-model-parallel-layout")
        vpp = max(1, num_stages_written(written) // pp)
        if vpp > 1:
            reading.put("layout.vpp", vpp, "--pipeline-model-parallel-layout")
        return vpp
    embedding, loss = (reading.given(flag) for flag in _COUNTED)
    first, last = reading.integer(_FIRST), reading.integer(_LAST)
    counted = (0 if layers is None else layers) + embedding + loss
    vpp = _interleaving(reading, counted if embedding or loss else layers, pp, first, last)
    if pp == 1:
        return vpp
    if (embedding or loss) and layers is not None:
        _even_with(reading, counted, pp * vpp, embedding, loss)
    elif (first is not None or last is not None) and layers is not None:
        _uneven(reading, layers, pp, vpp, first, last)
    elif layers is not None and vpp == 1:
        _cut_by_deepspeed(reading, layers, pp)
    return vpp


def _cut_by_deepspeed(reading: Reading, layers: int, pp: int) -> None:
    """A cut by how many modules of some types a stage has (`PipelineModule._partition_layers` of DeepSpeed), where it
    comes out even."""
    flag = "--pp-partition-method"
    if (types := reading.text(flag)) is None:
        return
    counted = {"type:transformer": 0, "type:transformer|embedding": 1}.get(types.lower())
    if counted is None or (counted and reading.given("--untie-embeddings-and-output-weights")):
        reading.say(flag, "not-modelled", "what DeepSpeed cuts by is not how many layers a stage has")
        return
    size, rest = divmod(layers + 2 * counted, pp)
    if rest or not size:
        reading.say(flag, "not-modelled", "this cut is not even, and DeepSpeed's releases make it differently")
        return
    reading.put("layout.stages", _written([size - counted * (stage in (0, pp - 1)) for stage in range(pp)]), flag)


def _interleaving(reading: Reading, layers: int | None, pp: int, first: int | None, last: int | None) -> int:
    per_stage = reading.integer("--num-layers-per-virtual-pipeline-stage")
    for flag in ("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size"):
        if (stages := reading.integer(flag)) is not None and pp > 1:
            if stages > 1:
                reading.put("layout.vpp", stages, flag)
            else:
                reading.say(flag, "mapped", "one stage per rank", "layout.vpp")
            return max(1, stages)
    if per_stage is None or per_stage < 1 or layers is None:
        return 1
    flag = "--num-layers-per-virtual-pipeline-stage"
    if pp == 1:
        reading.say(flag, "no-effect", "there is no pipeline")
        return 1
    middle = layers - (first or 0) - (last or 0)
    ranks = pp - (first is not None) - (last is not None)
    if ranks < 1 or middle % (ranks * per_stage):
        why = f"{middle} layers on {ranks} ranks are no stages of {per_stage} layers"
        reading.say(flag, "refused", why, "layout.vpp")
        return 1
    vpp = middle // ranks // per_stage
    if vpp > 1:
        reading.put("layout.vpp", vpp, flag)
    else:
        reading.say(flag, "mapped", "one stage per rank", "layout.vpp")
    return vpp


def _even_with(reading: Reading, counted: int, stages: int, embedding: bool, loss: bool) -> None:
    """An even cut in which the embedding, the loss or both count as a layer."""
    flags = [flag for flag, given in zip(_COUNTED, (embedding, loss), strict=True) if given]
    size, rest = divmod(counted, stages)
    if rest or size < 1 + (stages == 1):
        for flag in flags:
            reading.say(flag, "refused", f"{counted} layers, counted so, are no {stages} even stages", "layout.stages")
        return
    counts = [size - (embedding and stage == 0) - (loss and stage == stages - 1) for stage in range(stages)]
    reading.put("layout.stages", _written(counts), *flags)


def _uneven(reading: Reading, layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> None:
    """A cut whose first and last pipeline ranks have layers of their own number."""
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    flags = [flag for flag in (_FIRST, _LAST) if reading.is_written(flag)]
    per_rank = [rest // middle if middle > 0 else 0] * pp
    per_rank[0] = per_rank[0] if first is None else first
    per_rank[-1] = per_rank[-1] if last is None else last
    if sum(per_rank) != layers or any(count % vpp for count in per_rank):
        for flag in flags:
            reading.say(flag, "refused", f"{rest} layers are not even on the other {middle} ranks", "layout.stages")
        return
    reading.put("layout.stages", _written([count // vpp for _ in range(vpp) for count in per_rank]), *flags)


def _written(counts: list[int]) -> str:
    """Layers of each stage as a layout string."""
    return "E" + "|".join("" if not count else "t" if count == 1 else f"t*{count}" for count in counts) + "L"


def _schedule(reading: Reading, pp: int, vpp: int) -> None:
    """The schedule that Megatron runs on these stages, or a fork on the user's word."""
    name = "1F1B" if vpp == 1 else "Interleaved1F1B"
    if reading.given("--zero-bubble-v-schedule") and pp > 1:
        setup = reading.text("--zero-bubble-v-schedule-mem-setup") or "zb"
        chosen = {"zb": "ZBVZeroBubble", "half": "VHalf", "min": "VMin"}.get(setup)
        if chosen is None:
            reading.say("--zero-bubble-v-schedule-mem-setup", "refused", "known are zb, half and min", "schedule.name")
            return
        reading.put("schedule.name", chosen, "--zero-bubble-v-schedule", "--zero-bubble-v-schedule-mem-setup")
        reading.put("layout.vpp", 2, "--zero-bubble-v-schedule")
        reading.say("--enable-zero-bubble", "mapped", "", "schedule.name")
        return
    for flag in ("--enable-zero-bubble", "--enable-zbh1-pipeline"):
        if reading.given(flag) and pp > 1 and vpp == 1:
            reading.put("schedule.name", "ZBH1", flag)
            return
    reading.put("schedule.name", name)
    if reading.given("--no-overlap-p2p-communication"):
        if vpp > 1:
            reading.put("runtime.p2p_overlap", False, "--no-overlap-p2p-communication")
        else:
            reading.say("--no-overlap-p2p-communication", "no-effect", "only interleaved schedules overlap messages")


def _sharding(reading: Reading, devices: int | None, model_size: int) -> None:
    """What data parallelism shards."""
    replicas = None if devices is None else max(1, devices // model_size)
    fsdp = next((flag for flag in FSDP if reading.given(flag)), None)
    stage = reading.integer("--zero-stage")
    if fsdp is not None:
        strategy = reading.text("--data-parallel-sharding-strategy") or "no_shard"
        if strategy not in _SHARDING:
            reading.say(
                "--data-parallel-sharding-strategy", "refused", f"known are {', '.join(_SHARDING)}", "layout.zero"
            )
        else:
            reading.put("layout.zero", _SHARDING[strategy], "--data-parallel-sharding-strategy", fsdp)
        reading.say("--use-distributed-optimizer", "mapped", "the sharding strategy says how much", "layout.zero")
    elif reading.given("--use-distributed-optimizer"):
        reading.put("layout.zero", 1, "--use-distributed-optimizer")
        instances = reading.integer("--num-distributed-optimizer-instances") or 1
        if instances > 1 and replicas is not None:
            cp = reading.values.get("layout", {}).get("cp")
            shared = replicas * (1 if cp is None else cp.value)
            reading.put("data_parallel.shard", max(1, shared // instances), "--num-distributed-optimizer-instances")
    if stage is not None and reading.is_written("--deepspeed"):
        reading.put("layout.zero", stage, "--zero-stage", "--deepspeed")
