"""Data: any position is computed, every sequence counts once, and bad data is refused in words."""

import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtengine.corpus import Sequences, load_corpus
from dtengine.data import (
    IGNORE,
    Batch,
    BatchShape,
    Loader,
    bigram_loss,
    heldout_batches,
    pin,
    rows_of,
    sequence_order,
    spread,
    token_checksum,
    train_batches,
)

SHAPES = st.builds(BatchShape, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


def counting(count: int, seq: int = 15) -> Sequences:
    """Make `count` sequences whose first token is their own number."""
    tokens = np.arange(count * seq + 1) // seq
    return Sequences(tokens.astype(np.uint16), seq)


def write_bin(path: Path, tokens: np.ndarray | list[int], dtype: str = "<u2") -> str:
    np.asarray(tokens, dtype).tofile(path)
    return str(path)


def stream(sequences: Sequences) -> np.ndarray:
    return sequences.span(0, sequences.num_tokens)


# Order


@given(seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6), size=st.integers(1, 300))
def test_each_epoch_is_a_permutation(seed, epoch, size):
    order = sequence_order(seed, epoch * size, size, size)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(size))


@given(st.integers(0, 2**64), st.integers(0, 500), st.integers(0, 100), st.sampled_from([1, 2, 3, 4, 5, 50, 67, 256]))
def test_any_slice_equals_the_slice_of_the_whole_stream(seed, start, count, size):
    whole = sequence_order(seed, 0, 600, size)
    np.testing.assert_array_equal(sequence_order(seed, start, count, size), whole[start : start + count])


def test_a_billion_sequences_cost_no_memory_of_their_number():
    order = sequence_order(5, 3 * 10**9 - 2000, 4000, 10**9)
    assert order.min() >= 0 and order.max() < 10**9
    assert len(set(order[:2000])) == len(set(order[2000:])) == 2000


def test_epochs_and_seeds_differ_and_places_are_uniform():
    """All 6 orders of 3 sequences appear about equally often, and sequence 0 stands anywhere in 10."""
    orders = sequence_order(1, 0, 3 * 6000, 3).reshape(-1, 3)
    _, times = np.unique(orders, axis=0, return_counts=True)
    assert len(times) == 6
    assert times.min() > 800 and times.max() < 1200
    places = np.argmin(sequence_order(1, 0, 10 * 5000, 10).reshape(-1, 10), axis=1)
    assert np.bincount(places).min() > 400
    neighbours = np.diff(sequence_order(1, 0, 5000, 5000))
    assert np.mean(np.abs(neighbours)) == pytest.approx(5000 / 3, rel=0.05)
    assert (sequence_order(1, 0, 50, 50) != sequence_order(2, 0, 50, 50)).any()
    assert (sequence_order(1, 0, 50, 50) != sequence_order(1, 50, 50, 50)).any()


def test_the_order_is_frozen():
    """A checkpoint resumes on a later version only while these numbers stay."""
    assert sequence_order(0, 0, 8, 8).tolist() == [2, 5, 6, 1, 0, 7, 4, 3]
    assert sequence_order(7, 10**12, 3, 10**9).tolist() == [132349011, 72136075, 212483864]


def test_sequence_order_refuses_negative_positions_and_no_sequences():
    for arguments in ((-1, 1, 1), (0, -1, 1), (0, 1, 0)):
        with pytest.raises(
            ValueError, match="sequence_order: start .* must be at least 0 and num_sequences at least 1"
        ):
            sequence_order(0, *arguments)


# Rows and batches


@given(SHAPES)
def test_rows_cover_each_row_once(shape):
    rows = np.stack([rows_of(shape, coordinate) for coordinate in range(shape.coordinates)])
    assert rows.dtype == np.int64
    assert rows.shape == shape
    assert sorted(rows.reshape(-1)) == list(range(np.prod(shape)))
    assert rows[-1, 0, 0] == (shape.coordinates - 1) * shape.microbatch


