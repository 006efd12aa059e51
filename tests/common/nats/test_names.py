"""Names in NATS: anything can be a name, nothing collides, namespaces are apart."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscout_common.errors import InvalidArgument
from kvscout_common.nats.names import MAX_NAME_BYTES, NatsNames, decode_name, encode_name
from kvscout_common.worker import WorkerRank

NAMES = NatsNames("prod")
names = st.text(max_size=60).filter(lambda name: len(name.encode()) <= MAX_NAME_BYTES)


@given(names)
def test_every_name_becomes_one_token_and_comes_back(name: str) -> None:
    encoded = encode_name(name)
    assert re.fullmatch(r"[0-9A-V]+|-", encoded)
    assert decode_name(encoded) == name


@pytest.mark.parametrize("encoded", ["not base32", "0", "W0", "é", "VVVVVVVV"])
def test_what_encodes_no_name_is_refused(encoded: str) -> None:
    with pytest.raises(InvalidArgument):
        decode_name(encoded)


def test_a_name_too_long_for_a_subject_is_refused() -> None:
    encode_name("é" * 127)
    with pytest.raises(InvalidArgument, match="256 bytes"):
        encode_name("é" * 128)


@given(tenant=names, model=names, worker_id=names, rank=st.integers(0, 1023))
def test_a_subject_of_events_tells_whose_they_are(tenant: str, model: str, worker_id: str, rank: int) -> None:
    worker = WorkerRank(worker_id, rank)
    for subject in (NAMES.core_events(tenant, model, worker), NAMES.stream_events(tenant, model, worker)):
        *encoded, number = subject.split(".")[-4:]
        assert [*map(decode_name, encoded), int(number)] == [tenant, model, worker_id, rank]
    assert NAMES.stream_events(tenant, model, worker).startswith(NAMES.stream_subjects(tenant, model).removesuffix(">"))


@given(tenant=names.filter(bool), model=names.filter(bool))
def test_a_stream_tells_whose_events_it_has(tenant: str, model: str) -> None:
    assert NAMES.parse_stream(NAMES.stream(tenant, model)) == (tenant, model)
    assert NatsNames("other").parse_stream(NAMES.stream(tenant, model)) is None


@pytest.mark.parametrize("stream", ["", "KVSCOUT", "KV_kvscout-workers", NAMES.stream("t", "m") + "-1", "KVSCOUT-a-b"])
def test_other_streams_have_no_events(stream: str) -> None:
    assert NAMES.parse_stream(stream) is None


def test_namespaces_share_no_name() -> None:
    def everything(names: NatsNames) -> set[str]:
        worker = WorkerRank("w", 0)
        return {
            names.core_events("t", "m", worker),
            names.all_core_events,
            names.stream_events("t", "m", worker),
            names.stream_subjects("t", "m"),
            names.stream("t", "m"),
            names.recover("t", worker),
            names.scheduler("a", "*", ">"),
            names.workers_bucket,
            names.locks_bucket,
            names.snapshots_bucket("t", "m"),
        }

    assert len(everything(NAMES)) == 10
    for other in ("prod.", "", "PROD"):
        assert not everything(NAMES) & everything(NatsNames(other))


def test_a_worker_key_tells_tenant_and_worker() -> None:
    assert NAMES.parse_worker_key(NAMES.worker_key("a.b", "w:1")) == ("a.b", "w:1")
    for key in ("", "0", "a.b.c", "0.not base32"):
        with pytest.raises(InvalidArgument):
            NAMES.parse_worker_key(key)
