"""Batches by position: the order of sequences, who reads which rows, reading ahead, and the bigram baseline.

Nothing here is state. Which sequences a step reads follows from (seed, number of sequences consumed); which rows of the
step a rank reads follows from its data-parallel coordinate. So a resumed run, another mesh, or a second rank of the same
coordinate reads the same tokens by computing, not by remembering.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from dtengine.corpus import CHUNK, Sequences
from dtengine.random import MASK, scramble

IGNORE = -100  # target that is not counted

T = TypeVar("T")

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
    keys = scramble(scramble(np.array([seed & MASK], np.uint64)) ^ scramble(epochs))

    def permute(x: np.ndarray, key: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for turn in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (scramble(scramble(key + np.uint64(turn)) ^ right) & mask)
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
    """Read one coordinate's batches of `limit` held-out sequences that are spread evenly over all of them.

    Over all coordinates each of them comes exactly once; `rows` holds its place among them. Every coordinate yields the
    same number of batches, and rows past the limit are padding of weight 0, so sums of loss and count need no correction.

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
    ids = spread(limit, sequences.count)
    numbers = (first + start for start in range(0, limit, stride))
    return (_batch(sequences, some, some < limit, ids[np.minimum(some, limit - 1)]) for some in numbers)


def spread(limit: int, count: int) -> np.ndarray:
    """Return `limit` different numbers below `count`, [limit] int64: evenly spaced, since neighbours share a document."""
    return np.arange(limit, dtype=np.int64) * count // limit


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
    places = scramble(np.arange(len(tokens), dtype=np.uint64))
    return int(scramble(tokens ^ places).sum(dtype=np.uint64).astype(np.int64))


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
            except BaseException as error:
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
    for pairs in _pairs(train, last, vocab, max(CHUNK, len(counts))):  # a chunk costs at least one pass over the table
        counts += np.bincount(pairs, minlength=len(counts))
    counts = counts.reshape(vocab, vocab)
    unigram = np.bincount(train.span(0, 1), minlength=vocab) + counts.sum(axis=0) + 1.0
    unigram /= unigram.sum()
    follows, kinds = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
    total = 0.0
    ids = spread(limit, heldout.count)
    for some in np.array_split(ids, -(-limit * heldout.seq // CHUNK)):
        windows = heldout.read(some)
        before, after = windows[:, :-1].ravel(), windows[:, 1:].ravel()
        weight = np.maximum(kinds[before], 1)  # never seen: then the bigram adds nothing and the unigram is all of it
        total -= np.log((counts[before, after] + weight * unigram[after]) / (follows[before] + weight)).sum()
    return float(total / (limit * heldout.seq))


def _pairs(sequences: Sequences, number: int, vocab: int, chunk: int) -> Iterator[np.ndarray]:
    """Yield the first `number` pairs of neighbours of a stream, in chunks of [n] int64: before * vocab + after."""
    for start in range(0, number, chunk):
        tokens = sequences.span(start, min(start + chunk, number) + 1)
        yield tokens[:-1] * vocab + tokens[1:]