@given(SHAPES, st.data())
def test_a_step_reads_its_global_batch_once_and_pads_the_rest(shape, data):
    room = int(np.prod(shape))
    global_batch = data.draw(st.integers(1, room))
    consumed = data.draw(st.integers(0, 100))
    sequences = counting(23)
    seen = {}
    for coordinate in range(shape.coordinates):
        batches = train_batches(sequences, 3, consumed, global_batch, shape, coordinate)
        assert len(batches) == shape.microbatches
        for batch in batches:
            assert [tensor.dtype for tensor in batch] == [torch.int64, torch.int64, torch.float32, torch.int64]
            assert batch.tokens.shape == batch.targets.shape == batch.weights.shape == (shape.microbatch, 15)
            for tokens, targets, weights, row in zip(*batch, strict=True):
                if row < global_batch:
                    seen[int(row)] = int(tokens[0])
                    assert (weights == 1).all() and (targets[:-1] == tokens[1:]).all() and targets[-1] == tokens[0] + 1
                else:
                    assert not weights.any() and not tokens.any() and (targets == IGNORE).all()
    assert [seen[row] for row in range(global_batch)] == sequence_order(3, consumed, global_batch, 23).tolist()


def read_ids(start: int, stop: int, global_batch: int = 8) -> list[int]:
    """List the sequence ids that dp2 reads in steps start..stop-1, by row."""
    shape, ids = BatchShape(2, 2, 2), []
    for step in range(start, stop):
        rows = {}
        for coordinate in range(2):
            for batch in train_batches(counting(50), 11, step * global_batch, global_batch, shape, coordinate):
                rows |= dict(zip(batch.rows.tolist(), batch.tokens[:, 0].tolist(), strict=True))
        ids += [rows[row] for row in range(global_batch)]
    return ids


def test_stops_and_resumes_read_the_ids_of_the_unbroken_run():
    """C16: 50 sequences, 3 epochs, dp2; stops at step 7, at 9, and inside epoch 2."""
    unbroken = read_ids(0, 19)
    assert read_ids(0, 7) + read_ids(7, 9) + read_ids(9, 14) + read_ids(14, 19) == unbroken
    for epoch in range(3):
        assert sorted(unbroken[50 * epoch : 50 * epoch + 50]) == list(range(50))


