"""`shardproof tokenize`: the same files whatever the number of processes, whole or not at all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from helpers.disks import full_disk
from helpers.plans import plan as plan_of
from helpers.tokenizers import bpe_tokenizer
from shardproof.backend.data import pieces, tokenizing
from shardproof.backend.data.corpus import Corpus
from shardproof.backend.data.decoding import decoder_of
from shardproof.backend.data.pieces import Piece, documents, units
from shardproof.backend.data.token_files import open_tokens
from shardproof.backend.data.tokenizer_record import tokenizer_digest
from shardproof.core.commands.cli import main

TEXTS = ["the first document", "and the second, ünïcödé too", "", "a third"]


def tokenize(capsys, *args):
    """The report of `tokenize` and the open file."""
    assert main(["tokenize", *map(str, args), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    return report, open_tokens(Path(f"{report['prefix']}.bin"))


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    return path


@pytest.fixture
def tokenizer(tmp_path):
    """A folder with a tokenizer.json that was trained on the texts."""
    return bpe_tokenizer(tmp_path / "model", TEXTS, vocab_size=300)


# what is written


def test_bytes_of_files_are_documents(tmp_path, capsys):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    (tmp_path / ".hidden").write_text("secret")
    report, file = tokenize(capsys, tmp_path, "--tokenizer", "bytes", "-o", tmp_path / "out")
    assert bytes(file.ids.tolist()) == "".join(TEXTS).encode() and file.ids.dtype == np.uint16
    assert file.index.lengths.tolist() == [len(text.encode()) for text in TEXTS if text]
    assert {**report, "elapsed_s": 0} == {
        "prefix": str(tmp_path / "out"),
        "dtype": "uint16",
        "num_documents": 3,
        "num_tokens": len(file.ids),
        "elapsed_s": 0,
    }
    assert file.record.digest == "bytes" and file.record.vocab_size == 256


def test_jsonl_lines_become_the_ids_that_the_library_gives(jsonl, tokenizer, tmp_path, capsys):
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    expected = [library.encode(text).ids for text in TEXTS if text]
    report, file = tokenize(capsys, jsonl, "--tokenizer", tokenizer, "-o", tmp_path / "out")
    assert file.ids.tolist() == [id for ids in expected for id in ids] and file.index.lengths.tolist() == list(
        map(len, expected)
    )
    assert report["num_documents"] == 3 and file.record.vocab_size == library.get_vocab_size()
    assert file.record.digest == tokenizer_digest(tokenizer / "tokenizer.json")
    assert (tmp_path / "out.tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


def test_the_mark_that_editors_put_before_jsonl_is_no_part_of_it(tmp_path, capsys):
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "ab"}\r\n\r\n{"text": "c"}\r\n')
    _, file = tokenize(capsys, tmp_path / "marked.jsonl", "--tokenizer", "bytes", "-o", tmp_path / "out")
    assert bytes(file.ids.tolist()) == b"abc" and file.index.lengths.tolist() == [2, 1]


def test_documents_end_with_a_token_that_is_asked_for(jsonl, tokenizer, tmp_path, capsys):
    end = json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"][0]["id"]
    _, file = tokenize(capsys, jsonl, "--tokenizer", tokenizer, "-o", tmp_path / "a", "--append-eod")
    ends = np.cumsum(file.index.lengths) - 1
    assert file.ids[ends].tolist() == [end] * 3 and (file.ids == end).sum() == 3 and file.record.end_of_document == end
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": {"content": "e"}}')
    _, file = tokenize(capsys, jsonl, "--tokenizer", tokenizer, "-o", tmp_path / "b", "--append-eod")
    assert file.record.end_of_document not in (None, end)
    report, file = tokenize(capsys, jsonl, "--tokenizer", "bytes", "-o", tmp_path / "c.bin", "--append-eod")
    assert report["prefix"] == str(tmp_path / "c")
    assert file.record.end_of_document == 256 == file.ids[-1] and file.record.vocab_size == 257


def test_a_large_vocabulary_is_written_in_32_bits(jsonl, tmp_path, capsys):
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "?": 1, "third": 65_499}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    report, file = tokenize(capsys, jsonl, "--tokenizer", tmp_path / "words.json", "-o", tmp_path / "out")
    assert report["dtype"] == "int32" and file.ids.dtype == np.int32 and file.ids[-1] == 65_499
    assert main(["tokenize", str(jsonl), "--tokenizer", str(tmp_path / "words.json"), "-o", "out", "--append-eod"]) == 2
    assert "to end documents with. Name a token with --eod." in capsys.readouterr().err


def test_blank_lines_end_documents_where_asked(tmp_path, capsys):
    (tmp_path / "t.txt").write_text("\n\none\nline\n \n\ntwo\n\n\n\nthree")
    _, file = tokenize(capsys, tmp_path / "t.txt", "--tokenizer", "bytes", "-o", tmp_path / "out", "--blank-lines")
    assert bytes(file.ids.tolist()) == b"one\nline\ntwo\nthree" and file.index.lengths.tolist() == [9, 4, 5]


@pytest.mark.parametrize(("suffix", "blank_lines"), [("jsonl", False), ("txt", True), ("txt", False)])
def test_no_cut_into_pieces_changes_a_document(suffix, blank_lines, tmp_path, monkeypatch):
    lines = [json.dumps({"text": "x" * (7 * i % 40)}) + "\n" + "\n" * (i % 3 == 0) for i in range(60)]
    path = tmp_path / f"t.{suffix}"
    path.write_text("".join(lines))
    (whole,) = units([path], blank_lines=blank_lines)
    expected = [text for piece in whole for text in documents(piece, "text")]
    for size in (1, 2, 3, 50, 700):
        monkeypatch.setattr(pieces, "PIECE_BYTES", size)
        cut = [piece for unit in units([path], blank_lines=blank_lines) for piece in unit]
        assert [text for piece in cut for text in documents(piece, "text")] == expected
        assert [piece.lo for piece in cut[1:]] == [piece.hi for piece in cut[:-1]]
        assert (len(cut) > 10) == (size < 60 and (suffix, blank_lines) != ("txt", False))


def test_any_number_of_processes_writes_the_same_files(tmp_path, capsys, tokenizer, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2000)
    for i in range(5):
        text = "".join(f"{TEXTS[j % 4]} {i * j}\n" for j in range(200))
        (tmp_path / f"{i}.txt").write_text(text)
    files = sorted(tmp_path.glob("*.txt"))
    found = []
    for jobs in (1, 3):
        tokenize(capsys, *files, "--tokenizer", tokenizer, "-o", tmp_path / f"out{jobs}", "--jobs", jobs)
        found.append([(tmp_path / f"out{jobs}{end}").read_bytes() for end in (".bin", ".idx", ".tokens.json")])
    assert found[0] == found[1] and len(found[0][0]) > 10_000


def test_ids_become_text_by_the_tokenizer_of_the_data_or_of_the_model(jsonl, tokenizer, tmp_path, capsys):
    _, file = tokenize(capsys, jsonl, "--tokenizer", tokenizer, "-o", tmp_path / "out")
    expected = "".join(TEXTS)
    of_data = decoder_of(plan_of(data=str(tmp_path / "out"), vocab_size=300))
    of_model = decoder_of(plan_of(data="python-stdlib", load=str(tokenizer)))
    assert of_data(file.ids.tolist()) == of_model(file.ids.tolist()) == expected
    for end in (".tokenizer.json", ".tokens.json"):
        (tmp_path / f"out{end}").unlink()
    assert decoder_of(plan_of(data=str(tmp_path / "out")))(file.ids[:2].tolist()) == f"{file.ids[0]} {file.ids[1]}"
    assert decoder_of(plan_of(data=f"1 python-stdlib 1 {jsonl}")) is None


# what is refused, and what is left behind


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        (b'{"text": "a"}\n{"body": "b"}\n', [], "byte 14 has no text under 'text': it has the keys 'body'"),
        (b'{"text": "a"}\n{"text": 5}\n', [], "byte 14 has no text under 'text': it has 5 there"),
        (b'{"text": "a"}\n[1]\n', [], "byte 14 has no text under 'text': it is no object"),
        (b'{"text": "a"}\n{"text": \n', [], "byte 14: this is not JSON"),
        (b'{"text": "\xff"}\n', [], "byte 0 is no text in UTF-8"),
        (b"\n\n", [], "there is no text in 1 files"),
        (b'{"text": "a"}\n', ["--eod", "</s>"], "names what --append-eod puts after documents"),
        (b'{"text": "a"}\n', ["--eod", "</s>", "--append-eod"], "bytes have id 256 for it"),
        (b'{"text": "a"}\n', ["-o", "{file}"], "is the name of another file or folder"),
        (b'{"text": "a"}\n', ["--jobs", "0"], "at least one process is needed"),
        (b'{"text": "a"}\n', ["--tokenizer", "no/such.json"], "there is no no/such.json"),
        (b'{"text": "a"}\n', ["--tokenizer", "{file}"], "this is not JSON"),
    ],
)
def test_what_cannot_be_tokenized_ends_with_2_and_leaves_what_was_there(content, args, message, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "before"}\n')
    command = ["tokenize", str(path), "--tokenizer", "bytes", "-o", str(tmp_path / "out")]
    assert main(command) == 0
    before = {each.name: each.read_bytes() for each in tmp_path.glob("out*")}
    path.write_bytes(content + content)
    capsys.readouterr()
    assert main([*command, *(arg.format(file=path) for arg in args)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    path.unlink()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before and len(before) == 3


@pytest.mark.parametrize("size", [5_000, 2_000_000])
def test_a_full_disk_leaves_what_was_there(size, tmp_path, capsys):
    """A text that stays in the buffer until the end, and one that does not."""
    (tmp_path / "tokens.bin").write_text("before")
    (tmp_path / "text.txt").write_text("a" * size)
    args = ["tokenize", str(tmp_path / "text.txt"), "--tokenizer", "bytes", "-o", str(tmp_path / "tokens")]
    with full_disk(4096):
        code = main(args)
    assert code == 2
    assert f"-o {tmp_path}/tokens cannot be written: File too large. Make room" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["text.txt", "tokens.bin"]
    assert (tmp_path / "tokens.bin").read_text() == "before"


def test_a_text_that_is_not_utf_8_is_no_text_for_a_tokenizer_but_for_bytes(tmp_path, tokenizer, capsys):
    (tmp_path / "t.txt").write_bytes(b"caf\xe9")
    assert main(["tokenize", str(tmp_path / "t.txt"), "--tokenizer", str(tokenizer), "-o", str(tmp_path / "out")]) == 2
    assert "t.txt is no text in UTF-8" in capsys.readouterr().err
    _, file = tokenize(capsys, tmp_path / "t.txt", "--tokenizer", "bytes", "-o", tmp_path / "out")
    assert file.ids.tolist() == list(b"caf\xe9")


def test_a_worker_that_fails_or_dies_ends_all(tmp_path, tokenizer):
    (tmp_path / "t.txt").write_bytes(b"good")
    (tmp_path / "u.txt").write_bytes(b"\xff\xff")
    unit = [(Piece(tmp_path / name, 0, size, "file"),) for name, size in (("t.txt", 4), ("u.txt", 2))]
    settings = tokenizing.Settings(str(tokenizer), "text", False, None)
    found = tokenizing.tokenized(unit, settings, 2)
    assert next(found).num_bytes == 4
    with pytest.raises(ValueError, match=r"u\.txt is no text in UTF-8"):
        next(found)
    worker = tokenizing._Worker(settings)
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(Exception, match="ended with code -9, perhaps for want of memory"):
        worker.receive()
    worker.close()


def test_an_interrupted_run_leaves_no_file_and_no_process(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"0123456789\n\n" * 4_000_000)
    folder = tmp_path / "out"
    folder.mkdir()
    command = [sys.executable, "-m", "shardproof", "tokenize", str(tmp_path / "t.txt"), "--blank-lines"]
    with subprocess.Popen(
        [*command, "--tokenizer", "bytes", "-o", str(folder / "out"), "--jobs", "2"], start_new_session=True
    ) as run:
        while not list(folder.iterdir()):
            time.sleep(0.01)
            assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
        assert list(folder.iterdir()) == []
        with pytest.raises(ProcessLookupError):  # Python's own helper of processes ends a moment later
            for _ in range(1000):
                os.killpg(run.pid, 0)
                time.sleep(0.01)


# training on them


def test_tokens_of_bytes_are_the_text_itself(tmp_path, capsys):
    text = "".join(f"{i:04d}" for i in range(400))
    (tmp_path / "t.txt").write_text(text)
    tokenize(capsys, tmp_path / "t.txt", "--tokenizer", "bytes", "-o", tmp_path / "out")
    corpora = [Corpus.load(str(tmp_path / name)) for name in ("t.txt", "out")]
    assert [corpus.validation_batch(0, 5, 16)[0].tolist() for corpus in corpora].count(
        corpora[0].validation_batch(0, 5, 16)[0].tolist()
    ) == 2
    windows = [sorted(corpus.batch(0, 89, 16, 1)[0].tolist()) for corpus in corpora]
    assert windows[0] == windows[1]
