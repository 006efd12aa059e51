"""What the indexer can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvscout_common.config import ServerConfig


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Configuration of one indexer process."""

    server: ServerConfig = field(default_factory=ServerConfig)
    max_blocks: int = 0
    """Bound of each block index, in held blocks; 0 = none."""
    router_ttl_seconds: float = 120.0
    """How long blocks whose history was lost stay predicted."""
    max_predicted_blocks: int = 1_048_576
    """Predictions kept in each index."""
    prune_target_ratio: float = 0.8
    """Share of `max_predicted_blocks` that is left after pruning."""
