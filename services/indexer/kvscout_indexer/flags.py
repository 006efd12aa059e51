"""Flags of the indexer, besides those of every server; `IndexerConfig.from_flags` reads them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvscout_common.settings.flags import PERFORMANCE, event_endpoints_flag, flag, flag_group

F = TypeVar("F", bound=Callable[..., Any])


def indexer_flags() -> Callable[[F], F]:
    """Return the flags."""
    return flag_group(
        flag(
            "--router-ttl",
            default=120.0,
            type=click.FloatRange(min=0, min_open=True),
            help="Lifetime of predicted blocks after lost history; with --no-kv-events, of the blocks of routed "
            "prompts.",
        ),
        flag(
            "--no-kv-events",
            is_flag=True,
            help="Read no events: assume for --router-ttl that workers hold the prompts routed to them.",
        ),
        flag(
            "--router-predicted-ttl",
            default=None,
            type=click.FloatRange(min=0, min_open=True),
            help="Lifetime of predictions from routing, in addition to events; unset = off.",
        ),
        flag("--shard", default="0/1", help="I/N: index only the workers of shard I (from 0) of N."),
        flag(
            "--ingest-threads",
            default=None,
            type=click.IntRange(1, 64),
            section=PERFORMANCE,
            help="Threads that read engines' ZMQ sockets, each for its own ranks; unset = half the cores, at most 4.",
        ),
        flag(
            "--max-blocks",
            default=0,
            type=click.IntRange(min=0),
            section=PERFORMANCE,
            help="Maximum number of held blocks per index; 0 = none. Above it the least recently used prefixes are "
            "dropped until an engine uses them again: overlaps may then be too short, never too long.",
        ),
        flag(
            "--router-max-tree-size",
            default=1_048_576,
            type=click.IntRange(min=1),
            section=PERFORMANCE,
            help="Maximum number of predicted blocks per index.",
        ),
        flag(
            "--router-prune-target-ratio",
            default=0.8,
            type=click.FloatRange(0, 1, min_open=True),
            section=PERFORMANCE,
            help="Share of --router-max-tree-size left after pruning.",
        ),
        flag(
            "--peers",
            multiple=True,
            help="host:port of another indexer that can supply the state of newly read workers; repeat for several.",
        ),
        flag(
            "--stream-max-age",
            default=3600.0,
            type=click.FloatRange(min=1),
            help="Retention of events in JetStream streams created by this indexer.",
        ),
        flag(
            "--router-snapshot-threshold",
            default=1_000_000,
            type=click.IntRange(min=1),
            help="JetStream messages between two snapshots of a model's indexes; earlier if events get old.",
        ),
        flag(
            "--router-reset-states",
            is_flag=True,
            help="At start, clear the JetStream streams, snapshots and consumers of the namespace.",
        ),
        event_endpoints_flag(),
    )
