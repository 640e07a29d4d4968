"""Read and write the sorted key-value table (LevelDB's format) of a TensorFlow checkpoint's index.

A table file is a sequence of blocks and a footer. The footer points at an index block, whose values point at the data
blocks. Inside a block a key is stored as the length of the prefix it shares with the previous key, and the rest of its
bytes. Files may be hostile: lengths are checked before they are used, and allocations are bounded by the file's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import google_crc32c

from graphquant.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_MAGIC: Final = 0xDB4775248B80FB57.to_bytes(8, "little")
_FOOTER_SIZE: Final = 48
_TRAILER_SIZE: Final = 5
_NO_COMPRESSION: Final = 0
_SNAPPY: Final = 1
_MASK_DELTA: Final = 0xA282EAD8
_MAX_VARINT_BYTES: Final = 10
# A Snappy element of 3 bytes copies at most 64 bytes, so a larger declared length is invalid.
_MAX_SNAPPY_RATIO: Final = 64
# Keys share prefixes, so they may be larger than the file; real files are far below this ratio.
_MAX_KEY_RATIO: Final = 32
_FREE_KEY_BYTES: Final = 1 << 24
_BLOCK_SIZE: Final = 1 << 16  # a block is closed at that many bytes
_RESTART_INTERVAL: Final = 16  # entries between two restarts


def unmask_crc(masked: int) -> int:
    """Return the CRC-32C of a masked one. Files mask checksums, as they may be checksummed again."""
    rotated = (masked - _MASK_DELTA) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def mask_crc(crc: int) -> int:
    """Return a CRC-32C as it is stored: rotated and shifted."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def encode_varint(value: int) -> bytes:
    """Encode a number in base 128, the lowest digit first."""
    digits = bytearray()
    while value >= 0x80:  # noqa: PLR2004 - the continuation bit
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*digits, value))


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the base-128 number at `position` and the position after it.

    Raises:
        ModelError: The data ends inside the number, or the number does not fit in 64 bits.
    """
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(data):
            raise ModelError("a number is cut off")
        byte = data[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:  # noqa: PLR2004 - the continuation bit
            if value >= 1 << 64:
                break
            return value, position + index + 1
    raise ModelError("a number does not fit in 64 bits")


def read_table(data: bytes, *, source: str) -> dict[bytes, bytes]:
    """Return all keys and values of a table, in the order of the keys; `source` names the file in errors.

    Raises:
        ModelError: The data is not such a table, or is damaged.
    """
    try:
        return _read_entries(data)
    except ModelError as error:
        raise ModelError(f"{source} is not a readable checkpoint index: {error}.") from error


def write_table(entries: Mapping[bytes, bytes]) -> bytes:
    """Return the uncompressed table file of these keys and values."""
    data = bytearray()
    handles: dict[bytes, bytes] = {}
    block: dict[bytes, bytes] = {}
    size = 0
    for key in sorted(entries):
        block[key] = entries[key]
        size += len(key) + len(entries[key])
        if size >= _BLOCK_SIZE:
            handles[key] = _append_block(data, block)
            block, size = {}, 0
    if block:
        handles[next(reversed(block))] = _append_block(data, block)
    footer = _append_block(data, {}) + _append_block(data, handles)
    return bytes(data + footer.ljust(_FOOTER_SIZE - len(_MAGIC), b"\0") + _MAGIC)


def _append_block(data: bytearray, entries: Mapping[bytes, bytes]) -> bytes:
    """Append a block with its trailer and return its handle."""
    block = bytearray()
    restarts = []
    for number, (key, value) in enumerate(entries.items()):
        if number % _RESTART_INTERVAL == 0:
            restarts.append(len(block))
        block += encode_varint(0) + encode_varint(len(key)) + encode_varint(len(value)) + key + value
    for restart in restarts or [0]:
        block += restart.to_bytes(4, "little")
    block += len(restarts or [0]).to_bytes(4, "little")
    handle = encode_varint(len(data)) + encode_varint(len(block))
    trailer = mask_crc(google_crc32c.value(bytes((*block, _NO_COMPRESSION))))
    data += block + bytes([_NO_COMPRESSION]) + trailer.to_bytes(4, "little")
    return handle


def _read_entries(data: bytes) -> dict[bytes, bytes]:
    if len(data) < _FOOTER_SIZE or not data.endswith(_MAGIC):
        raise ModelError("it does not end like a table file, it may be cut off")
    footer = data[-_FOOTER_SIZE:]
    _, _, position = _read_handle(footer, 0)  # the metadata block, which is empty in checkpoints
    offset, size, _ = _read_handle(footer, position)
    key_budget = _FREE_KEY_BYTES + _MAX_KEY_RATIO * len(data)
    entries: dict[bytes, bytes] = {}
    previous_key: bytes | None = None
    for _, handle in _iter_block_entries(_read_block(data, offset, size)):
        offset, size, _ = _read_handle(handle, 0)
        for key, value in _iter_block_entries(_read_block(data, offset, size)):
            if previous_key is not None and key <= previous_key:
                raise ModelError("its keys are out of order")
            key_budget -= len(key)
            if key_budget < 0:
                raise ModelError("its keys are larger than a file of its size can need")
            entries[key] = value
            previous_key = key
    return entries


def _read_handle(data: bytes, position: int) -> tuple[int, int, int]:
    """Return offset and size of a block, and the position after the two numbers."""
    offset, position = read_varint(data, position)
    size, position = read_varint(data, position)
    return offset, size, position


def _read_block(data: bytes, offset: int, size: int) -> bytes:
    """Return the contents of a block, checked against its trailer and decompressed."""
    end = offset + size
    if end + _TRAILER_SIZE > len(data) - _FOOTER_SIZE:
        raise ModelError("a block lies outside the file")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER_SIZE], "little")
    if google_crc32c.value(data[offset : end + 1]) != unmask_crc(stored):
        raise ModelError(f"the checksum of the block at byte {offset} does not match, the file is damaged")
    compression = data[end]
    if compression == _NO_COMPRESSION:
        return data[offset:end]
    if compression == _SNAPPY:
        return _decompress_snappy(data[offset:end])
    raise ModelError(f"compression {compression} is not supported")


def _iter_block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a block. Its tail, the restart positions, only serves random access."""
    if len(block) < 4:  # noqa: PLR2004 - the size of the number of restarts
        raise ModelError("a block is too short")
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    if end < 0:
        raise ModelError("a block has more restarts than bytes")
    position = 0
    key = b""
    while position < end:
        shared, position = read_varint(block, position)
        unshared, position = read_varint(block, position)
        length, position = read_varint(block, position)
        if shared > len(key) or position + unshared + length > end:
            raise ModelError("an entry reaches outside its block")
        key = key[:shared] + block[position : position + unshared]
        position += unshared
        yield key, block[position : position + length]
        position += length


