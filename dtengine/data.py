"""Sequences by position: token files and text, sample order, batches, reading ahead.

Nothing here is state. Which sequences a step reads follows from (seed, number of sequences consumed); which rows of the
step a rank reads follows from its data-parallel coordinate. So a resumed run, another mesh, or a second rank of the same
coordinate reads the same tokens by computing, not by remembering.
"""

import hashlib
import os
import re
import sys
import sysconfig
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

IGNORE = -100  # target that is not counted

T = TypeVar("T")

_TOKEN_SUFFIXES = (".bin", ".npy")
_SKIPPED_LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_HELD_OUT_NAME = re.compile(r"(^|[^a-z])(val|valid|validation|heldout|held_out)([^a-z]|$)")
_HEADER_BYTES = 1024  # 256 int32: magic, version, number of tokens, zeros
_HEADER_MAGICS = {20240520: "<u2", 20240801: "<u4"}  # llm.c and modded-nanogpt: GPT-2 and Llama 3 token files
_CHUNK = 1 << 22  # tokens looked at together in a scan: 32 MiB as int64
_MASK = (1 << 64) - 1
_FEISTEL_ROUNDS = 6


class Batch(NamedTuple):
    """One microbatch of one data-parallel coordinate, or the whole batch on one device.

    Attributes:
        tokens: [batch, seq] int64; 0 in padding rows.
        targets: [batch, seq] int64, the next token; IGNORE where it is not counted.
        weights: [batch, seq] float32, weight of each token's loss; 0 in padding rows.
        rows: [batch] int64, index of the row within the step's global batch: the identity of the sequence, by which
            dropout is keyed.
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    rows: Tensor


class BatchShape(NamedTuple):
    """How a step's rows are dealt out; the padded global batch is the product of the three."""

    coordinates: int
    microbatches: int
    microbatch: int


@dataclass(frozen=True, eq=False)
class Sequences:
    """Fixed-length windows over one flat stream of tokens.

    Window i is tokens [i * seq, i * seq + seq + 1): neighbours share one token, so each token but the first is the
    target of exactly one window.

    Attributes:
        tokens: 1-D integer array or memory map, or a tuple of them which is read as their concatenation (several memory
            maps cannot become one array without a copy of the data).
        seq: Tokens in a sequence.
    """

    tokens: np.ndarray | tuple[np.ndarray, ...]
    seq: int

    @cached_property
    def parts(self) -> tuple[np.ndarray, ...]:
        """The arrays whose concatenation is the stream."""
        return self.tokens if isinstance(self.tokens, tuple) else (self.tokens,)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(part) for part in self.parts))

    @property
    def num_tokens(self) -> int:
        """Length of the stream in tokens."""
        return self._ends[-1] if self._ends else 0

    @property
    def count(self) -> int:
        """Number of windows."""
        return max(0, self.num_tokens - 1) // self.seq

    def span(self, start: int, stop: int) -> np.ndarray:
        """Copy tokens [start, stop) of the stream, [stop - start] int64."""
        pieces = []
        part = bisect_right(self._ends, start)
        while start < stop and part < len(self.parts):
            end = min(stop, self._ends[part])
            begin = self._ends[part] - len(self.parts[part])
            pieces.append(self.parts[part][start - begin : end - begin].astype(np.int64))
            start, part = end, part + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.int64), *pieces])

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Copy windows.

        Args:
            indices: [n] window numbers, each in 0..count-1, in any order.

        Returns:
            [n, seq + 1] int64.

        Raises:
            ValueError: A window number is out of range.
        """
        outside = sorted({int(i) for i in indices if not 0 <= i < self.count})
        if outside:
            raise ValueError(
                f"sequences {_some(outside)}: the data has {self.count} sequences of {self.seq} tokens. "
                f"A sequence is named by a number from 0 to {self.count - 1}. Take the numbers from sequence_order."
            )
        windows = np.empty((len(indices), self.seq + 1), np.int64)
        for row, index in enumerate(indices):  # slices, not fancy indexing: a memory map then reads only these pages
            windows[row] = self.span(int(index) * self.seq, int(index) * self.seq + self.seq + 1)
        return windows


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out sequences of one data set.

    Attributes:
        train: Sequences to train on.
        heldout: Sequences of other documents (or of a tail that is not in train).
        vocab: Number of token ids; every token is below it.
        source: Where the tokens come from, for people.
        byte_level: True where a token is a byte of text.
        fingerprint: Hash of sizes and sampled content, so that a resume can tell that the data changed.
    """

    train: Sequences
    heldout: Sequences
    vocab: int
    source: str
    byte_level: bool
    fingerprint: str


