"""CRC-32C, with which btrfs guards its blocks: for tests that write a block as an old mkfs would have."""

from __future__ import annotations

_POLYNOMIAL = 0x82F63B78


def _entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = tuple(_entry(value) for value in range(256))


def crc32c(data: bytes) -> int:
    """Return the checksum of `data`, as btrfs stores it in the first four bytes of a block (little endian)."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF
