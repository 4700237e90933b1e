"""Training data is a function of text, sequence, seed and sample number alone; validation text is never trained on."""

import hashlib
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from shardproof.backend.data.corpus import Corpus
from shardproof.backend.data.text import STDLIB_SOURCES, VOCABULARY_SIZE
from shardproof.core.base.errors import PlanError


@pytest.fixture
def digits(tmp_path):
    """1000 bytes, no window of which repeats: the last 100 are for validation."""
    path = tmp_path / "digits.txt"
    path.write_text("".join(f"{i:04d}" for i in range(250)))
    return Corpus.load(str(path))


def test_targets_are_one_token_ahead_and_int64(digits):
    tokens, targets = digits.batch(0, 3, 16, 1234)
    assert tokens.shape == targets.shape == (3, 16) and tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    text = bytes(digits.train.ids)
    for row, ahead in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert text.find(bytes([*row, ahead[-1]])) % 16 == 0


def test_one_pass_shows_every_window_once_and_the_next_pass_another_order(digits):
    num_windows = digits.train.num_windows(16)
    assert num_windows == 56  # 899 // 16
    passes = [digits.batch(step * 56, (step + 1) * 56, 16, 7)[0] for step in (0, 1)]
    starts = [[bytes(digits.train.ids).find(bytes(row)) for row in tokens.tolist()] for tokens in passes]
    assert sorted(starts[0]) == sorted(starts[1]) == [16 * i for i in range(56)]
    assert starts[0] != starts[1] and starts[0] != sorted(starts[0])


@pytest.mark.parametrize("cuts", [(0, 12), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), (0, 4, 8, 12), (0, 5, 6, 12)])
def test_any_cut_of_the_batch_over_ranks_and_microbatches_gives_the_same_samples(digits, cuts):
    whole = digits.batch(60, 72, 16, 1234)
    parts = [digits.batch(60 + first, 60 + last, 16, 1234) for first, last in itertools.pairwise(cuts)]
    for i in range(2):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_sample_numbers_run_on_over_steps_whatever_the_batch_size(digits):
    four_steps = torch.cat([digits.batch(step * 3, (step + 1) * 3, 16, 99)[0] for step in range(4)])
    assert torch.equal(four_steps, digits.batch(0, 12, 16, 99)[0])


def test_another_seed_gives_another_order_and_torch_and_numpy_seeds_do_not_matter(digits):
    first = digits.batch(0, 20, 16, 1)[0]
    torch.manual_seed(3)
    np.random.seed(3)
    assert torch.equal(digits.batch(0, 20, 16, 1)[0], first)
    assert not torch.equal(digits.batch(0, 20, 16, 2)[0], first)


def test_the_order_of_windows_is_that_of_the_raw_philox_words(digits):
    words = np.random.Philox(key=np.array([1234, 0], dtype=np.uint64)).random_raw(56)
    smallest = int(np.argmin(words))
    assert bytes(digits.batch(0, 1, 16, 1234)[0][0].tolist()) == bytes(
        digits.train.ids[smallest * 16 : smallest * 16 + 16]
    )


def test_validation_is_the_last_tenth_of_a_file_and_repeats_in_order(digits):
    assert (len(digits.train.ids), len(digits.validation.ids)) == (900, 100)
    tokens, targets = digits.validation_batch(0, 13, 16)
    assert digits.validation.num_windows(16) == 6
    assert torch.equal(tokens[:6], tokens[6:12]) and torch.equal(tokens[0], tokens[12])
    assert bytes(tokens[:6].flatten().tolist()) == bytes(digits.validation.ids[:96])
    assert targets[0, -1] == digits.validation.ids[16]


def test_a_folder_gives_every_tenth_file_by_name_to_validation(tmp_path):
    for i in range(20):
        (tmp_path / "sub").mkdir(exist_ok=True)
        (tmp_path / "sub" / f"{i:02d}.txt").write_text(f"document {i:02d} ")
    (tmp_path / ".hidden").write_text("secret")
    corpus = Corpus.load(str(tmp_path))
    assert bytes(corpus.validation.ids) == b"document 09 \ndocument 19 "
    assert bytes(corpus.train.ids).startswith(b"document 00 \ndocument 01 ") and b"secret" not in bytes(
        corpus.train.ids
    )
    assert b"document 09" not in bytes(corpus.train.ids)


def test_the_standard_library_is_over_3_megabytes_and_its_validation_text_is_not_in_training():
    corpus = Corpus.load("python-stdlib")
    assert len(corpus.train.ids) > 3_000_000 and len(corpus.validation.ids) > 300_000
    assert max(corpus.train.ids.max(), corpus.validation.ids.max()) < VOCABULARY_SIZE
    train = bytes(corpus.train.ids)
    validation = bytes(corpus.validation.ids)
    middles = [validation[at : at + 400] for at in range(0, len(validation) - 400, 20_000)]
    assert not any(middle in train for middle in middles)
    assert len(set(STDLIB_SOURCES)) == len(STDLIB_SOURCES)