class _Document(NamedTuple):
    name: str
    tokens: np.ndarray


class _Slice(NamedTuple):
    document: int
    start: int
    stop: int


def load_corpus(
    data: Sequence[str],
    seq: int,
    heldout_fraction: float = 0.05,
    seed: int = 0,
    vocab: int | None = None,
) -> Corpus:
    """Open data and split it into training and held-out sequences.

    What `data` names:

    - Nothing: the .py files of the running Python's standard library, without tests. Each file is a document.
    - Text files and folders: a token is a byte, and each document (file) ends with one byte 0. Folders are read
      recursively in sorted order without hidden, binary (having a byte 0), token and empty files; `source` counts them.
    - Token files, memory-mapped and never copied whole; each is a document. `.npy` is a 1-D integer array. `.bin` is raw
      little-endian uint16 as nanoGPT writes it, uint32 where the file's name holds `uint32` or ends in `.u32.bin`, and
      what its header says where it begins with the 1,024-byte header of llm.c.

    What is held out: token files with a word such as `val` in their name (nanoGPT's train.bin and val.bin), if others
    have none. Else documents in the order of a hash of (seed, document index), until heldout_fraction of all tokens and
    at least one sequence is reached; a document that would take it over 1.5 times that stays in training. What is then
    missing (one document, or few large ones) is the tail of the largest document that is left.

    Args:
        data: Paths, as given with --data.
        seq: Tokens in a sequence.
        heldout_fraction: Part of the tokens to hold out, above 0, at most 0.5.
        seed: Chooses the documents to hold out.
        vocab: Number of token ids; by default 256 for text and the largest id + 1 for token files (a scan of all of it).

    Raises:
        ValueError: Paths that are missing, unreadable, empty, malformed or mixed; token ids outside the vocabulary; too
            few tokens for one sequence on each side. Every offending path has a line.
    """
    if seq < 1:
        raise ValueError(f"--seq {seq}: a sequence needs at least 1 token. Use --seq 1 or more.")
    if not 0 < heldout_fraction <= 0.5:
        raise ValueError(
            f"heldout_fraction {heldout_fraction}: the part held out must be above 0 and at most 0.5. Use 0.05."
        )
    if vocab is not None and vocab < 1:
        raise ValueError(f"vocab {vocab}: a vocabulary has at least 1 id. Leave it out to take it from the data.")
    if isinstance(data, str):
        raise ValueError(f"--data {data}: data is a list of paths, not one string. Use [{data!r}].")  # noqa: TRY004
    documents, byte_level, source = _read_documents(data)
    vocab = _check_vocab(documents, vocab, byte_level)
    train_slices, heldout_slices = _split(documents, seq, heldout_fraction, seed, byte_level)
    train = Sequences(_join(documents, train_slices, byte_level), seq)
    heldout = Sequences(_join(documents, heldout_slices, byte_level), seq)
    if min(train.count, heldout.count) < 1:
        total = train.num_tokens + heldout.num_tokens
        raise ValueError(
            f"--data {' '.join(data)}: {total} tokens make {train.num_tokens} for training and {heldout.num_tokens} held "
            f"out, but one sequence takes seq + 1 = {seq + 1}. Each side must hold at least one sequence. "
            f"Give more data, or a smaller --seq."
        )
    source += f", {train.num_tokens:,} tokens to train on and {heldout.num_tokens:,} held out"
    return Corpus(train, heldout, vocab, source, byte_level, _fingerprint(train, heldout))


