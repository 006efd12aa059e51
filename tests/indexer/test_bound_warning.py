"""Whose engines have room for more than their index may keep is told so."""

from __future__ import annotations

import pytest
from support.indexer_client import local_indexer

from kvscout_common.rpc.service_info import TenantWarning
from kvscout_common.shards import Shard
from kvscout_indexer.config import IndexerConfig


async def test_workers_with_room_for_more_than_the_bound_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with local_indexer(IndexerConfig(max_blocks=1_000)) as (client, indexer):
        await client.register(worker_id="a", total_kv_blocks=600)
        assert indexer.warnings() == []
        await client.register(worker_id="b", total_kv_blocks=300, dp_size=2)
        [warning] = indexer.warnings()
        assert isinstance(warning, TenantWarning)
        assert "1200 blocks" in warning.text
        assert "--shard" in warning.text
        assert warning.text in caplog.text
        await client.register(worker_id="b", total_kv_blocks=100, dp_size=2, update=True)
        assert indexer.warnings() == []


async def test_offload_tiers_count_as_room() -> None:
    async with local_indexer(IndexerConfig(max_blocks=1_000)) as (client, indexer):
        await client.register(worker_id="a", total_kv_blocks=600, labels={"offload_blocks": "5000"})
        [warning] = indexer.warnings()
        assert "5000 blocks" in str(warning)


@pytest.mark.parametrize("config", [IndexerConfig(max_blocks=100, shard=Shard(0, 1_000_003)), IndexerConfig()])
async def test_other_shards_do_not_count_and_without_a_bound_nothing_is_said(config: IndexerConfig) -> None:
    async with local_indexer(config) as (client, indexer):
        await client.register(total_kv_blocks=10**6)
        assert indexer.warnings() == []
