"""Which workers a share of a fleet's indexers has: a function of the worker's name alone, the same in every process.

shard of a worker = XXH3_64(utf8(tenant) ‖ 0x00 ‖ utf8(worker_id), seed 0) mod N
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvscout_common.errors import ConfigError

MAX_SHARDS = 1024
_SHARD = re.compile(r"(\d{1,4})/(\d{1,4})", re.ASCII)


def shard_of(tenant: str, worker_id: str, count: int) -> int:
    """Return the shard that a worker belongs to, 0 .. count - 1."""
    if count == 1:
        return 0
    return xxh3_64_intdigest(b"\0".join((tenant.encode(), worker_id.encode()))) % count


@dataclass(frozen=True, slots=True)
class Shard:
    """One of N shares of the workers."""

    index: int
    """0 .. count - 1."""
    count: int

    @classmethod
    def parse(cls, text: str, *, flag: str) -> Shard:
        """Read "I/N".

        Raises:
            ConfigError: It is none; names the flag.
        """
        match = _SHARD.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not I/N, such as 0/2", field=flag)
        shard = cls(int(match[1]), int(match[2]))
        if not 1 <= shard.count <= MAX_SHARDS:
            raise ConfigError(f"{text!r}: the number of shards must be between 1 and {MAX_SHARDS}", field=flag)
        if shard.index >= shard.count:
            raise ConfigError(f"{text!r}: shards are numbered from 0, the last is {shard.count - 1}", field=flag)
        return shard

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, tenant: str, worker_id: str) -> bool:
        """Return whether a worker belongs to it."""
        return shard_of(tenant, worker_id, self.count) == self.index


WHOLE = Shard(0, 1)
"""Every worker."""