def _read_documents(data: Sequence[str]) -> tuple[list[_Document], bool, str]:
    """Read or map every file that data names: documents, byte_level and a description."""
    if not data:
        return _read_library()
    paths = [Path(name) for name in data]
    token_paths = [path for path in paths if path.suffix in _TOKEN_SUFFIXES and not path.is_dir()]
    text_paths = [path for path in paths if path not in token_paths]
    if token_paths and text_paths:
        raise ValueError(
            f"--data {' '.join(data)}: {_some(token_paths)} hold tokens, {_some(text_paths)} hold text. "
            f"One run reads either token files ({', '.join(_TOKEN_SUFFIXES)}) or text. Leave out one kind."
        )
    documents, problems, skipped = [], [], Counter()
    for path in paths:
        if not path.exists():
            problems.append(f"--data {path}: there is no such file or folder. Check the path.")
        elif path.is_dir():
            documents += _read_folder(path, problems, skipped)
        elif not path.is_file():  # opening a pipe would wait for a writer
            problems.append(f"--data {path}: it is neither a file nor a folder. Name a regular file.")
        else:
            try:
                documents.append(_Document(str(path), _map_tokens(path) if token_paths else _read_text(path)))
            except OSError as error:
                problems.append(_unreadable(path, error))
            except ValueError as error:
                problems.append(f"--data {path}: {error}")
    problems += _repeated(documents)
    if problems:
        raise ValueError("\n".join(problems))
    kind = "token" if token_paths else "text"
    source = f"{len(documents)} {kind} file{'s' * (len(documents) != 1)} from {_some(data)}"
    if skipped:
        source += f" (skipped: {', '.join(f'{number} {why}' for why, number in sorted(skipped.items()))})"
    return documents, not token_paths, source


def _read_library() -> tuple[list[_Document], bool, str]:
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED_LIBRARY_FOLDERS)
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix == ".py" and path.stat().st_size:
                documents.append(_Document(str(path), np.fromfile(path, np.uint8)))
    if not documents:
        raise ValueError(
            f"--data (none given): {root} has no .py files. Without --data the text is Python's own standard library, "
            f"which this Python does not have as files. Use --data PATH."
        )
    version = ".".join(map(str, sys.version_info[:3]))
    return documents, True, f"{len(documents)} files of the Python {version} standard library"


def _read_folder(root: Path, problems: list[str], skipped: Counter[str]) -> list[_Document]:
    documents, tokens = [], 0
    failures = len(problems)
    for folder, folders, files in os.walk(root, onerror=lambda error: problems.append(_unreadable(root, error))):
        skipped.update(["hidden"] * sum(name.startswith(".") for name in [*folders, *files]))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(folder, name) for name in sorted(files) if not name.startswith(".")):
            if path.suffix in _TOKEN_SUFFIXES:
                tokens += 1
                skipped["token files"] += 1
            elif not path.is_file():
                skipped["not a regular file"] += 1
            elif path.stat().st_size == 0:
                skipped["empty"] += 1
            else:
                try:
                    document = _Document(str(path), np.fromfile(path, np.uint8))
                except OSError as error:
                    problems.append(_unreadable(path, error))
                    continue
                if (document.tokens == 0).any():
                    skipped["binary"] += 1
                else:
                    documents.append(document)
    if not documents and len(problems) == failures:
        cure = "Name its token files one by one." if tokens else "Name a folder with text in it."
        problems.append(
            f"--data {root}: the folder has no text and {tokens} token files. "
            f"A folder must hold at least one text file that is not empty. {cure}"
        )
    return documents


