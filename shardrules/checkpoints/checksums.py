"""Checksums of the tensors and the headers of a file, as text in its own header.

A tensor has one of 24 bits for each block of its bytes. So a process that reads a slice checks it by the blocks that
the slice lies in, and each process writes those of what it has. A block is a row of 8-byte words: the sum of their
products with odd numbers changes with every single bit, and is as fast as memory. What is left at the end of a tensor
has a CRC-32.

The text is `crc=` and the CRC-32 of all headers, this text included; `block=` and the bytes of a block; `sums=` and
four characters for each block, in the order of the file. Its length follows from the shapes alone.
"""

import base64
import functools
import re
import zlib
from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np

KEY = "shardrules.checksums"
"""The name of the text in the metadata of a safetensors file."""

DAMAGED = (
    "copy it again, or load another checkpoint; verify=False loads it as it is, also after another program changed it"
)
"""The remedy for a file that differs from its checksums."""

UNKNOWN = 2**32 - 1
"""In place of a checksum that is not known yet."""

_LEAST_BLOCK = 4096
"""A page, which systems read whole: checking a slice reads no more from a disk."""

_MOST_BLOCKS = 2**22
"""Beyond it, blocks become larger: the text takes 16 MB, and headers of safetensors may have 100 MB."""

SUM_CHARS = 4
MOST_TEXT_BYTES = 100 * 10**6
"""The limit of the format of safetensors for headers, and more than texts of checksums have."""
_EMPTY = b"."
_TEXT = re.compile(r"crc=([0-9a-f]{8}) block=([0-9]{8}) sums=([A-Za-z0-9+/]*)")
_FOLD = np.uint64(0x9E3779B97F4A7C15)
"""The golden ratio, in 64 bits: the upper 24 of the product depend on all bits of a sum."""


@final
@attrs.frozen(eq=False)
class TensorSums:
    """The checksums of the blocks of one tensor."""

    block: int
    values: np.ndarray

    def damage(self, offset: int, data: np.ndarray) -> list[int]:
        """Returns the indices of the blocks that differ; `data` are whole blocks, of which the first is at `offset`."""
        first = offset // self.block
        actual = block_sums(data, self.block)
        return (first + np.flatnonzero(actual != self.values[first : first + len(actual)])).tolist()


def block_count(nbytes: int, block: int) -> int:
    """Returns the number of blocks of a tensor; the last may be shorter."""
    return -(-nbytes // block)


def block_sums(data: np.ndarray, block: int) -> np.ndarray:
    """Returns the checksum of each block of some bytes."""
    whole = len(data) // block
    sums = np.empty(block_count(len(data), block), np.uint32)
    if whole:
        words = data[: whole * block].view("<u8").reshape(whole, block // 8)
        sums[:whole] = np.einsum("ij,j->i", words, _weights(block // 8)) * _FOLD >> np.uint64(40)
    if whole < len(sums):
        sums[whole] = zlib.crc32(data[whole * block :].data) & 0xFFFFFF
    return sums


@functools.lru_cache
def _weights(count: int) -> np.ndarray:
    """Odd numbers without a pattern: those of the generator SplitMix64."""
    state = np.arange(1, count + 1, dtype=np.uint64) * _FOLD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    weights = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    weights.flags.writeable = False
    return weights


def blank_text(tensor_bytes: Sequence[int]) -> tuple[int, str]:
    """Returns the bytes of a block for tensors of these sizes, and the text before any checksum is known."""
    block = _LEAST_BLOCK
    while sum(tensor_bytes) > block * _MOST_BLOCKS:
        block *= 2
    count = sum(block_count(size, block) for size in tensor_bytes)
    return block, f"crc={0:08x} block={block:08} sums={_EMPTY.decode() * (SUM_CHARS * count)}"


def sums_text(values: np.ndarray) -> bytes:
    """Returns what stands behind `sums=` for these checksums."""
    return base64.b64encode(values.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 1:].tobytes())


def unknown_sums(text: bytes) -> list[int]:
    """Returns which checksums are still missing behind `sums=`."""
    return np.flatnonzero(np.frombuffer(text, np.uint8)[::SUM_CHARS] == ord(_EMPTY)).tolist()


def sealed(headers: Sequence[bytes]) -> tuple[int, bytes]:
    """Returns where the CRC stands in the last header, and its text; the CRC there must still be zero."""
    crc = functools.reduce(lambda crc, header: zlib.crc32(header, crc), headers, 0)
    return headers[-1].index(b"crc=") + 4, b"%08x" % crc


def read_text(text: str, headers: Sequence[bytes], nbytes: Sequence[int]) -> list[TensorSums] | None:
    """Returns the checksums of tensors of so many bytes, in the order of the file; `None` where the text is damaged.

    `headers` are all headers of the file, of which the last holds the text.
    """
    parts = _TEXT.fullmatch(text)
    block = int(parts[2]) if parts else 0
    if parts is None or not block or block % _LEAST_BLOCK:
        return None
    *others, last = headers
    # The sum of the headers was taken before it was written into them, with zeros in its place.
    start = last.find(text.encode()) + 4
    blank = b"%s%08d%s" % (last[:start], 0, last[start + 8 :])
    counts = [block_count(size, block) for size in nbytes]
    if sealed([*others, blank])[1].decode() != parts[1] or len(parts[3]) != SUM_CHARS * sum(counts):
        return None
    # Four characters of base64 are three bytes, the 24 bits of a sum.
    triples = np.frombuffer(base64.b64decode(parts[3]), np.uint8).reshape(-1, 3).astype(np.uint32)
    values = triples[:, 0] << 16 | triples[:, 1] << 8 | triples[:, 2]
    ends = np.cumsum(counts).tolist()
    return [TensorSums(block, values[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def is_text(value: Any) -> bool:
    """Returns whether something is such a text: so a damaged name of it is noticed."""
    return isinstance(value, str) and _TEXT.fullmatch(value) is not None
