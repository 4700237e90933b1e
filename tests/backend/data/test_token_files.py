"""Token files are Megatron-Core's to the byte, mapped and not read, and what is damaged is refused with what to do."""

import shutil

import numpy as np
import pytest
import torch

from shardproof.backend.data.corpus import Corpus
from shardproof.backend.data.megatron_index import read_index, write_index
from shardproof.backend.data.stream import Stream
from shardproof.backend.data.token_files import PIECE_BYTES, SAMPLED_PIECES, open_tokens, token_file_of
from shardproof.core.base.errors import FileError, PlanError
from shardproof.core.plan.data_names import data_from

MEGATRONS = (
    "4d4d494449445800000100000000000000080300000000000000030000000000000003000000020000000100000000000000000000000600"
    "0000000000000a00000000000000000000000000000001000000000000000300000000000000"
)
"""What `IndexedDatasetBuilder` of megatron-core 0.16.1 wrote for the documents [[5, 6, 7]] and [[1, 2], [300]] in
uint16: three sequences, two documents."""
MULTIMODAL = (
    "4d4d494449445800000100000000000000040300000000000000030000000000000003000000020000000100000000000000000000000c00"
    "000000000000140000000000000000000000000000000100000000000000030000000000000000 00 01"
)
"""The same in int32, with modes 0, 0, 1."""


@pytest.fixture
def pair(tmp_path):
    """The files of the documents 5 6 7 and 1 2 300, as Megatron-Core wrote them."""
    (tmp_path / "tokens.bin").write_bytes(bytes.fromhex("050006000700010002002c01"))
    (tmp_path / "tokens.idx").write_bytes(bytes.fromhex(MEGATRONS))
    return tmp_path / "tokens.bin"


def written(folder, documents, dtype="<u2", name="long"):
    """A pair of files with one sequence a document."""
    ids = np.concatenate([np.asarray(document, dtype=dtype) for document in documents])
    (folder / f"{name}.bin").write_bytes(ids.tobytes())
    with (folder / f"{name}.idx").open("wb") as file:
        write_index(file, np.dtype(dtype), np.array([len(each) for each in documents]), np.arange(len(documents) + 1))
    return folder / f"{name}.bin"


# bytes of the files


def test_a_megatron_file_is_read_with_its_documents(pair):
    file = open_tokens(pair)
    assert (
        file.ids.tolist() == [5, 6, 7, 1, 2, 300] and isinstance(file.ids, np.memmap) and not file.ids.flags.writeable
    )
    assert file.num_documents == 2 and file.index.lengths.tolist() == [3, 2, 1]
    assert file.starts(0, 6).tolist() == [0, 3] and file.starts(2, 5).tolist() == [0, 1]


def test_an_index_is_written_as_megatron_writes_it(tmp_path):
    with (tmp_path / "own.idx").open("wb") as file:
        write_index(file, np.dtype("<u2"), np.array([3, 2, 1]), np.array([0, 1, 3]))
    assert (tmp_path / "own.idx").read_bytes() == bytes.fromhex(MEGATRONS)


def test_modes_of_a_multimodal_file_are_read(tmp_path):
    (tmp_path / "m.idx").write_bytes(bytes.fromhex(MULTIMODAL))
    index = read_index(tmp_path / "m.idx")
    assert index.modes.tolist() == [0, 0, 1] and index.pointers.tolist() == [0, 12, 20] and index.dtype == np.int32


def test_empty_documents_begin_nowhere(tmp_path):
    assert open_tokens(written(tmp_path, [[], [1, 2], [], [], [3], []])).starts(0, 3).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("name", "content", "ids"),
    [
        ("nano.bin", np.array([1, 65535, 3], "<u2").tobytes(), [1, 65535, 3]),
        ("wide.uint32.bin", np.array([1, 100_000, 3], "<u4").tobytes(), [1, 100_000, 3]),
        ("llmc.bin", np.array([20240520, 1, 2, *[0] * 253], "<i4").tobytes() + b"\x07\0\x09\0", [7, 9]),
        ("llmc3.bin", np.array([20240801, 7, 1, *[0] * 253], "<i4").tobytes() + b"\xa0\x86\x01\0", [100_000]),
    ],
)
def test_plain_files_are_of_16_bits_of_32_by_name_or_as_their_head_says(tmp_path, name, content, ids):
    (tmp_path / name).write_bytes(content)
    file = open_tokens(tmp_path / name)
    assert file.ids.tolist() == ids and file.index is None


