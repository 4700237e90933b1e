"""A model of Hugging Face's form that comes with its tokenizer, trained further on a text, as a user does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.tokenizers import bpe_tokenizer
from shardproof.backend.data.corpus import Corpus
from shardproof.core.commands.cli import main

ROOT = Path(__file__).resolve().parents[3]
SEQUENCE, SAMPLES = 32, 8
LAYOUTS = (["--devices", "1"], ["--tp", "2", "--pp", "2", "--micro-batch", "2"], ["--dp", "2", "--zero", "2"])


def gpt2(folder: Path, text: str, *, layers: int, hidden: int, heads: int, vocab_size: int) -> Path:
    """A folder of GPT-2's form with random weights and a tokenizer that was trained on `text`, as transformers
    writes it."""
    import tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    library = tokenizers.Tokenizer.from_file(
        str(bpe_tokenizer(folder, [text], vocab_size=vocab_size) / "tokenizer.json")
    )
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(tokenizer_object=library, eos_token=end, bos_token=end).save_pretrained(folder)
    torch.manual_seed(5)
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": SEQUENCE, "bos_token_id": 0}
    config = GPT2Config(vocab_size=vocab_size, eos_token_id=0, **sizes)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("sizes", "steps", "layouts"),
    [
        pytest.param({"layers": 2, "hidden": 32, "heads": 4, "vocab_size": 300}, 4, LAYOUTS[1:], id="small"),
        pytest.param(
            {"layers": 4, "hidden": 128, "heads": 4, "vocab_size": 4096},
            50,
            LAYOUTS,
            id="four layers",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"layers": 12, "hidden": 768, "heads": 12, "vocab_size": 50_257},
            50,
            LAYOUTS[1:],
            id="GPT-2",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_model_with_its_tokenizer_is_trained_on_a_text_and_loaded_by_transformers(
    sizes, steps, layouts, tmp_path, capsys
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = (ROOT / "README.md").read_text()
    model, prefix = gpt2(tmp_path / "model", text, **sizes), tmp_path / "tokens"
    assert main(["tokenize", str(ROOT / "README.md"), "--tokenizer", str(model), "-o", str(prefix)]) == 0
    values = {"load": model, "data": prefix, "steps": steps, "learning_rate": 1e-3, "split": '"90,10"'}
    command = ["train", "--model", str(model), "--dtype", "fp32", "--sequence", str(SEQUENCE), "--transport", "memory"]
    command += ["--global-batch", str(SAMPLES), "--set", "numerics.mode=exact", "--json"]
    command += [word for name, value in values.items() for word in ("--set", f"train.{name}={value}")]
    reports = []
    for number, layout in enumerate(layouts):
        capsys.readouterr()
        assert main([*command, *layout, "--save-huggingface", str(tmp_path / f"out{number}")]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    for number, report in enumerate(reports):
        assert report["losses"] == reports[0]["losses"]
        first, own = (load_file(tmp_path / f"out{each}" / "model.safetensors") for each in (0, number))
        assert all(torch.equal(first[name].view(torch.int32), own[name].view(torch.int32)) for name in first | own)
    losses = reports[0]["validation_losses"]
    assert losses[-1] < losses[0] - (1.0 if steps == 50 else 0.01)

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out0")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out0")
    corpus = Corpus.load(str(prefix), split="90,10")
    assert tokenizer(text, add_special_tokens=False)["input_ids"][:SEQUENCE] == corpus.train.ids[:SEQUENCE].tolist()
    tokens, targets = corpus.validation_batch(0, SAMPLES, SEQUENCE)
    with torch.no_grad():
        logits = trained(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert float(loss) == pytest.approx(losses[-1], rel=1e-5)


def test_another_tokenizer_than_the_models_is_refused(tmp_path, capsys):
    model = gpt2(tmp_path / "model", "some words of a text", layers=1, hidden=8, heads=4, vocab_size=260)
    other = bpe_tokenizer(tmp_path / "other", ["a text of other words, words, words"], vocab_size=270)
    (tmp_path / "t.txt").write_text("words " * 500)
    train = ["train", "--model", str(model), "--dtype", "fp32", "--global-batch", "2", "--sequence", "16"]
    train += ["--set", f"train.load={model}", "--transport", "memory", "--set", "train.steps=1"]
    for data, message in (("t.txt", "gives bytes"), ("theirs", "which is another"), ("own", "")):
        if data != "t.txt":
            tokenizer = other if data == "theirs" else model
            command = ["tokenize", str(tmp_path / "t.txt"), "--tokenizer", str(tokenizer), "-o", str(tmp_path / data)]
            assert main(command) == 0
        capsys.readouterr()
        assert main([*train, "--set", f"train.data={tmp_path / data}"]) == (2 if message else 0)
        assert message in capsys.readouterr().err