@pytest.mark.parametrize("coordinates", [1, 2, 4])
def test_21_held_out_sequences_count_21_on_any_mesh(coordinates):
    """C14: local batch 4; each sequence once, and the same weighted sum."""
    sequences = counting(21)
    seen, lengths, total = [], set(), 0.0
    for coordinate in range(coordinates):
        batches = list(heldout_batches(sequences, 21, BatchShape(coordinates, 3, 4), coordinate))
        lengths.add(len(batches))
        for batch in batches:
            counted = batch.weights[:, 0] > 0
            seen += batch.tokens[counted, 0].tolist()
            assert batch.rows[counted].tolist() == batch.tokens[counted, 0].tolist()
            total += float((batch.targets * batch.weights).sum())
    assert sorted(seen) == list(range(21))
    assert len(lengths) == 1
    assert total == (np.arange(1, 21 * 15 + 1) // 15).sum()


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6))
def test_held_out_sequences_count_once_in_order(limit, coordinates, microbatch):
    sequences, shape = counting(40, seq=1), BatchShape(coordinates, 1, microbatch)
    by_coordinate = [list(heldout_batches(sequences, limit, shape, c)) for c in range(coordinates)]
    in_order = [batch for step in zip(*by_coordinate, strict=True) for batch in step]
    rows = torch.cat([batch.rows[batch.weights[:, 0] > 0] for batch in in_order])
    assert rows.tolist() == list(range(limit))
    ids = torch.cat([batch.tokens[batch.weights[:, 0] > 0, 0] for batch in in_order]).numpy()
    np.testing.assert_array_equal(ids, spread(limit, 40))
    gaps = np.diff([*ids, ids[0] + 40])
    assert gaps.min() >= 40 // limit
    assert gaps.max() <= -(-40 // limit)


def test_batches_refuse_what_does_not_fit():
    shape = BatchShape(2, 1, 2)
    with pytest.raises(
        ValueError, match=r"global batch 5: BatchShape\(coordinates=2.*\) has 4 rows. .* Use more micro"
    ):
        train_batches(counting(9), 0, 0, 5, shape, 0)
    with pytest.raises(
        ValueError, match="coordinate 2: the batch has 2 data-parallel coordinates. It must be from 0 to 1"
    ):
        rows_of(shape, 2)
    with pytest.raises(ValueError, match="a size is below 1. All three must be at least 1"):
        rows_of(BatchShape(2, 0, 2), 0)
    for limit in (0, 10):
        with pytest.raises(ValueError, match=f"limit {limit}: the held-out data has 9 sequences"):
            heldout_batches(counting(9), limit, shape, 0)  # before the first batch is asked for


def test_checksum_tells_order_rows_and_mesh_coordinates_apart():
    shape = BatchShape(2, 2, 2)
    first = train_batches(counting(50), 0, 0, 8, shape, 0)
    assert token_checksum(first) == token_checksum(train_batches(counting(50), 0, 0, 8, shape, 0))
    others = [
        train_batches(counting(50), 0, 0, 8, shape, 1),
        train_batches(counting(50), 0, 8, 8, shape, 0),
        first[::-1],
    ]
    sums = {token_checksum(batches) for batches in [first, *others]}
    assert len(sums) == 4
    assert all(-(2**63) <= value < 2**63 for value in sums)
    assert torch.tensor(list(sums), dtype=torch.int64).shape == (4,)
    assert token_checksum([]) == 0


def test_pin_keeps_cpu_batches_and_moves_others():
    batch = train_batches(counting(9), 0, 0, 2, BatchShape(1, 1, 2), 0)[0]
    assert pin(batch, "cpu") is batch
    assert all(tensor.device.type == "meta" for tensor in pin(batch, torch.device("meta")))
    assert isinstance(pin(batch, "meta"), Batch)


# Windows


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 9), st.data())
def test_windows_of_several_arrays_are_those_of_their_concatenation(lengths, seq, data):
    whole = np.arange(sum(lengths), dtype=np.uint32)
    parts = tuple(np.split(whole, np.cumsum(lengths)[:-1])) if lengths else ()
    sequences = Sequences(parts, seq)
    assert sequences.count == Sequences(whole, seq).count == max(0, len(whole) - 1) // seq
    np.testing.assert_array_equal(stream(sequences), whole)
    start, stop = sorted((data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, len(whole)))))
    np.testing.assert_array_equal(sequences.span(start, stop), whole[start:stop])
    indices = data.draw(st.lists(st.integers(0, sequences.count - 1), max_size=4)) if sequences.count else []
    windows = sequences.read(indices)
    assert windows.shape == (len(indices), seq + 1) and windows.dtype == np.int64
    for index, window in zip(indices, windows, strict=True):
        np.testing.assert_array_equal(window, whole[index * seq : index * seq + seq + 1])


def test_window_numbers_out_of_range_are_all_named():
    with pytest.raises(ValueError, match="sequences -1, 9: the data has 9 sequences of 15 tokens. .* from 0 to 8"):
        counting(9).read([9, 3, -1])


# Corpora


def test_default_corpus_is_the_standard_library():
    corpus = load_corpus([], 128)
    assert corpus.byte_level and corpus.vocab == 256
    assert "standard library" in corpus.source
    text = bytes(stream(corpus.train).astype(np.uint8)) + bytes(stream(corpus.heldout).astype(np.uint8))
    assert Path(threading.__file__).read_bytes() + b"\0" in text
    assert b"class TestCase" in text and b"class ThreadTests(" not in text  # unittest is there, test.test_* is not
    assert corpus.heldout.num_tokens == pytest.approx(0.05 * len(text), rel=0.5)
    assert corpus.fingerprint == load_corpus([], 128).fingerprint
    assert corpus.fingerprint != load_corpus([], 128, seed=1).fingerprint


