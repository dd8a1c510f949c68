"""Small whole numbers in as few bits as they need, and reading several of them with one look-up.

Codes of `bits` bits are joined into indices of up to 12 bits, and these laid end to end into bytes.
Reading an index and looking up the vector of its codes' levels costs a gather for several numbers at
once; a gather a number took three times as long on a CPU.

The order within a vector is a matter of this file alone: index j of period i stands in plane j.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

JOINED = {1: 8, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2, 7: 1, 8: 1}  # bits -> codes an index
PERIOD = 8  # codes; vectors must be multiples of it


@dataclass(frozen=True)
class BitPacking:
    """Codes of `bits` bits (1 to 8)."""

    bits: int

    @property
    def joined(self) -> int:
        """Codes an index."""
        return JOINED[self.bits]

    @property
    def width(self) -> int:
        """Bits an index."""
        return self.bits * self.joined

    @property
    def planes(self) -> int:
        """Indices in a period, which is a whole number of bytes."""
        return 8 // math.gcd(self.width, 8)

    @property
    def octets(self) -> int:
        """Bytes in a period."""
        return self.width // math.gcd(self.width, 8)

    def pack(self, codes: mx.array) -> mx.array:
        """uint8 (…, D bits / 8) of codes uint8 (…, D)."""
        parts = mx.unflatten(codes.astype(mx.uint32), -1, (self.planes, -1, self.joined))
        shifts = mx.array(self.bits * np.arange(self.joined), mx.uint32)
        index = (parts << shifts).sum(-1)  # (…, planes, periods)
        octets = []
        for octet in range(self.octets):
            bits = mx.zeros(index.shape[:-2] + index.shape[-1:], mx.uint32)
            for plane in range(self.planes):
                away = plane * self.width - 8 * octet  # where the index begins, from this byte on
                if -self.width < away < 8:
                    part = index[..., plane, :]
                    bits = bits | (part << away if away >= 0 else part >> -away)
            octets.append((bits & 255).astype(mx.uint8))
        return mx.stack(octets, axis=-2).flatten(-2)

    def indices(self, packed: mx.array) -> mx.array:
        """uint16 (…, D / joined), or uint8 where that is what is stored."""
        if self.width == 8:
            return packed
        octets = mx.unflatten(packed, -1, (self.octets, -1))
        planes = [self._plane(octets, plane) for plane in range(self.planes)]
        return mx.concatenate(planes, axis=-1)

    def _plane(self, octets: mx.array, plane: int) -> mx.array:
        at, skip = divmod(plane * self.width, 8)
        value = octets[..., at, :].astype(mx.uint16) >> skip
        for more in range(1, -(-(skip + self.width) // 8)):
            value = value | (octets[..., at + more, :].astype(mx.uint16) << (8 * more - skip))
        return value & (2**self.width - 1)

    def table(self, levels: np.ndarray) -> mx.array:
        """float32 (2^width, joined): the levels of an index's codes."""
        index = np.arange(2**self.width)[:, None] >> (self.bits * np.arange(self.joined))
        return mx.array(levels[index % 2**self.bits].astype(np.float32))

    @cached_property
    def most(self) -> int:
        return int(2**self.bits - 1)