def _decompress_snappy(data: bytes) -> bytes:
    """Decompress Snappy's raw format: literals, and copies of earlier output."""
    size, position = read_varint(data, 0)
    if size > _MAX_SNAPPY_RATIO * len(data):
        raise ModelError("a compressed block claims an impossible size")
    output = bytearray()
    while position < len(data) and len(output) <= size:
        tag, kind, position = data[position] >> 2, data[position] & 3, position + 1
        if kind == 0:  # a literal; lengths above 60 follow in 1 to 4 bytes
            length_bytes = max(0, tag - 59)
            length = (int.from_bytes(data[position : position + length_bytes], "little") if length_bytes else tag) + 1
            position += length_bytes
            if position + length > len(data):
                raise ModelError("a compressed block is cut off")
            output += data[position : position + length]
            position += length
            continue
        width = (0, 1, 2, 4)[kind]
        distance = int.from_bytes(data[position : position + width], "little")
        position += width
        length = tag + 1
        if kind == 1:  # a short copy stores the upper bits of the distance next to its length
            distance |= tag >> 3 << 8
            length = (tag & 7) + 4
        if not 0 < distance <= len(output) or position > len(data):
            raise ModelError("a compressed block copies from outside itself")
        chunk = bytes(output[-distance:][:length])
        output += (chunk * (length // len(chunk) + 1))[:length]  # a copy longer than its distance repeats itself
    if len(output) != size:
        raise ModelError("a compressed block has another size than it claims")
    return bytes(output)
