"""The Python configurations of torchtitan since February 2026, as settings: functions that return `Trainer.Config(...)`
of literals. The text is parsed and never executed; what is no literal stays as text."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import FileError, PlanError, Problem
from ..base.findings import Location
from .torchtitan_models import MODELS, NOT_EXPRESSED
from .written import NoLiteral, Written

VARIABLE = "config"
"""What --variable calls the function of a file that has several."""

MODES = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}
"""Class of activation_checkpoint (distributed/activation_checkpoint.py) -> mode in v0.2.2."""

CONVERTERS = {
    "Float8LinearConverter": ("float8", "quantize.linear.float8"),
    "Float8GroupedMMConverter": ("quantize.grouped_mm.float8", "quantize.grouped_mm.float8"),
    "MXLinearConverter": ("quantize.linear.mx", "quantize.linear.mx"),
    "MXFP8LinearConverter": ("quantize.linear.mx", "quantize.linear.mx"),
    "MXFP8Converter": ("quantize.linear.mx", "quantize.linear.mx"),
    "MXGroupedMMConverter": ("quantize.grouped_mm.mx", "quantize.grouped_mm.mx"),
    "Float8GroupedExpertsConverter": ("quantize.grouped_mm.float8", "quantize.grouped_mm.float8"),
    "MXFP8GroupedExpertsConverter": ("quantize.grouped_mm.mx", "quantize.grouped_mm.mx"),
}
"""Class of a converter -> its name in model.converters, and the section of its settings."""

_FLATTENED = (
    *("training", "parallelism", "checkpoint", "compile", "comm", "debug", "optimizer", "lr_scheduler", "metrics"),
    *("profiling", "profiler", "activation_checkpoint"),
)
_OPERATORS: Mapping[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_LARGEST = 10**18


def python_settings(text: str, source: str, variables: Mapping[str, str]) -> list[Written]:
    """The settings of the one configuration function of a file, or of the one that `variables` name. Raises `PlanError`
    for a text without one, and with several of which none is named."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        place = Location(source, line)
        raise FileError([Problem("this is not Python.", place=place, origin=f"{source}:{line}")]) from None
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    known = [name for name, node in functions.items() if _is_configuration(node, functions)]
    wanted = variables.get(VARIABLE) or (known[0] if len(known) == 1 else None)
    if wanted not in known:
        listing = ", ".join(known) or "none"
        raise PlanError(
            f"{source}: this file has the configurations {listing}. Name one of them, such as "
            f"--variable {VARIABLE}={known[0] if known else 'llama3_8b'}."
        )
    reading = _Reading(functions, _names(module.body), text)
    settings = reading.settings(functions[wanted])
    said = {each.flag: each.value for each in settings}
    option = "activation_checkpoint.selective_ac_option"
    if said.get("activation_checkpoint.mode", "selective") == "selective" and option not in said:
        # since March 2026 selective is by operations (distributed/activation_checkpoint.py)
        settings.append(Written(option, "op", 0))
    if not any(each.flag == "model.name" for each in settings):
        family = _family(text, source, wanted)
        settings.insert(0, Written("model.name", family, functions[wanted].lineno))
    return settings


