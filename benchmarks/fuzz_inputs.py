"""Hostile inputs of every kind of file that shardproof reads, and of `--set`: sound ones, damaged at random.

An input is a command line and the files that it names. Half of the damage is done to values (another type, an absurd
number, a name with a line break, a key too many or missing) and half to bytes (flipped, cut, doubled, nested,
compressed, or no file at all but a pipe).
"""

from __future__ import annotations

import base64
import copy
import gzip
import json
import os
import tomllib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.huggingface_config import config_of
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.keys import KEYS
from shardproof.core.plan.write import toml_value
from shardproof.core.schedule import build

NODES = ("fifo", "folder", "device", "loop")
"""What may stand in a file's place: a pipe, a folder, /dev/zero, a link to itself."""

Content = bytes | str
"""Bytes of a file, or one of `NODES`."""


@dataclass(frozen=True)
class Input:
    """One call of a verb, or of a reader that no verb reaches without a training (`validate`, `load`), in a
    folder with these files."""

    kind: str
    argv: tuple[str, ...]
    files: Mapping[str, Content]

    def write(self, folder: Path) -> None:
        """Lays the files out in a folder."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content == "fifo":
                os.mkfifo(path)
            elif content == "folder":
                path.mkdir()
            else:
                path.symlink_to("/dev/zero" if content == "device" else path.name)

    def to_json(self) -> str:
        """One JSON object; `from_json` reads it. Short texts stay readable."""
        files = {name: _written(content) for name, content in self.files.items()}
        return json.dumps({"kind": self.kind, "argv": self.argv, "files": files}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Input:
        """The input that `to_json` wrote."""
        found = json.loads(text)
        return cls(
            found["kind"], tuple(found["argv"]), {name: _read(record) for name, record in found["files"].items()}
        )


def _written(content: Content) -> dict[str, str]:
    if isinstance(content, str):
        return {"node": content}
    try:
        if len(content) < 5000:
            return {"text": content.decode()}
    except UnicodeDecodeError:
        pass
    return {"zlib": base64.b64encode(zlib.compress(content, 9)).decode()}


def _read(record: Mapping[str, str]) -> Content:
    if "node" in record:
        return record["node"]
    return record["text"].encode() if "text" in record else zlib.decompress(base64.b64decode(record["zlib"]))


@dataclass(frozen=True)
class Sound:
    """Files that are right, made once: a recorded step of `RECORDED`, the collectives of `TINY`, and
    folders as bytes by name."""

    timeline: bytes
    calls: bytes
    ledger: Mapping[str, bytes]
    rows: tuple[bytes, ...]
    weights: Mapping[str, bytes]


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 10**9, 10**15, 10**16, 10**30, 10**400, -(10**30)),
    *(0.0, 0.5, -0.5, 1e308, 1e-308, float("nan"), float("inf"), -float("inf")),
    *(
        "",
        " ",
        "1",
        "nan",
        "1e999",
        "a\0b",
        "\ud800",
        "a\n::error::b",
        "\x1b[2J",
        "\u202e",
        "x" * 100_000,
        "../../etc/passwd",
        "/dev/zero",
    ),
    *([], {}, [[]], [None], [1, "a"], [{}], {"a": 1}, {"": None}, [0] * 1000),
)
"""What stands in the place of a value; the deepest and longest ones are made in the text
(`_nested`, `_long_number`)."""


def _walk(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:40]) if isinstance(tree, list) else ()
    return [found for key, value in items for found in ((*path, key), *_walk(value, (*path, key)))]


def damaged_tree(random: Random, tree: Any) -> Any:
    """A copy with one to three values replaced, left out, moved or renamed."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        paths = _walk(tree)
        if not paths:
            return random.choice(VALUES)
        *way, last = random.choice(paths)
        parent = tree
        for step in way:
            parent = parent[step]
        _damage(random, parent, last)
    return random.choice(VALUES) if random.random() < 0.02 else tree