def test_a_name_is_that_of_a_token_file_by_its_ending_or_where_the_pair_is_there(pair):
    prefix = str(pair)[:-4]
    assert token_file_of(prefix) == token_file_of(f"{prefix}.idx") == token_file_of(str(pair)) == pair
    pair.with_suffix("").write_text("a text of that very name")
    assert token_file_of(prefix) is None and token_file_of("python-stdlib") is None


def test_a_folder_of_token_files_is_no_text(pair):
    with pytest.raises(PlanError, match=rf"holds the token file tokens\.idx, .* such as '{pair.parent}/tokens'"):
        Corpus.load(str(pair.parent))
    assert data_from(pair.parent, "s3://bucket/tokens") == "s3://bucket/tokens"


# damage


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (slice(0, 4), b"MMIX", "is no index of a Megatron token file"),
        (slice(9, 10), b"\2", "version 2"),
        (slice(17, 18), b"\6", "tokens are of the type with code 6"),
        (slice(18, 19), b"\4", "is damaged: it has 94 bytes, and 4 sequences and 3 indices 106"),
        (slice(34, 35), b"\4", "sequence 1 begins at byte 6 and the one before ends at 8"),
        (slice(46, 47), b"\2", "sequence 0 begins at byte 2 and the one before ends at 0"),
        (slice(37, 38), b"\xff", "sequence 0 has -16777213 tokens"),
        (slice(78, 79), b"\7", "a document begins before the one before it"),
        (slice(86, 87), b"\2", "its documents are not of the sequences 0 to 3"),
        (slice(90, 94), b"", "is damaged: it has 90 bytes"),
        (slice(20, 94), b"", "its head alone"),
    ],
)
def test_a_damaged_index_is_refused(pair, place, value, message):
    content = bytearray(pair.with_suffix(".idx").read_bytes())
    content[place] = value
    pair.with_suffix(".idx").write_bytes(content)
    with pytest.raises(FileError, match=message) as raised:
        open_tokens(pair)
    assert str(raised.value).endswith(("again, or write it anew with `shardproof tokenize`.", "wrote.", "(uint16)."))


def test_no_changed_byte_of_an_index_makes_another_error_or_other_tokens(pair):
    content, accepted = pair.with_suffix(".idx").read_bytes(), 0
    for place in range(len(content)):
        for value in {0, 1, 127, 128, 255} - {content[place]}:
            changed = bytearray(content)
            changed[place] = value
            pair.with_suffix(".idx").write_bytes(changed)
            try:
                file = open_tokens(pair)
            except FileError:
                continue
            accepted += 1  # a document that begins at another sequence
            assert file.ids.tolist() == [5, 6, 7, 1, 2, 300] and set(file.starts(0, 6)) <= {0, 3, 5}
    assert accepted < 5


def test_tokens_that_are_cut_off_or_of_another_index_are_refused(pair):
    content = pair.read_bytes()
    for changed, what in ((content[:-1], "cut off"), (content + b"\0\0", "of another index")):
        pair.write_bytes(changed)
        with pytest.raises(FileError, match=f"by tokens.idx it has 12: it is {what}. Copy both again"):
            open_tokens(pair)
    pair.unlink()
    with pytest.raises(FileError, match="cannot be read: No such file"):
        Corpus.load(str(pair))