def test_text_folders_are_read_recursively_and_the_rest_is_counted(tmp_path):
    files = {"b.txt": b"bb" * 20, "a/x.md": b"aa" * 20, "a/noext": "ä" * 20, ".git/h.txt": b"h", "a/.h": b"h"}
    files |= {"pic.png": b"\x89\0\1", "none.txt": b"", "t.bin": b"12"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    corpus = load_corpus([str(tmp_path)], 7)
    assert f"3 text files from {tmp_path} (skipped: 1 binary, 1 empty, 2 hidden, 1 token files)" in corpus.source
    assert corpus.train.num_tokens + corpus.heldout.num_tokens in (123, 124)  # a cut document has two ends
    assert stream(corpus.train)[-1] == stream(corpus.heldout)[-1] == 0
    text = b"b" * 33 + b"\0" + "ä".encode() * 20 + b"\0" + b"a" * 40 + b"\0"
    assert bytes(stream(corpus.train).tolist()) == text  # a folder's own files first, each folder in sorted order
    assert bytes(stream(corpus.heldout).tolist()) == b"b" * 7 + b"\0"


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=30),
    seq=st.integers(1, 20),
    fraction=st.floats(0.01, 0.5),
    seed=st.integers(-5, 5),
    text=st.booleans(),
)
@example(sizes=[3, 1], seq=1, fraction=0.5, seed=0, text=True)
def test_held_out_part_is_disjoint_whole_and_of_the_asked_size(tmp_path_factory, sizes, seq, fraction, seed, text):
    """Every token is on one side, held-out is between its goal and 1.5 times it, and at most one document is cut."""
    folder = tmp_path_factory.mktemp("split")
    paths = []
    for number, size in enumerate(sizes):
        if text:
            (folder / f"{number:02}.txt").write_bytes(bytes([number + 1]) * size)
        else:
            write_bin(folder / f"{number:02}.bin", np.full(size, number + 1))
        paths.append(str(folder / f"{number:02}.{'txt' if text else 'bin'}"))
    total = sum(sizes) + text * len(sizes)
    goal = max(int(fraction * total), min(seq + 1, total // 2))
    try:
        corpus = load_corpus(paths, seq, fraction, seed)
    except ValueError as error:
        assert "Each side must hold at least one sequence" in str(error)
        assert total < 3 * (seq + 1)
        return
    assert goal <= corpus.heldout.num_tokens <= 1.5 * goal + text
    counts = [np.bincount(stream(side), minlength=len(sizes) + 1) for side in (corpus.train, corpus.heldout)]
    assert (counts[0] + counts[1])[1:].tolist() == sizes
    cut = np.count_nonzero((counts[0][1:] > 0) & (counts[1][1:] > 0))
    assert cut <= 1
    again = load_corpus(paths, seq, fraction, seed)
    np.testing.assert_array_equal(stream(again.heldout), stream(corpus.heldout))
    assert again.fingerprint == corpus.fingerprint


def test_one_document_holds_out_its_tail(tmp_path):
    path = write_bin(tmp_path / "t.bin", np.arange(1000))
    corpus = load_corpus([path], 15, heldout_fraction=0.1)
    assert stream(corpus.train).tolist() == list(range(900))
    assert stream(corpus.heldout).tolist() == list(range(900, 1000))
    assert corpus.vocab == 1000 and not corpus.byte_level
    assert isinstance(corpus.train.tokens, np.memmap)  # a view of the file, not a copy


def test_token_files_named_val_are_held_out(tmp_path):
    """nanoGPT writes train.bin and val.bin side by side: neither hash nor order decides there."""
    paths = [write_bin(tmp_path / f"{name}.bin", [number] * 40) for number, name in enumerate(["val", "train"])]
    corpus = load_corpus(paths, 7)
    assert set(stream(corpus.heldout)) == {0} and set(stream(corpus.train)) == {1}
    assert load_corpus([write_bin(tmp_path / "interval.bin", [1] * 60), paths[1]], 7).heldout.num_tokens == 8


@pytest.mark.parametrize(
    "name", ["t.bin", "t.u32.bin", "t-uint32.bin", "u8.npy", "u16.npy", "i64.npy", "llm.bin", "l3.bin"]
)
def test_token_formats_read_the_same_tokens(tmp_path, name):
    tokens, path = np.arange(600) * 7 % 251, tmp_path / name
    if name.endswith(".npy"):
        np.save(path, tokens.astype({"u8": "u1", "u16": "<u2", "i64": ">i8"}[name[:-4]]))
    elif name in ("llm.bin", "l3.bin"):
        header = np.zeros(256, "<i4")
        header[:3] = (20240520, 1, 600) if name == "llm.bin" else (20240801, 7, 600)
        path.write_bytes(header.tobytes() + tokens.astype("<u2" if name == "llm.bin" else "<u4").tobytes())
    else:
        write_bin(path, tokens, "<u2" if name == "t.bin" else "<u4")
    corpus = load_corpus([str(path)], 15)
    np.testing.assert_array_equal(np.concatenate([stream(corpus.train), stream(corpus.heldout)]), tokens)
    assert corpus.vocab == 251
    assert load_corpus([str(path)], 15, vocab=300).vocab == 300


def test_fingerprint_sees_one_changed_token(tmp_path):
    tokens = np.arange(1000)
    before = load_corpus([write_bin(tmp_path / "t.bin", tokens)], 15).fingerprint
    tokens[500] = 3
    assert load_corpus([write_bin(tmp_path / "u.bin", tokens)], 15).fingerprint != before
    assert load_corpus([write_bin(tmp_path / "v.bin", np.arange(1000))], 15).fingerprint == before


# Errors: each line of the message names one path


def refused(data: list[str], seq: int = 15, **options) -> str:
    with pytest.raises(ValueError) as caught:
        load_corpus(data, seq, **options)
    return str(caught.value)


def test_every_bad_text_path_has_a_line(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(b"ab\0c")
    (tmp_path / "bare").mkdir()
    (tmp_path / "tokens").mkdir()
    write_bin(tmp_path / "tokens" / "a.bin", [1, 2])
    names = ["missing.txt", "empty.txt", "binary.txt", "bare", "tokens"]
    lines = refused([str(tmp_path / name) for name in names] + ["/dev/null"]).splitlines()
    rule = "A folder must hold at least one text file that is not empty."
    binary = "Text ends its documents with byte 0 and must not hold any. Give text, or tokens as .bin or .npy."
    ends = [
        "missing.txt: there is no such file or folder. Check the path.",
        "empty.txt: the file is empty. A text file must have at least one byte. Leave it out.",
        f"binary.txt: byte 2 is 0, so this is a binary file. {binary}",
        f"bare: the folder has no text and 0 token files. {rule} Name a folder with text in it.",
        f"tokens: the folder has no text and 1 token files. {rule} Name its token files one by one.",
    ]
    assert lines[:5] == [f"--data {tmp_path}/{end}" for end in ends]
    assert lines[5] == "--data /dev/null: it is neither a file nor a folder. Name a regular file."


def test_every_bad_token_path_has_a_line(tmp_path):
    paths = {
        name: tmp_path / name for name in ("odd.bin", "odd.u32.bin", "empty.bin", "float.npy", "two.npy", "bad.npy")
    }
    paths["odd.bin"].write_bytes(b"123")
    paths["odd.u32.bin"].write_bytes(b"123456")
    paths["empty.bin"].write_bytes(b"")
    np.save(paths["float.npy"], np.zeros(5, np.float32))
    np.save(paths["two.npy"], np.zeros((5, 3), np.int64))
    np.save(paths["bad.npy"], np.zeros(500, np.int64))
    paths["bad.npy"].write_bytes(paths["bad.npy"].read_bytes()[:-50])
    np.save(tmp_path / "none.npy", np.zeros(0, np.uint16))
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "text.npy").write_bytes(b"not at all")
    wide = write_bin(tmp_path / "wide.bin", np.arange(500), "<u4")
    header = np.zeros(256, "<i4")
    header[:3] = (20240520, 1, 9)
    (tmp_path / "cut.bin").write_bytes(header.tobytes() + b"12345678")
    more = [str(tmp_path / name) for name in ("none.npy", "object.npy", "text.npy", "cut.bin", "gone.bin")]
    message = refused([*map(str, paths.values()), *more, wide])
    for line, (name, fact) in zip(
        message.splitlines(),
        {
            "odd.bin": "3 bytes of tokens are not a multiple of 2, the size of uint16",
            "odd.u32.bin": "6 bytes of tokens are not a multiple of 4, the size of uint32",
            "empty.bin": "the file is empty",
            "float.npy": "the array is 1-D of float32, shape [5]",
            "two.npy": "the array is 2-D of int64, shape [5, 3]",
            "bad.npy": "not a whole .npy array of numbers (mmap length",
            "none.npy": "the file has 0 tokens",
            "object.npy": "not a whole .npy array of numbers (",
            "text.npy": "not a whole .npy array of numbers (",
            "cut.bin": "its header says 9 tokens of uint16, but 4 follow it",
            "gone.bin": "there is no such file",
            "wide.bin": "every second uint16 is below 16, as in a file of uint32",
        }.items(),
        strict=True,
    ):
        assert line.startswith(f"--data {tmp_path / name}: {fact}")


def test_unreadable_files_are_named(tmp_path, monkeypatch):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text("abc" * 30)

    def locked(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(np, "fromfile", locked)  # the tests may run as root, who may read everything
    message = refused([str(tmp_path)])
    rule = "it cannot be read (Permission denied). Each file must be readable. Fix its rights."
    assert message.splitlines() == [f"--data {tmp_path / name}: {rule}" for name in ("a.txt", "b.txt", "c.txt")]
    assert refused([str(tmp_path / "a.txt")]) == f"--data {tmp_path / 'a.txt'}: {rule}"


def test_mixing_text_and_tokens_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    data = [str(tmp_path / "a.txt"), write_bin(tmp_path / "t.bin", [1, 2])]
    assert refused(data) == (
        f"--data {' '.join(data)}: {data[1]} hold tokens, {data[0]} hold text. "
        "One run reads either token files (.bin, .npy) or text. Leave out one kind."
    )


def test_a_file_that_is_read_twice_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("abc" * 100)
    assert "a.txt: it is read 2 times. Each file counts once" in refused([str(tmp_path), str(tmp_path / "a.txt")])


def test_ids_outside_the_vocabulary_are_named_in_every_file(tmp_path):
    paths = [write_bin(tmp_path / f"{n}.bin", [*range(60), 67 + n, 99]) for n in (0, 1)]
    np.save(tmp_path / "n.npy", np.array([5, -3, 4]))
    ends = ["Ids must be from 0 to 66. Use a vocabulary that holds all tokens."] * 3
    facts = [f"{paths[0]}: the token at position 60 is 67", f"{paths[1]}: the token at position 60 is 68"]
    facts += [f"{tmp_path / 'n.npy'}: the token at position 1 is -3"]
    expected = [f"--data {fact}, and --vocab 67 is given. {end}" for fact, end in zip(facts, ends, strict=True)]
    assert refused([*paths, str(tmp_path / "n.npy")], vocab=67).splitlines() == expected
    assert "is -3, and no --vocab is given. Ids must be from 0 to" in refused([str(tmp_path / "n.npy")])
    (tmp_path / "t.txt").write_text("abcz" * 30)
    assert "position 3 is 122, and --vocab 120 is given" in refused([str(tmp_path / "t.txt")], vocab=120)


def test_too_few_tokens_for_one_sequence(tmp_path):
    path = write_bin(tmp_path / "t.bin", np.arange(20))
    assert refused([path]) == (
        f"--data {path}: 20 tokens make 10 for training and 10 held out, but one sequence takes seq + 1 = 16. "
        "Each side must hold at least one sequence. Give more data, or a smaller --seq."
    )
    assert load_corpus([path], 9).heldout.count == 1


def test_bad_options_are_refused(tmp_path):
    assert "--seq 0: a sequence needs at least 1 token" in refused([], seq=0)
    assert "heldout_fraction 0: the part held out must be above 0 and at most 0.5" in refused([], heldout_fraction=0)
    assert "vocab 0: a vocabulary has at least 1 id" in refused([], vocab=0)
    with pytest.raises(ValueError, match="data is a list of paths, not one string"):
        load_corpus("a.txt", 15)


# Reading ahead


def test_loader_reads_ahead_in_order_and_no_further():
    asked, third = [], threading.Event()

    def read(step: int) -> str:
        asked.append(step)
        if step == 9:
            third.set()
        return f"step {step}"

    with Loader(read, 7, ahead=2) as loader:
        results = [loader.next()]
        assert third.wait(5)
        assert asked == [7, 8, 9]  # one taken, two waiting
        results += [loader.next(), loader.next()]
    assert [value for value, _ in results] == ["step 7", "step 8", "step 9"]
    assert all(waited >= 0 for _, waited in results)


def test_loader_measures_the_wait():
    gate = threading.Event()
    with Loader(lambda step: gate.wait(5) and step, 0) as loader:
        threading.Timer(0.05, gate.set).start()
        assert 0.02 < loader.next()[1] < 5


def test_loader_raises_what_the_thread_raised_after_the_results_before_it():
    def read(step: int) -> int:
        if step == 2:
            raise OSError(f"no step {step}")
        return step

    with Loader(read, 0, ahead=5) as loader:
        assert [loader.next()[0], loader.next()[0]] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match="no step 2"):
                loader.next()


def test_closed_loader_stops_its_thread():
    before = threading.active_count()
    loader = Loader(lambda step: step, 0)
    assert loader.next()[0] == 0
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match=r"Loader: next\(\) after close\(\)"):
        loader.next()
    with pytest.raises(ValueError, match="ahead 0: a loader must read at least 1 step ahead"):
        Loader(lambda step: step, 0, ahead=0)


# Bigram


def slow_bigram_loss(train: list[int], heldout: list[tuple[int, int]], vocab: int) -> float:
    """Compute Witten-Bell over add-one unigrams by looking at every pair again for every probability."""
    pairs = list(pairwise(train))
    losses = []
    for before, after in heldout:
        unigram = (train.count(after) + 1) / (len(train) + vocab)
        followers = [b for a, b in pairs if a == before]
        kinds = len(set(followers))
        together = len(followers) + kinds
        losses.append(-np.log((followers.count(after) + kinds * unigram) / together if together else unigram))
    return float(np.mean(losses))


@given(
    train=st.lists(st.integers(0, 6), min_size=1, max_size=60),
    heldout=st.lists(st.integers(0, 6), min_size=5, max_size=30),
    seq=st.integers(1, 4),
    data=st.data(),
)
def test_bigram_loss_equals_the_direct_computation(train, heldout, seq, data):
    held = Sequences(np.array(heldout, np.uint16), seq)
    limit = data.draw(st.integers(1, held.count))
    cut = data.draw(st.integers(1, len(train)))
    loss = bigram_loss(Sequences((np.array(train[:cut]), np.array(train[cut:])), seq), held, 7, limit)
    pairs = [(a, b) for i in spread(limit, held.count) for a, b in pairwise(heldout[i * seq : i * seq + seq + 1])]
    assert loss == pytest.approx(slow_bigram_loss(train, pairs, 7), rel=1e-12)


def test_bigram_is_a_distribution_and_has_its_limits():
    train = Sequences(np.array([1, 2, 1, 3, 3, 1], np.uint8), 1)

    def loss(before: int, after: int, vocab: int = 5, **options) -> float:
        value = bigram_loss(train, Sequences(np.array([before, after], np.uint8), 1), vocab, 1, **options)
        assert value is not None
        return value

    for before in range(5):
        assert sum(np.exp(-loss(before, after)) for after in range(5)) == pytest.approx(1, rel=1e-12)
    assert loss(4, 0, vocab=4096) > loss(4, 0)
    assert loss(4, 3, max_train_tokens=3) == pytest.approx(np.log(8))
    assert bigram_loss(train, train, 4097, 1) is None
    with pytest.raises(ValueError, match="limit 6: the held-out data has 5 sequences"):
        bigram_loss(train, train, 5, 6)
