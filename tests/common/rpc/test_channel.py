"""What callers read of calls that fail."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from kvscout_common.errors import Unavailable
from kvscout_common.rpc.channel import to_error


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.5:7050: Failed to connect to remote "
            "host: Connection refused",
            "cannot connect to 10.0.0.5:7050: Connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:7050: Failed to connect to "
            "remote host: connect: Connection refused (111)",
            "cannot connect to [::1]:7050: connect: Connection refused (111)",
        ),
        ("the queue is full", "the queue is full"),
    ],
)
def test_where_nothing_listens_that_is_said_without_the_words_of_grpc(details: str, expected: str) -> None:
    error = to_error(AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details))
    assert isinstance(error, Unavailable)
    assert str(error) == expected