def test_plain_files_that_are_no_whole_tokens_are_refused(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(FileError, match="has 3 bytes, which are no whole tokens of 2 bytes"):
        open_tokens(tmp_path / "odd.bin")
    (tmp_path / "cut.bin").write_bytes(np.array([20240520, 1, 2, *[0] * 253], "<i4").tobytes() + b"\x07\0")
    with pytest.raises(FileError, match="its head says version 1 and 2 tokens, 1028 bytes with the head, and it has"):
        open_tokens(tmp_path / "cut.bin")


def test_ids_that_the_model_has_not_are_refused_when_they_are_read(tmp_path):
    name = str(written(tmp_path, [list(range(50)), [700] * 50]))
    corpus = Corpus.load(name, num_ids=700)
    assert corpus.batch(2, 4, 8, 1)[0].max() < 50, "the file is not searched"
    with pytest.raises(PlanError, match="has the id 700, and the model has ids 0 to 699: another tokenizer"):
        corpus.batch(0, 11, 8, 1)
    Corpus.load(name, num_ids=701).batch(0, 11, 8, 1)
    signed = Corpus.load(str(written(tmp_path, [[0, 1, -1] * 10], "<i4")), num_ids=5)
    with pytest.raises(PlanError, match="has the id -1"):
        signed.batch(0, 3, 8, 1)


# samples


def test_every_window_comes_once_in_a_pass_and_targets_are_one_ahead(tmp_path):
    corpus = Corpus.load(str(written(tmp_path, [range(1000)])), split="90,10")
    assert corpus.train.num_windows(16) == 56  # 899 // 16
    passes = [corpus.batch(lo, lo + 56, 16, 7) for lo in (0, 56)]
    for tokens, targets in passes:
        assert torch.equal(targets, tokens + 1) and tokens.dtype == torch.int64
        assert sorted(tokens[:, 0].tolist()) == [16 * i for i in range(56)]
    assert not torch.equal(passes[0][0], passes[1][0])
    assert not torch.equal(corpus.batch(0, 56, 16, 8)[0], passes[0][0])
    assert torch.equal(
        torch.cat([corpus.batch(i, i + 1, 16, 7)[0] for i in range(40, 70)]), corpus.batch(40, 70, 16, 7)[0]
    )


def test_documents_are_packed_with_their_boundaries_and_padded_one_by_one(tmp_path):
    documents = [[100 * i + j for j in range(3 + i)] for i in range(12)]
    corpus = Corpus.load(str(written(tmp_path, documents)), split="10,2")
    tokens, _ = corpus.batch(0, 8, 9, 5)
    for row, begins in zip(tokens.tolist(), corpus.documents(0, 8, 9, 5).tolist(), strict=True):
        firsts = [place for place in range(9) if row[place] % 100 == 0]
        assert begins == [max((first for first in firsts if first <= place), default=0) for place in range(9)]
    rows, _ = corpus.padded(0, 10, 9, 5, 0)
    assert sorted(row[1] // 100 for row in rows.tolist()) == list(range(10)), "each of the training documents once"
    held_out, ahead = corpus.padded_validation(0, 2, 9, 0)
    assert (held_out[:, 1] // 100).tolist() == [10, 11] and torch.equal(ahead, held_out + 1)


def test_a_plain_file_has_no_documents_to_pack(tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "plain.bin")
    with pytest.raises(PlanError, match="is a plain file, which does not say where documents begin"):
        Corpus.load(str(tmp_path / "plain.bin")).documents(0, 1, 8, 1)


def test_the_fingerprint_is_of_the_tokens_and_documents_and_not_of_the_place(tmp_path):
    documents = [list(range(10)), list(range(20))] * 6
    name = written(tmp_path, documents)
    fingerprint = Corpus.load(str(name)).fingerprint
    (tmp_path / "there").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(name.with_suffix(suffix), tmp_path / "there" / f"other{suffix}")
    assert Corpus.load(str(tmp_path / "there" / "other")).fingerprint == fingerprint
    others = [documents[:-1], [[1, *range(1, 10)], *documents[1:]], [list(range(20)), list(range(10)), *documents[2:]]]
    changed = {Corpus.load(str(written(tmp_path, other, name="changed"))).fingerprint for other in others}
    assert len(changed | {fingerprint}) == 4
    assert Corpus.load(str(name), split="80,20").fingerprint != fingerprint


def test_a_fingerprint_reads_some_pieces_of_a_large_file(tmp_path):
    """A sparse file of 1 GB of zeros: 4 MiB of it are read, its end among them."""
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(10**9)
    stream = Corpus.load(str(tmp_path / "large.bin"), validation_data=str(tmp_path / "large.bin")).train
    assert isinstance(stream, Stream)
    before = stream.fingerprint
    with (tmp_path / "large.bin").open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"\1\0")
    again = Corpus.load(str(tmp_path / "large.bin"), validation_data=str(tmp_path / "large.bin"))
    assert again.fingerprint != before and SAMPLED_PIECES * PIECE_BYTES == 4 * 2**20
    tokens, _ = again.batch(10**6, 10**6 + 2, 128, 3)
    assert tokens.shape == (2, 128), "the order of four million windows is not made"
