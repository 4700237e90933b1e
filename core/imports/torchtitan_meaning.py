"""What the settings of a torchtitan configuration mean together: model, degrees, batches and the rest of a plan.

What torchtitan does with them is read in its sources at v0.2.2: distributed/parallel_dims.py, models/llama3/infra/
parallelize.py, distributed/activation_checkpoint.py, train.py.
"""

from __future__ import annotations

from ..base.errors import did_you_mean
from ..plan.build import Draft
from ..plan.toml import Given
from .account import Imported, Request
from .table import Sheet
from .torchtitan_apart import SPELLINGS
from .torchtitan_degrees import put_degrees, put_experts
from .torchtitan_models import MODELS, NOT_EXPRESSED, family_of, flavor_named, split_flavor
from .torchtitan_numbers import leave_unused, put_numbers
from .torchtitan_pipeline import put_batch, put_stages
from .torchtitan_python import python_settings
from .torchtitan_table import TABLE
from .written import json_settings, toml_settings

CLUSTER = "dgx-h100"
"""The hardware that is assumed: torchtitan's published figures are of H100 (docs/performance.md)."""


def account(request: Request) -> Imported:
    """The account of a configuration. Raises `PlanError` for a text that cannot be read."""
    if request.source.endswith(".py"):
        written = python_settings(request.text, request.source, request.variables)
    elif request.text.lstrip().startswith("{"):
        written = json_settings(request.text, request.source)
    else:
        written = toml_settings(request.text, request.source)
    sheet = Sheet(TABLE, written, request.source, "torchtitan", SPELLINGS)
    sheet.put("runtime.profile", "torchtitan")
    sheet.put("cluster.preset", CLUSTER)
    sheet.assumed.append(f"hardware is not in the file: {CLUSTER} is assumed; --cluster names another.")
    num_layers, has_experts = _put_model(sheet, request)
    degrees = put_degrees(sheet, request.num_devices)
    if degrees is not None:
        put_experts(sheet, degrees, has_experts=has_experts)
        stages = put_stages(sheet, degrees.pp, num_layers)
        put_batch(sheet, degrees.dp, degrees.pp, num_stages=max(1, len(stages)))
        put_numbers(sheet, degrees, stages, has_experts=has_experts)
    sheet.put_same()
    leave_unused(sheet)
    return sheet.imported("torchtitan", _version(sheet, request.source))


def _version(sheet: Sheet, source: str) -> str:
    """The release that has the names of the file, as far as they tell."""
    spelled = {sheet.spelled(flag) for flag in TABLE if sheet.is_written(flag)}
    if source.endswith(".py") or "training.max_context_length" in spelled:
        return "2026, after v0.2.2"
    if spelled & {"compile.enable", "checkpoint.enable", "model.hf_assets_path", "job.custom_config_module"}:
        return "v0.2"
    if any(flag.startswith("parallelism.") for flag in spelled):
        return "v0.1"
    return "before v0.1.0" if any(flag.startswith(("experimental.", "training.")) for flag in spelled) else ""


def _put_model(sheet: Sheet, request: Request) -> tuple[int | None, bool]:
    """Puts the model. How many layers it has, where that is known, and whether it has experts."""
    name, flavor = str(sheet.value("model.name")), str(sheet.value("model.flavor"))
    shape, attention = split_flavor(flavor)
    family = family_of(name, shape)
    fields = {key: given.value for key, given in request.model.items()}
    if fields:
        for flag in ("model.name", "model.flavor"):
            sheet.say(flag, "no-effect", "--model stands in its place")
    elif (why := NOT_EXPRESSED.get(family, {})) and (lacks := why.get(flavor, why.get(""))):
        sheet.refuse(
            "model.name" if "" in why else "model.flavor", f"our layers lack what {name} {flavor} has: {lacks}."
        )
    elif family not in MODELS:
        sheet.refuse(
            "model.name", f"this is no model of torchtitan{did_you_mean(family, MODELS)} Give its shape by --model."
        )
    elif (known := flavor_named(family, shape)) is None:
        flavors = MODELS[family]
        sheet.refuse(
            "model.flavor",
            f"torchtitan's {family} has no such flavor{did_you_mean(shape, flavors)} Give its shape by --model.",
        )
    else:
        fields = MODELS[family][known]
        for key, value in fields.items():
            sheet.put(f"model.{key}", value, "model.flavor", "model.name")
        if "preset" not in fields:
            sheet.put("model.name", f"{family}-{known.lower()}", "model.flavor", "model.name")
    if attention == "flex" or sheet.value("model.use_flex_attn") or (family == "deepseek_v3" and shape != "debugmodel"):
        sheet.put("runtime.attention", "triton", "model.use_flex_attn" if not attention else "model.flavor")
        sheet.assumed.append("attention ends at the end of a document (block_causal); modelled is the whole sequence.")
    sheet.say("model.attn_mask_type", "not-modelled", "attention is modelled over the whole sequence, as causal")
    norm = sheet.value("model.norm_type")
    if norm == "np_layernorm":
        sheet.refuse("model.norm_type", "a norm without weights (np_layernorm) is not among our layers (model.norm).")
    elif norm == "layernorm":
        sheet.put("model.norm", "layernorm", "model.norm_type")
    if not fields:
        return None, False
    draft = Draft(
        {"model": {key: Given(value, "") for key, value in fields.items()}, "batch": {"sequence": Given(1, "")}}, ""
    )
    model = draft.model()
    return (None, False) if model is None else (model.num_layers, model.is_moe)
