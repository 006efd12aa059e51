"""The native half of kvscout: same results as the plain Python twins, faster.

Nothing but the module that pairs with a section below imports it:

* hashing: `kvscout_common.hashing`, which documents the functions; the twin is `hashing_reference`.
"""

from collections.abc import Sequence

__version__: str

# --- hashing ---------------------------------------------------------------------------------------

def block_hashes(
    token_ids: Sequence[int] | bytes | bytearray | memoryview,
    block_size: int,
    *,
    lora_name: str = "",
    cache_salt: str = "",
    mm_items: Sequence[tuple[str, int, int]] = (),
    eagle: bool = False,
) -> list[int]:
    """Local hashes of a prompt's complete blocks; `bytes` are read in place, other forms copied once."""

def block_hashes_packed(
    token_ids: Sequence[int] | bytes | bytearray | memoryview,
    block_size: int,
    *,
    lora_name: str = "",
    cache_salt: str = "",
    mm_items: Sequence[tuple[str, int, int]] = (),
    eagle: bool = False,
) -> bytes:
    """The same as little-endian u64s, without a Python integer per block."""

def sequence_hashes(local: Sequence[int] | bytes | bytearray | memoryview) -> list[int]:
    """Sequence hashes of a chain that begins at the prompt's first block."""

def extend_sequence(parent_sequence_hash: int | None, local: int) -> int:
    """Sequence hash of a block after its parent."""

def mm_hash(item_id: str) -> int:
    """Number of a multimodal item."""

def engine_hash(value: int | bytes) -> int:
    """An engine's block hash as u64."""

def block_seed(lora_name: str, cache_salt: str, first: bool) -> int:
    """Seed of a prompt's first block, or of every other one."""
