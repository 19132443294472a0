"""A corpus: text and token files as one flat stream of tokens, and the windows that are its sequences."""

import hashlib
import os
import re
import sys
import sysconfig
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dtengine.random import MASK, scramble

CHUNK = 1 << 22  # tokens looked at together in a scan: 32 MiB as int64
_TOKEN_SUFFIXES = (".bin", ".npy")
_SKIPPED_LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_HELD_OUT_NAME = re.compile(r"(^|[^a-z])(val|valid|validation|heldout|held_out)([^a-z]|$)")
_HEADER_BYTES = 1024  # 256 int32: magic, version, number of tokens, zeros
_HEADER_MAGICS = {20240520: "<u2", 20240801: "<u4"}  # llm.c and modded-nanogpt: GPT-2 and Llama 3 token files


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
        raise ValueError(f"--data {data}: data is a list of paths, not one string. Use [{data!r}].")
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
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            largest = max(largest, int(chunk.max()))
            if chunk.min() < 0 or largest >= limit:
                place = int(np.argmax((chunk < 0) | (chunk >= limit)))
                problems.append(
                    f"--data {name}: the token at position {start + place} is {chunk[place]}, and "
                    f"{f'--vocab {vocab}' if vocab else 'no --vocab'} is given. Ids must be from 0 to {limit - 1}. "
                    f"Use a vocabulary that holds all tokens{', 256 for bytes' if byte_level else ''}."
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
        ranks = scramble(scramble(np.array([seed & MASK], np.uint64)) + np.arange(len(documents), dtype=np.uint64))
        total = 0
        for index in map(int, np.argsort(ranks, kind="stable")):
            if total < goal and total + sizes[index] <= 1.5 * goal:
                held.add(index)
                total += sizes[index]
        if total < goal:
            largest = max((index for index in range(len(sizes)) if index not in held), key=sizes.__getitem__)
            length = len(documents[largest].tokens)
            rest_start[largest] = max(0, min(length - 1, length - (goal - total) + byte_level))
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