def _damage(random: Random, parent: Any, key: Any) -> None:
    choice = random.random()
    value = parent[key]
    if random.random() < 0.4:
        parent[key] = _other(random, value)
    elif choice < 0.6:
        parent[key] = random.choice(VALUES)
    elif choice < 0.75:
        del parent[key]
    elif choice < 0.85 and isinstance(parent, dict):
        parent[random.choice(("a\nb", "", "\ud800", "x" * 5000, "__class__", f"{key}s"))] = parent.pop(key)
    elif choice < 0.9:
        parent[key] = [value]
    elif choice < 0.95:
        parent[key] = str(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        parent[key] = -value
    elif isinstance(value, list):
        parent[key] = value + value
    else:
        parent[key] = {"value": value}


def _other(random: Random, value: Any) -> Any:
    """A value of the same type, which may make sense."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return random.choice((value + 1, value - 1, value * 2, value * 3, value * 1000, value // 2, 1, 2, 64))
    if isinstance(value, str):
        return random.choice((value[:-1], value + "x", value.upper(), random.choice(CHOICES)))
    if isinstance(value, list):
        return random.choice((value[:-1], value[1:], value[::-1]))
    return value


CHOICES = tuple(sorted({str(choice) for key in KEYS for choice in key.choices or ()}))
"""Every word that some key of a plan takes."""


def damaged_bytes(random: Random, data: bytes) -> bytes:
    """A copy with bytes flipped, cut, doubled, or replaced by what parsers fear."""
    data = random.choice(_BYTE_DAMAGES)(random, data)
    return random.choice(_BYTE_DAMAGES)(random, data) if random.random() < 0.3 else data


def _flipped(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 2, 8))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _span(random: Random, data: bytes) -> tuple[int, int]:
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + random.choice((1, 3, 20, 400)))


def _cut(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _left_out(random: Random, data: bytes) -> bytes:
    start, end = _span(random, data)
    return data[:start] + data[end:]


def _doubled(random: Random, data: bytes) -> bytes:
    start, end = _span(random, data)
    return data[:end] + data[start:end] + data[end:]


def _with_word(random: Random, data: bytes) -> bytes:
    start = random.randrange(len(data) + 1)
    return data[:start] + random.choice(WORDS) + data[start:]


def _for_number(random: Random, data: bytes) -> bytes:
    """A digit becomes a word."""
    places = [place for place, byte in enumerate(data[:20_000]) if 48 <= byte <= 57]
    place = random.choice(places) if places else 0
    return data[:place] + random.choice(WORDS) + data[place + 1 :]


def _other_lines(random: Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    random.shuffle(lines)
    return b"\n".join(lines)


def _recoded(random: Random, data: bytes) -> bytes:
    other = data.decode("utf-8", "replace").encode("utf-16")
    return random.choice((b"\xef\xbb\xbf" + data, other, data.replace(b"\n", b"\r"), b"", b"\0" * 64))


WORDS = (
    *(
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{a=" * 1000,
        b"9" * 5000,
        b"1e308",
        b"1e999",
        b"-",
        b"NaN",
        b"nan",
        b"inf",
        b"Infinity",
    ),
    *(
        b"null",
        b"{}",
        b"[]",
        b'""',
        b"\0",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b'"\\ud800"',
        b"\n",
        b"\r",
        b",",
        b"=",
        b"#",
        b"9" * 20,
    ),
    *(b"10000000000", b"::error::x", b"##[error]x", b"\n::error::x\n", "\u0661".encode(), "\u00b2".encode()),
)
_BYTE_DAMAGES = (
    _flipped,
    _flipped,
    _cut,
    _left_out,
    _doubled,
    _with_word,
    _with_word,
    _for_number,
    _for_number,
    _other_lines,
    _recoded,
)


def to_toml(tree: Any) -> bytes:
    """A tree as TOML, whatever is in it: what TOML has no form for becomes text."""
    if not isinstance(tree, dict):
        return _toml(tree).encode("utf-8", "surrogatepass")
    lines = []
    for name, value in sorted(tree.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict):
            lines += [f"[{_toml_name(name)}]", *(f"{_toml_name(key)} = {_toml(each)}" for key, each in value.items())]
        else:
            lines.append(f"{_toml_name(name)} = {_toml(value)}")
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_name(name)} = {_toml(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return toml_value("none" if value is None else value)


def _toml_name(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else toml_value(name)


def to_json(tree: Any) -> bytes:
    """A tree as JSON."""
    return json.dumps(tree).encode()


def _file(random: Random, tree: Any, written: Callable[[Any], bytes]) -> Content:
    """One damaged file: rarely no regular file, else damaged as a tree or as bytes."""
    if random.random() < 0.02:
        return random.choice(NODES)
    if random.random() < 0.6:
        return written(damaged_tree(random, tree))
    return damaged_bytes(random, written(tree))


TINY: dict[str, dict[str, Any]] = {
    "model": {"preset": "tiny-gpt", "num_layers": 4},
    "cluster": {"preset": "this-host", "num_devices": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2},
    "batch": {"global": 8, "micro": 1, "sequence": 64},
    "precision": {"dtype": "fp32"},
}
WIDE: dict[str, dict[str, Any]] = {
    "model": {
        "name": "mine",
        **{name: value for name, value in asdict(model_preset("tiny-gpt")).items() if value is not None},
    },
    "cluster": {"preset": "dgx-h100", "num_devices": 16},
    "layout": {"tp": 2, "pp": 2, "vpp": 2, "zero": 1, "sequence_parallel": True},
    "schedule": {"name": "Interleaved1F1B"},
    "batch": {"global": 16, "micro": 1, "sequence": 64},
    "recompute": {"mode": "selective"},
    "precision": {"dtype": "bf16"},
    "runtime": {"profile": "megatron-te"},
    "optimizer": {"clip_grad_norm": 1.0},
    "train": {"steps": 3, "seed": 1},
    "checkpoint": {"every": 2, "folder": "ckpt"},
}
SEVERAL: dict[str, Any] = tomllib.loads(
    (Path(__file__).parents[1] / "examples" / "encoder_decoder.toml").read_text(encoding="utf-8")
)
"""A plan of [[modules]]."""

CSV = build("1F1B", pp=2, num_microbatches=4).to_csv().encode()
RECORDED = {**TINY, "cluster": {"preset": "this-host", "num_devices": 2}, "layout": {"pp": 2}}
"""The plan of `Sound.timeline`."""

FACTS: dict[str, dict[str, Any]] = {
    "memory": {"stage_bytes": [8, 8], "capacity_bytes": [32, 16]},
    "messages": {"outputs": ["bf16[1,4096,8192]", ""], "inputs": ["", "bf16[1,4096,8192]"]},
    "buffers": {"outputs": 2, "inputs": [4, 3], "recv_buffers": 2},
    "layers": {"model": 4, "stages": [["embedding", "layers.0", "layers.1"], ["layers.2", "layers.3", "head"]]},
}
GITHUB = ("--format", "github")
VERBS = (("simulate",), ("fit",), ("fit", *GITHUB), ("verify",), ("verify", *GITHUB), ("draw",), ("train", "--dry-run"))
MODELS = ("gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-8b")


def _plan(random: Random, _: Sound) -> Input:
    tree: dict[str, Any] = random.choice((TINY, WIDE, SEVERAL))
    if random.random() < 0.5:
        key = random.choice(KEYS)
        tree = copy.deepcopy(tree)
        value = random.choice(key.choices) if key.choices else random.choice((0, 1, 2, 3, 4, 0.5, True))
        tree.setdefault(key.section, {})[key.name] = value if random.random() < 0.6 else random.choice(VALUES)
    files = {"plan.toml": _file(random, tree, to_toml)}
    return Input("plan", (*random.choice((*VERBS, ("plan",))), "plan.toml"), files)


def _set(random: Random, _: Sound) -> Input:
    strange = ("a.b", "model", ".", "a\0.b", "layout.tp.x", "modules.0", "::error::x.y")
    key = random.choice(KEYS).dotted if random.random() < 0.9 else random.choice(strange)
    value = random.choice((random.choice(VALUES), random.choice(CHOICES), random.choice((0, 1, 2, 4, 8, 0.5, True))))
    text = _toml(value) if random.random() < 0.8 else str(value)
    text = random.choice(WORDS[3:]).decode("utf-8", "replace") if random.random() < 0.2 else text
    text = "[" * 50_000 if random.random() < 0.02 else text[:100_000]
    assigned = f"{key}={text}".replace("\0", "\\u0000").encode("utf-8", "replace").decode()
    verb = random.choice((*VERBS, ("plan",)))
    return Input("set", (*verb, "plan.toml", "--set", assigned), {"plan.toml": to_toml(random.choice((TINY, WIDE)))})


def _cluster(random: Random, _: Sound) -> Input:
    preset = cluster_preset(random.choice(("dgx-h100", "this-host", "dgx-a100-80g")), 8)
    tree = {"cluster": asdict(preset)}
    verb = random.choice((("simulate",), ("fit",), ("plan",), ("draw",)))
    more = ("--model", "tiny-gpt", "--devices", "8", "--global-batch", "8", "--sequence", "64")
    return Input("cluster", (*verb, *more, "--cluster", "cluster.toml"), {"cluster.toml": _file(random, tree, to_toml)})


def _config(random: Random, _: Sound) -> Input:
    tree = config_of(model_preset(random.choice(MODELS)), "bf16")
    name = random.choice(("config.json", "folder/config.json", "a\nb/config.json"))
    verb = random.choice((("simulate",), ("fit",), ("verify", *GITHUB)))
    argv = (
        *verb,
        "--model",
        name,
        "--devices",
        "8",
        "--tp",
        "4",
        "--cluster",
        "dgx-h100",
        "--global-batch",
        "8",
        "--sequence",
        "64",
    )
    if random.random() < 0.2:
        argv = ("train", "--dry-run", "plan.toml", "--set", 'train.load="."')
    return Input(
        "config", argv, {"plan.toml": to_toml(TINY), name: _file(random, tree, to_json), **_if_missing(name, tree)}
    )


def _if_missing(name: str, tree: Any) -> dict[str, Content]:
    return {} if name == "config.json" else {"config.json": to_json(tree)}


def _csv(random: Random, _: Sound) -> Input:
    data: Content = random.choice(NODES) if random.random() < 0.03 else damaged_bytes(random, CSV)
    simulated = ("simulate", "plan.toml", "--schedule", "s.csv")
    verbs = (("verify", "s.csv"), ("verify", *GITHUB, "s.csv"), ("draw", "s.csv"), simulated)
    return Input("csv", random.choice(verbs), {"s.csv": data, "plan.toml": to_toml(TINY)})


def _timeline(random: Random, sound: Sound) -> Input:
    data = _file(random, json.loads(sound.timeline), to_json)
    name = random.choice(("t.timeline.json", "t.timeline.json.gz"))
    if isinstance(data, bytes) and name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
        data = damaged_bytes(random, data) if random.random() < 0.3 else data
        data = bomb() if random.random() < 0.02 else data
    files: dict[str, Content] = {name: data, "plan.toml": to_toml(RECORDED), "good.timeline.json": sound.timeline}
    pair = ("good.timeline.json", "--compare", name)
    verbs = (
        ("draw", name),
        ("draw", name, "-o", "x.svg"),
        ("draw", *pair),
        ("simulate", "plan.toml", "--durations", name),
    )
    return Input("timeline", random.choice(verbs), files)


def bomb(gibibytes: int = 10) -> bytes:
    """A gzip file of some 10 MiB that holds zeros of `gibibytes`: members of 64 MiB, one after the other."""
    return gzip.compress(b"0" * 2**26, 9, mtime=0) * (16 * gibibytes)


def _ledger(random: Random, sound: Sound) -> Input:
    files: dict[str, Content] = {f"{side}/{name}": data for side in "ab" for name, data in sound.ledger.items()}
    name = f"a/{random.choice(sorted(sound.ledger))}"
    head, *lines = [json.loads(line) for line in sound.ledger[name[2:]].decode().splitlines()]
    if random.random() < 0.2:  # of another stack: no plan
        head = {key: value for key, value in head.items() if key != "plan"} | {"exact": True}
    choice = random.random()
    if choice < 0.35:
        head = damaged_tree(random, head)
    elif choice < 0.7:
        number = random.randrange(len(lines))
        lines[number] = damaged_tree(random, lines[number])
    data = "".join(json.dumps(line) + "\n" for line in [head, *lines]).encode()
    files[name] = data if choice < 0.7 else damaged_bytes(random, data) if choice < 0.97 else random.choice(NODES)
    if random.random() < 0.05:
        files[f"a/rank-{random.choice(('x', '', '-1', '9' * 5000, '1.5'))[:200]}.jsonl"] = data
    form = ("--format", "github") if random.random() < 0.3 else ()
    return Input("ledger", ("verify", *random.choice((("a", "--against", "b"), ("b", "--against", "a"))), *form), files)


def _facts(random: Random, sound: Sound) -> Input:
    tree = dict(FACTS)
    files: dict[str, Content] = {"s.csv": CSV, "plan.toml": to_toml(TINY)}
    if random.random() < 0.3:
        tree |= {"collectives": {"file": "calls.csv"}}
        files["calls.csv"] = random.choice(NODES) if random.random() < 0.05 else damaged_bytes(random, sound.calls)
    plan = "s.csv" if "collectives" not in tree and random.random() < 0.5 else "plan.toml"
    files["facts.toml"] = _file(random, tree, to_toml)
    return Input("facts", ("verify", plan, "--facts", "facts.toml"), files)


def _rows(random: Random, sound: Sound) -> Input:
    tree = json.loads(random.choice(sound.rows))
    return Input("rows", ("validate", "--data", "rows"), {"rows/rows.jsonl": _file(random, tree, to_json)})


def _index(random: Random, sound: Sound) -> Input:
    files: dict[str, Content] = dict(sound.weights)
    name = random.choice(
        ("model.safetensors.index.json", "model.safetensors.index.json", "config.json", "model-1.safetensors")
    )
    if name.endswith(".json"):
        files[name] = _file(random, json.loads(sound.weights[name]), to_json)
    else:
        files[name] = random.choice(NODES) if random.random() < 0.05 else damaged_bytes(random, sound.weights[name])
    return Input("index", ("load", "."), files)


def _presets(random: Random, _: Sound) -> Input:
    word = random.choice(WORDS[3:]).decode("utf-8", "replace") if random.random() < 0.5 else str(random.choice(VALUES))
    word = word.replace("\0", "")
    argv = random.choice(
        (
            ("presets", word),
            ("simulate", "--model", word),
            ("simulate", word),
            ("verify", word),
            ("draw", word),
            (word,),
        )
    )
    return Input("words", tuple(each.encode("utf-8", "replace").decode() for each in argv), {})


KINDS: dict[str, Callable[[Random, Sound], Input]] = {
    "plan": _plan,
    "set": _set,
    "cluster": _cluster,
    "config": _config,
    "csv": _csv,
    "timeline": _timeline,
    "ledger": _ledger,
    "facts": _facts,
    "rows": _rows,
    "index": _index,
    "words": _presets,
}
"""Kind of input -> what makes one."""


def make_input(seed: int, number: int, sound: Sound, only: str | None = None) -> Input:
    """Input `number` of a seed; kinds take turns. The same input for the same numbers, whatever came before."""
    kind = only or list(KINDS)[number % len(KINDS)]
    return KINDS[kind](Random(f"{seed} {kind} {number}"), sound)