def test_the_standard_library_is_the_same_text_in_another_interpreter():
    code = (
        "import hashlib; from shardproof.backend.data.corpus import Corpus; c = Corpus.load('python-stdlib');"
        "print(hashlib.sha256(c.train.ids.tobytes() + c.validation.ids.tobytes()).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"}
    )
    corpus = Corpus.load("python-stdlib")
    assert (
        other.stdout.strip() == hashlib.sha256(corpus.train.ids.tobytes() + corpus.validation.ids.tobytes()).hexdigest()
    )


def test_missing_empty_and_short_data_are_plan_errors_that_say_what_would_work(tmp_path, digits):
    with pytest.raises(
        PlanError, match=r"train.data='no/such' is no file and no folder .* Use a text file, or 'python-stdlib'"
    ):
        Corpus.load("no/such")
    with pytest.raises(
        PlanError, match=r"'python-stdlib', or pairs of a weight and a name such as '0.3 news 0.7 books'"
    ):
        Corpus.load("0.3 news 0.7")
    for there, lacking in (("bin", "idx"), ("idx", "bin")):
        (tmp_path / f"half-{there}.{there}").touch()
        with pytest.raises(
            PlanError, match=rf"half-{there}\.{there} is there and half-{there}\.{lacking} is not: copy it"
        ):
            Corpus.load(str(tmp_path / f"half-{there}"))
    with pytest.raises(PlanError, match="holds no text: 0 files, 0 bytes"):
        (tmp_path / "empty").mkdir()
        Corpus.load(str(tmp_path / "empty"))
    with pytest.raises(PlanError, match="holds no text: 1 files, 0 bytes"):
        (tmp_path / "empty" / "file.txt").touch()
        Corpus.load(str(tmp_path / "empty"))
    with pytest.raises(PlanError, match=r"has 900 tokens \(bytes\) for training, fewer than the 1001 .* at most 899"):
        digits.batch(0, 1, 1000, 1)
    with pytest.raises(PlanError, match=r"has 100 tokens \(bytes\) for validation, fewer than the 101 .* at most 99"):
        digits.validation_batch(0, 1, 100)


def test_text_cannot_be_changed_by_accident(digits):
    with pytest.raises(ValueError, match="read-only"):
        digits.train.ids[0] = 1


def test_documents_of_a_sample_begin_where_files_do_and_one_cut_by_the_window_at_its_first_token(tmp_path):
    """Twenty files of 9 letters and a line end: places 0, 10, 20, ... without every tenth file,
    which is for validation."""
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(chr(97 + number) * 9)
    corpus = Corpus.load(str(tmp_path))
    assert corpus.train.starts.tolist() == list(range(0, 180, 10)) and corpus.validation.starts.tolist() == [0, 10]
    tokens, _ = corpus.batch(0, 4, 16, 7)
    begins = corpus.documents(0, 4, 16, 7)
    assert begins.shape == tokens.shape and begins.dtype == torch.int64
    for row, starts in zip(tokens.tolist(), begins.tolist(), strict=True):
        ends = [place for place, byte in enumerate(row) if byte == 10]
        assert starts == [max((end + 1 for end in ends if end < place), default=0) for place in range(16)]
    assert corpus.validation_documents(0, 1, 16).tolist() == [[0] * 10 + [10] * 6]


def test_one_file_is_one_document_whose_tail_is_another(tmp_path):
    (tmp_path / "text").write_text("0123456789" * 5)
    corpus = Corpus.load(str(tmp_path / "text"))
    assert corpus.train.starts.tolist() == corpus.validation.starts.tolist() == [0]
    assert corpus.documents(0, 2, 8, 1).unique().tolist() == [0]


def test_padded_samples_are_documents_cut_or_filled_up_each_once_in_a_pass(tmp_path):
    texts = [b"ab", b"x", b"cdefg", b"hijklmnopq"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    corpus = Corpus.load(str(tmp_path))  # lines end between documents; the last tenth, two letters, is for validation
    tokens, targets = corpus.padded(0, 4, 6, 1234, 0)
    rows = {bytes(row): bytes(ahead) for row, ahead in zip(tokens.tolist(), targets.tolist(), strict=True)}
    assert rows == {
        b"ab".ljust(6, b"\0"): b"b\n".ljust(6, b"\0"),
        b"x".ljust(6, b"\0"): b"\n".ljust(6, b"\0"),
        b"cdefg".ljust(6, b"\0"): b"defg\n".ljust(6, b"\0"),
        b"hijklm": b"ijklmn",
    }
    again, _ = corpus.padded(4, 8, 6, 1234, 0)
    assert sorted(map(bytes, again.tolist())) == sorted(rows) and again.tolist() != tokens.tolist()
    held_out, ahead = corpus.padded_validation(0, 2, 6, 0)
    assert bytes(held_out[0].tolist()) == bytes(held_out[1].tolist()) and int((ahead != 0).sum()) == 2
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "z.txt").write_bytes(b"z")
    with pytest.raises(PlanError, match="no document of two tokens or more"):
        Corpus.load(str(tmp_path / "one")).padded(0, 1, 6, 1, 0)
