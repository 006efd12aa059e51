"""Fields that are written and found without their message are what protobuf writes and reads."""

from random import Random

import pytest

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, types_pb2
from kvscout_common.transport.wire_fields import bytes_field, bytes_of_field, fields_of, number_field, varint


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**32, 2**64 - 1])
def test_numbers_are_as_protobuf_has_them(value: int) -> None:
    expected = scheduler_pb2.LifecycleOperation(id=value).SerializeToString()
    assert number_field(1, value) == (expected or b"\x08\x00")
    assert scheduler_pb2.LifecycleOperation.FromString(number_field(1, value)).id == value
    assert varint(value)[-1] < 0x80


def test_fields_behind_a_message_are_part_of_it() -> None:
    hashes = b"".join(number.to_bytes(8, "little") for number in (1, 2, 2**64 - 1))
    made = indexer_pb2.FindMatchesRequest(model="m").SerializeToString() + bytes_field(5, hashes) + number_field(11, 7)
    read = indexer_pb2.FindMatchesRequest.FromString(made)
    assert (read.model, list(read.block_hashes), read.id) == ("m", [1, 2, 2**64 - 1], 7)


def test_of_a_number_that_comes_twice_the_last_one_counts() -> None:
    made = number_field(1, 5) + number_field(1, 6)
    assert scheduler_pb2.LifecycleOperation.FromString(made).id == 6


@pytest.mark.parametrize("seed", range(20))
def test_the_bytes_of_a_field_are_found_among_all_kinds_of_others(seed: int) -> None:
    random = Random(seed)
    request = gateway_pb2.RouteRequest(
        model="m" * random.randrange(300),
        token_ids=[random.getrandbits(32) for _ in range(random.choice((0, 1, 31, 32, 4000)))],
        attempt_id=random.getrandbits(64),
        priority=-random.randrange(2),
        router_config_override=types_pb2.RouterConfigOverride(router_temperature=random.random()),
        required_labels={"zone": "a"},
    )
    packed = b"".join(token.to_bytes(4, "little") for token in request.token_ids)
    assert bytes_of_field(request.SerializeToString(), 3) == packed, f"seed {seed}"


def test_every_field_is_told_as_it_stands_there() -> None:
    message = number_field(1, 2**64 - 1) + bytes_field(2, b"ab") + number_field(1, 0) + bytes((3 << 3 | 5, 1, 2, 3, 4))
    assert list(fields_of(message)) == [(1, 2**64 - 1), (2, b"ab"), (1, 0), (3, bytes((1, 2, 3, 4)))]


@pytest.mark.parametrize(
    "message",
    [b"\x08", b"\x08\xff", b"\x12\x05ab", b"\x0d\x01", b"\x09\x01", b"\x0b", b"\x08" + b"\xff" * 10 + b"\x01"],
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut short|no varint|a group"):
        list(fields_of(message))