def _unreadable(path: Path, error: OSError) -> str:
    name = error.filename or path
    return f"--data {name}: it cannot be read ({error.strerror or error}). Each file must be readable. Fix its rights."


def _repeated(documents: list[_Document]) -> list[str]:
    """Name files that were reached twice: one copy could be trained on and the other held out."""
    times = Counter(os.path.realpath(document.name) for document in documents)
    return [
        f"--data {name}: it is read {number} times. Each file counts once, or held-out text is trained on. "
        f"Leave out the path or link that repeats it."
        for name, number in times.items()
        if number > 1
    ]


def _read_text(path: Path) -> np.ndarray:
    tokens = np.fromfile(path, np.uint8)
    if not len(tokens):
        raise ValueError("the file is empty. A text file must have at least one byte. Leave it out.")
    zeros = np.flatnonzero(tokens == 0)
    if len(zeros):
        raise ValueError(
            f"byte {zeros[0]} is 0, so this is a binary file. Text ends its documents with byte 0 and must not hold any. "
            f"Give text, or tokens as {' or '.join(_TOKEN_SUFFIXES)}."
        )
    return tokens


def _map_tokens(path: Path) -> np.ndarray:
    """Memory-map a token file, or raise ValueError with the part of the message that follows the path."""
    size = path.stat().st_size
    if not size:
        raise ValueError("the file is empty. A token file must have at least one token. Leave it out.")
    tokens = _map_npy(path) if path.suffix == ".npy" else _map_bin(path, size)
    if not len(tokens):
        raise ValueError("the file has 0 tokens. A token file must have at least one token. Leave it out.")
    return tokens


def _map_npy(path: Path) -> np.ndarray:
    try:  # unlike np.load it takes nothing but .npy and never unpickles
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, SyntaxError) as error:
        raise ValueError(
            f"not a whole .npy array of numbers ({error}). A .npy file is what numpy.save writes. Write it again."
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"the array is {tokens.ndim}-D of {tokens.dtype}, shape {list(tokens.shape)}. "
            f"Tokens must be a 1-D array of integers. Save it with numpy.save(path, tokens.reshape(-1).astype('uint32'))."
        )
    return tokens