def _is_configuration(node: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> bool:
    """Whether a function without arguments returns a configuration."""
    return (
        not node.name.startswith("_")
        and not node.args.args
        and any(isinstance(inner, ast.Return) and inner.value is not None for inner in ast.walk(node))
        and (node.returns is None or "Config" in ast.unparse(node.returns))
        and "test" not in node.name.split("_")[:1]
    )


def _family(text: str, source: str, function: str) -> str:
    """The family whose registry a file takes its model from, by its import, its folder, or the function's name."""
    families = sorted({*MODELS, *NOT_EXPRESSED}, key=len, reverse=True)
    imported = re.findall(r"from torchtitan\.(?:models|experiments[\w.]*)\.(\w+) import [^\n]*model_registry", text)
    candidates = [*imported, *reversed(re.split(r"[/\\]", source)[:-1]), function]
    for each in candidates:
        for family in families:
            if each == family or (each is function and family in each):
                return family
    return function.partition("_")[0]


def _names(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """Name -> expression of the plain assignments among statements."""
    found: dict[str, ast.expr] = {}
    for each in body:
        if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
            found[each.targets[0].id] = each.value
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value is not None:
            found[each.target.id] = each.value
    return found


@dataclass
class _Reading:
    """The settings of functions of one file. `names` are expressions of the module, under those of a function."""

    functions: Mapping[str, ast.FunctionDef]
    names: dict[str, ast.expr]
    text: str
    depth: int = 0
    found: dict[str, Written] = field(default_factory=dict)

    def settings(self, function: ast.FunctionDef) -> list[Written]:
        """The settings of what a function returns, in the order of its text."""
        self._run(function)
        return list(self.found.values())

    def _run(self, function: ast.FunctionDef) -> None:
        self.depth += 1
        if self.depth > 20:
            raise PlanError(f"{function.name} is a configuration of a configuration, more than 20 deep.")
        self.names = {**self.names, **_names(function.body)}
        config = ""
        for each in function.body:
            match each:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=base))) if (
                    base in self.functions
                ):
                    self._run(self.functions[base])
                    config = name
                case ast.Assign(targets=[ast.Attribute() as target]) if ast.unparse(target).startswith(f"{config}."):
                    self._set(ast.unparse(target).removeprefix(f"{config}."), each.value)
                case ast.Return(value=ast.Name(id=name)):
                    if name != config and name in self.names:
                        self._configuration(self.names[name])
                case ast.Return(value=ast.Call(func=ast.Name(id=base))) if base in self.functions:
                    self._run(self.functions[base])
                case ast.Return(value=ast.expr() as value):
                    self._configuration(value)
                case ast.Assign() | ast.AnnAssign() | ast.Assert() | ast.ImportFrom() | ast.Import() | ast.Pass():
                    pass
                case ast.Expr(value=ast.Constant()) | ast.FunctionDef():
                    pass
                case _:
                    line = ast.unparse(each).splitlines()[0]
                    self.found[line] = Written(line, NoLiteral("a statement"), each.lineno)

    def _configuration(self, value: ast.expr) -> None:
        value = self._resolved(value)
        if not isinstance(value, ast.Call):
            self.found["return"] = Written("return", NoLiteral(ast.unparse(value)), value.lineno)
            return
        for keyword in value.keywords:
            self._set(keyword.arg or "**", keyword.value)

    def _resolved(self, node: ast.expr) -> ast.expr:
        seen = 0
        while isinstance(node, ast.Name) and node.id in self.names and seen < 20:
            node, seen = self.names[node.id], seen + 1
        return node

    def _set(self, flag: str, value: ast.expr) -> None:
        """Puts a setting, or all settings of a section in the place of what it had."""
        node = self._resolved(value)
        line = value.lineno
        if flag in ("model_spec", "model_converters"):
            self._model(node, line)
        elif flag == "activation_checkpoint":
            self._clear(flag)
            mode = MODES.get(_class(node), "selective") if isinstance(node, ast.Call) else "none"
            self._put(f"{flag}.mode", mode, line)
            self._section(flag, node)
        elif flag in _FLATTENED and isinstance(node, ast.Call):
            self._clear(flag)
            self._section(flag, node)
        else:
            self._put(flag, self._literal(node), line)

    def _section(self, flag: str, node: ast.expr) -> None:
        if not isinstance(node, ast.Call):
            return
        for keyword in node.keywords:
            inner = self._resolved(keyword.value)
            if keyword.arg == "param_groups" and (group := self._only_group(inner)) is not None:
                for name, value in group:
                    self._optimizer(name, value, keyword.value.lineno)
            else:
                self._put(f"{flag}.{keyword.arg or '**'}", self._literal(inner), keyword.value.lineno)

    def _only_group(self, node: ast.expr) -> Iterator[tuple[str, Any]] | None:
        """Name -> value of the options of the only group of parameters; None where there are several."""
        if not (isinstance(node, ast.List) and len(node.elts) == 1 and isinstance(node.elts[0], ast.Call)):
            return None
        keywords = {each.arg: each.value for each in node.elts[0].keywords}
        options = self._literal(keywords["optimizer_kwargs"]) if "optimizer_kwargs" in keywords else {}
        if not isinstance(options, dict) or "optimizer_name" not in keywords:
            return None
        return iter([("name", self._literal(keywords["optimizer_name"])), *options.items()])

    def _optimizer(self, name: str, value: Any, line: int) -> None:
        if name == "betas" and isinstance(value, list) and len(value) == 2:
            self._put("optimizer.beta1", value[0], line)
            self._put("optimizer.beta2", value[1], line)
        else:
            self._put(f"optimizer.{name}", value, line)

    def _model(self, node: ast.expr, line: int) -> None:
        """The flavor of a registry's call, its attention, and the sections of its converters."""
        if not isinstance(node, ast.Call):
            self._put("model.flavor", self._literal(node), line)
            return
        keywords = {each.arg: self._resolved(each.value) for each in node.keywords}
        flavor = self._literal(node.args[0]) if node.args else self._literal(keywords.get("flavor", ast.Constant(None)))
        if flavor is not None and _class(node) != "ModelConvertersContainer":
            attention = self._literal(keywords.get("attn_backend", ast.Constant("sdpa")))
            suffix = f"_{attention}" if attention in ("flex", "varlen") and isinstance(flavor, str) else ""
            self._put("model.flavor", flavor + suffix if suffix else flavor, line)
        if "moe_comm_backend" in keywords:
            backend = self._literal(keywords["moe_comm_backend"])
            self._put("parallelism.expert_parallel_comm_backend", backend, line)
        converters = keywords.get("converters")
        if not isinstance(converters, ast.List):
            return
        names: list[str] = []
        for each in converters.elts:
            inner = self._resolved(each)
            name, section = CONVERTERS.get(_class(inner), (_class(inner), ""))
            names.append(name)
            if name == "float8" and _class(node) != "ModelConvertersContainer":
                # since April 2026, when converters went into the model's registry, the recipe is by rows
                self._put(f"{section}.recipe_name", "rowwise", line)
            for keyword in inner.keywords if isinstance(inner, ast.Call) and section else ():
                if keyword.arg != "model_compile_enabled":
                    value = self._literal(self._resolved(keyword.value))
                    self._put(f"{section}.{keyword.arg}", value, keyword.value.lineno)
        self._put("model.converters", names, line)

    def _put(self, flag: str, value: Any, line: int) -> None:
        self.found[flag] = Written(flag, value, line)

    def _clear(self, section: str) -> None:
        for flag in [flag for flag in self.found if flag.startswith(f"{section}.")]:
            del self.found[flag]

    def _literal(self, node: ast.expr, depth: int = 0) -> Any:
        """The value of an expression of literals; what is none as its text. Tuples become lists."""
        node = self._resolved(node)
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._literal(operand, depth + 1) if depth < 50 else None
                if isinstance(inner, int | float):
                    return -inner
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS and depth < 50:
                pair = (self._literal(left, depth + 1), self._literal(right, depth + 1))
                if all(isinstance(each, int | float) and abs(each) < _LARGEST for each in pair) and (
                    pair[1] or not isinstance(op, ast.Div | ast.FloorDiv)
                ):
                    return _OPERATORS[type(op)](*pair)
            case ast.List(elts=elts) | ast.Tuple(elts=elts) if depth < 50:
                values = [self._literal(each, depth + 1) for each in elts]
                if not any(isinstance(each, NoLiteral) for each in values):
                    return values
            case ast.Dict(keys=keys, values=values) if depth < 50 and all(
                isinstance(key, ast.Constant) for key in keys
            ):
                names = [key.value for key in keys if isinstance(key, ast.Constant)]
                return {name: self._literal(value, depth + 1) for name, value in zip(names, values, strict=True)}
        return NoLiteral(ast.unparse(node)[:200])


def _class(node: ast.expr) -> str:
    """The class that `X.Config(...)` or `X(...)` makes."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ast.unparse(node)
    return called.removesuffix(".Config").rpartition(".")[2]