def _map_bin(path: Path, size: int) -> np.ndarray:
    with path.open("rb") as file:
        head = np.frombuffer(file.read(_HEADER_BYTES)[: size // 4 * 4], "<i4")
    dtype = _HEADER_MAGICS.get(int(head[0])) if len(head) == _HEADER_BYTES // 4 else None
    offset = _HEADER_BYTES if dtype else 0
    if dtype is None:
        dtype = "<u4" if "uint32" in path.name or path.name.endswith(".u32.bin") else "<u2"
    width = np.dtype(dtype).itemsize
    name = f"uint{8 * width}"
    if (size - offset) % width:
        raise ValueError(
            f"{size - offset} bytes of tokens are not a multiple of {width}, the size of {name}. A .bin file is raw "
            f"uint16, or uint32 where its name holds 'uint32' or ends in '.u32.bin'. Write it again, or rename it."
        )
    if offset and (size - offset) // width != head[2]:
        raise ValueError(
            f"its header says {head[2]} tokens of {name}, but {(size - offset) // width} follow it. "
            f"Both must agree. Write the file again: it was cut off."
        )
    if size == offset:
        return np.empty(0, dtype)
    tokens = np.memmap(path, dtype, mode="r", offset=offset)
    halves = tokens[:4096]
    if width == 2 and size % 4 == 0 and len(halves) >= 64 and halves[1::2].max() < 16 <= halves[::2].max():
        # Read as uint16, uint32 ids below 2**20 have their high halves, all small, at every second place.
        raise ValueError(
            "every second uint16 is below 16, as in a file of uint32. A .bin file is raw uint16, or uint32 where its "
            "name holds 'uint32' or ends in '.u32.bin'. Rename it, or link to it by such a name."
        )
    return tokens


def _check_vocab(documents: list[_Document], vocab: int | None, byte_level: bool) -> int:
    """Find the number of token ids, or raise ValueError naming the first bad token of every file that has one."""
    largest, problems = -1, []
    for name, tokens in documents:
        info = np.iinfo(tokens.dtype)
        limit = vocab or (256 if byte_level else 1 << 31)
        if info.min == 0 and info.max < limit and (vocab or byte_level):
            continue  # no value of this type can be too large: save the scan
        for start in range(0, len(tokens), _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            largest = max(largest, int(chunk.max()))
            if chunk.min() < 0 or largest >= limit:
                place = int(np.argmax((chunk < 0) | (chunk >= limit)))
                problems.append(
                    f"--data {name}: the token at position {start + place} is {chunk[place]}, and the vocabulary is "
                    f"{vocab or 'not given'}. Ids must be from 0 to {limit - 1}. Use the vocabulary of these tokens."
                )
                break
        largest = min(largest, limit - 1)  # so that one file's bad token does not blame the next file
    if problems:
        raise ValueError("\n".join(problems))
    return vocab or (256 if byte_level else largest + 1)


def _split(
    documents: list[_Document], seq: int, fraction: float, seed: int, byte_level: bool
) -> tuple[list[_Slice], list[_Slice]]:
    """Deal out the documents as load_corpus says: slices to train on, slices to hold out, each in document order."""
    sizes = [len(tokens) + byte_level for _, tokens in documents]
    named = [not byte_level and bool(_HELD_OUT_NAME.search(Path(name).stem.lower())) for name, _ in documents]
    held = {index for index, is_named in enumerate(named) if is_named}
    rest_start = {}  # where the held-out tail of a document begins
    if not held or all(named):
        held = set()
        goal = max(int(fraction * sum(sizes)), min(seq + 1, sum(sizes) // 2))
        ranks = _mix(_mix(np.array([seed & _MASK], np.uint64)) + np.arange(len(documents), dtype=np.uint64))
        total = 0
        for index in map(int, np.argsort(ranks, kind="stable")):
            if total < goal and total + sizes[index] <= 1.5 * goal:
                held.add(index)
                total += sizes[index]
        if total < goal:
            largest = max((index for index in range(len(sizes)) if index not in held), key=sizes.__getitem__)
            rest_start[largest] = max(0, len(documents[largest].tokens) - (goal - total) + byte_level)
    train, heldout = [], []
    for index, (_, tokens) in enumerate(documents):
        cut = 0 if index in held else rest_start.get(index, len(tokens))
        train += [_Slice(index, 0, cut)] * (cut > 0)
        heldout += [_Slice(index, cut, len(tokens))] * (cut < len(tokens))
    return train, heldout


def _join(documents: list[_Document], slices: list[_Slice], byte_level: bool) -> np.ndarray | tuple[np.ndarray, ...]:
    """Join slices of documents to a stream: text by copying, with byte 0 after each; token files as views."""
    pieces = [documents[piece.document].tokens[piece.start : piece.stop] for piece in slices]
    if not byte_level:
        return pieces[0] if len(pieces) == 1 else tuple(pieces)
    end = np.zeros(1, np.uint8)
    return np.concatenate([np.empty(0, np.uint8), *(array for piece in pieces for array in (piece, end))])


def _fingerprint(*sides: Sequences) -> str:
    """Hash sizes, types and content: all of it up to 16 Mi tokens in an array, else 1,024 spread blocks of 1,024."""
    digest = hashlib.blake2b(digest_size=16)
    for side in sides:
        for part in (np.empty(0, np.uint8), *side.parts):  # the empty one marks where a side begins
            digest.update(f"{part.dtype.str} {len(part)};".encode())
            if len(part) <= 1 << 24:
                digest.update(np.ascontiguousarray(part).data)
            else:
                for start in np.linspace(0, len(part) - 1024, 1024, dtype=np.int64):
                    digest.update(np.ascontiguousarray(part[start : start + 1024]).data)
    return digest.hexdigest()


def _some(items: Sequence, most: int = 8) -> str:
    text = ", ".join(str(item) for item in items[:most])
    return text if len(items) <= most else f"{text} and {len(items) - most} more"


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble [n] uint64 by splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable PRNGs")."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sequence_order(seed: int, start: int, count: int, num_sequences: int) -> np.ndarray:
    """Compute which sequences stand at global positions start..start+count-1 of an endless shuffled stream.

    Position p is in epoch p // num_sequences, and each epoch is a pseudo-random permutation of its own, keyed by (seed,
    epoch). It is computed for the asked positions alone, so any position costs the same: a balanced Feistel network
    (Luby and Rackoff 1988, "How to construct pseudorandom permutations") over the next even power of two, whose results
    outside 0..num_sequences-1 are put through it again (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains"). Not meant to resist cryptanalysis.

    Args:
        seed: Any integer.
        start: First position: sequences consumed so far.
        count: Number of positions.
        num_sequences: Sequences in the data.

    Returns:
        [count] int64, each in 0..num_sequences-1.

    Raises:
        ValueError: A negative start or count, or no sequences.
    """
    if start < 0 or count < 0 or num_sequences < 1:
        raise ValueError(
            f"sequence_order: start {start}, count {count}, num_sequences {num_sequences}. "
            f"start and count must be at least 0 and num_sequences at least 1. Pass what was consumed so far as start."
        )
    half = max(1, ((num_sequences - 1).bit_length() + 1) // 2)  # bits of each half of the domain
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    positions = np.arange(start, start + count, dtype=np.uint64)
    epochs, values = np.divmod(positions, np.uint64(num_sequences))
    keys = _mix(_mix(np.array([seed & _MASK], np.uint64)) ^ _mix(epochs))

    def permute(x: np.ndarray, key: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for turn in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(_mix(key + np.uint64(turn)) ^ right) & mask)
        return (left << shift) | right

    values = permute(values, keys)
    while len(outside := np.flatnonzero(values >= num_sequences)):  # at most 3 of 4 stay outside each time, on average
        values[outside] = permute(values[outside], keys[outside])
    return values.astype(np.int64)


def rows_of(shape: BatchShape, coordinate: int) -> np.ndarray:
    """Number the rows of the step's global batch that one data-parallel coordinate reads.

    Returns:
        [microbatches, microbatch] int64: row (m * coordinates + coordinate) * microbatch + j. A row that is not below the
        global batch is padding.

    Raises:
        ValueError: A size below 1, or a coordinate that the shape does not have.
    """
    if min(shape) < 1:
        raise ValueError(f"{shape}: a size is below 1. All three must be at least 1. Use 1 for what is not split.")
    if not 0 <= coordinate < shape.coordinates:
        raise ValueError(
            f"coordinate {coordinate}: the batch has {shape.coordinates} data-parallel coordinates. It must be from 0 to "
            f"{shape.coordinates - 1}. Take it from the mesh that the shape was made for."
        )
    passes = np.arange(shape.microbatches, dtype=np.int64)[:, None]
    return (passes * shape.coordinates + coordinate) * shape.microbatch + np.arange(shape.microbatch, dtype=np.int64)


def train_batches(
    sequences: Sequences, seed: int, consumed: int, global_batch: int, shape: BatchShape, coordinate: int
) -> list[Batch]:
    """Read one coordinate's microbatches of the step whose first sequence is at position `consumed`.

    Args:
        sequences: What to read from.
        seed: Seed of the order.
        consumed: Sequences of all earlier steps; the next step is at consumed + global_batch.
        global_batch: Sequences of this step; rows of the shape beyond it are padding.
        shape: How the rows are dealt out.
        coordinate: Data-parallel coordinate, 0..shape.coordinates-1.

    Returns:
        shape.microbatches batches of [shape.microbatch, seq], on the CPU.

    Raises:
        ValueError: The global batch is below 1 or does not fit in the shape, or what rows_of and sequence_order refuse.
    """
    rows = rows_of(shape, coordinate)
    room = shape.coordinates * shape.microbatches * shape.microbatch
    if not 1 <= global_batch <= room:
        raise ValueError(
            f"global batch {global_batch}: {shape} has {room} rows. The global batch must be from 1 to the product of "
            f"coordinates, microbatches and microbatch. Use more microbatches, or a smaller global batch."
        )
    order = sequence_order(seed, consumed, global_batch, sequences.count)
    return [_batch(sequences, some, some < global_batch, order[np.minimum(some, global_batch - 1)]) for some in rows]


def heldout_batches(sequences: Sequences, limit: int, shape: BatchShape, coordinate: int) -> Iterator[Batch]:
    """Read one coordinate's batches of held-out sequences 0..limit-1, in order.

    Over all coordinates each sequence comes exactly once; `rows` holds its number. Every coordinate yields the same number
    of batches, and rows past the limit are padding of weight 0, so sums of loss and count need no correction.

    Args:
        sequences: What to read from.
        limit: Number of sequences; no more than there are.
        shape: coordinates and microbatch deal out the rows; microbatches is not looked at.
        coordinate: Data-parallel coordinate, 0..shape.coordinates-1.

    Raises:
        ValueError: The limit is below 1 or above the number of sequences; raised by the call, before the first batch.
    """
    _check_limit(sequences, limit)
    first = rows_of(shape._replace(microbatches=1), coordinate)[0]
    stride = shape.coordinates * shape.microbatch
    numbers = (first + start for start in range(0, limit, stride))
    return (_batch(sequences, some, some < limit, some) for some in numbers)


def _check_limit(sequences: Sequences, limit: int) -> None:
    if not 1 <= limit <= sequences.count:
        raise ValueError(
            f"limit {limit}: the held-out data has {sequences.count} sequences. The limit must be from 1 to that number. "
            f"Use min(limit, sequences.count)."
        )


def _batch(sequences: Sequences, rows: np.ndarray, real: np.ndarray, ids: np.ndarray) -> Batch:
    """Read the sequences `ids` into the rows that are `real`; the others are padding."""
    windows = np.zeros((len(rows), sequences.seq + 1), np.int64)
    windows[real] = sequences.read(ids[real])
    targets = np.where(real[:, None], windows[:, 1:], IGNORE)
    weights = np.repeat(real.astype(np.float32)[:, None], sequences.seq, axis=1)
    arrays = (windows[:, :-1].copy(), targets, weights, rows.copy())
    return Batch(*map(torch.from_numpy, arrays))


def pin(batch: Batch, device: torch.device | str) -> Batch:
    """Move a batch to a device: through pinned memory and without waiting on an accelerator, without a copy on the CPU.

    Give an accelerator with its index where this runs in a background thread, which has a current device of its own.
    """
    device = torch.device(device)
    accelerator = torch.accelerator.current_accelerator()
    if device.type == "cpu":
        return batch
    if accelerator is None or device.type != accelerator.type:
        return Batch(*(tensor.to(device) for tensor in batch))
    return Batch(*(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch))


def token_checksum(batches: Sequence[Batch]) -> int:
    """Hash token ids and their order, to compare ranks that must read the same rows.

    Returns:
        An integer in the range of int64; 0 for no tokens.
    """
    if not batches:
        return 0
    tokens = np.concatenate([batch.tokens.cpu().numpy().reshape(-1) for batch in batches]).astype(np.uint64)
    places = _mix(np.arange(len(tokens), dtype=np.uint64))
    return int(_mix(tokens ^ places).sum(dtype=np.uint64).astype(np.int64))


class Loader(Generic[T]):
    """Call `read(step)` for first_step, first_step + 1, ... ahead of use, in one daemon thread.

    A context manager; leaving it closes it.

    Args:
        read: What to call; its results come in order from next().
        first_step: First argument.
        ahead: Results that may wait; at least 1.

    Raises:
        ValueError: ahead is below 1.
    """

    def __init__(self, read: Callable[[int], T], first_step: int, ahead: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"ahead {ahead}: a loader must read at least 1 step ahead. Use 2.")
        self._read, self._ahead = read, ahead
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(first_step,), name="dtengine-loader", daemon=True)
        self._thread.start()

    def _run(self, step: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
                if self._closed:
                    return
            try:
                value = self._read(step)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is for the thread that asks for the result
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(value)
                self._changed.notify_all()
            step += 1

    def next(self) -> tuple[T, float]:
        """Return the next result and the seconds that this call waited for it.

        Raises:
            Exception: What `read` raised, after the results before it; again at each further call.
            RuntimeError: The loader is closed.
        """
        begin = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ready or self._error)
            if self._closed:
                raise RuntimeError("Loader: next() after close(). A closed loader reads nothing. Make a new one.")
            if self._error is not None and not self._ready:
                raise self._error
            value = self._ready.popleft()
            self._changed.notify_all()
        return value, time.perf_counter() - begin

    def close(self, timeout: float = 5.0) -> None:
        """Stop the thread; wait up to timeout seconds for a read that is under way."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bigram_loss(
    train: Sequences, heldout: Sequences, vocab: int, limit: int, max_train_tokens: int = 1 << 28
) -> float | None:
    """Score held-out sequences by a smoothed bigram model: a line that a trained model must pass.

    The bigram is interpolated with the unigram by Witten-Bell, p(w|h) = (c(h,w) + t(h) u(w)) / (c(h) + t(h)) with t(h) the
    number of distinct followers of h (Witten and Bell 1991, "The zero-frequency problem"; in this form Chen and Goodman
    1999, "An empirical study of smoothing techniques for language modeling"), and the unigram u has add-one smoothing.

    Args:
        train: Sequences to count.
        heldout: Sequences to score; their ids are below vocab, as those of train.
        vocab: Number of token ids.
        limit: Number of held-out sequences; the targets scored are exactly those of heldout_batches(heldout, limit).
        max_train_tokens: Tokens at the start of train to count; more would change little and take long.

    Returns:
        Mean negative log likelihood in nats per token, or None where vocab is above 4,096: the table, vocab squared int64,
        would take more than 128 MiB.

    Raises:
        ValueError: The limit is below 1 or above the number of held-out sequences.
    """
    _check_limit(heldout, limit)
    if vocab > 4096:
        return None
    counts = np.zeros(vocab * vocab, np.int64)
    last = min(train.num_tokens, max_train_tokens) - 1
    for pairs in _pairs(train, last, vocab, max(_CHUNK, len(counts))):  # a chunk costs at least one pass over the table
        counts += np.bincount(pairs, minlength=len(counts))
    counts = counts.reshape(vocab, vocab)
    unigram = np.bincount(train.span(0, 1), minlength=vocab) + counts.sum(axis=0) + 1.0
    unigram /= unigram.sum()
    follows, kinds = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
    total = 0.0
    for pairs in _pairs(heldout, limit * heldout.seq, vocab, _CHUNK):
        before, after = np.divmod(pairs, vocab)
        weight = np.maximum(kinds[before], 1)  # never seen: then the bigram adds nothing and the unigram is all of it
        total -= np.log((counts[before, after] + weight * unigram[after]) / (follows[before] + weight)).sum()
    return float(total / (limit * heldout.seq))


def _pairs(sequences: Sequences, number: int, vocab: int, chunk: int) -> Iterator[np.ndarray]:
    """Yield the first `number` pairs of neighbours of a stream, in chunks of [n] int64: before * vocab + after."""
    for start in range(0, number, chunk):
        tokens = sequences.span(start, min(start + chunk, number) + 1)
        yield tokens[:-1] * vocab + tokens[1:]
