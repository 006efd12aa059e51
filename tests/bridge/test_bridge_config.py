"""What the flags of a bridge are refused for, before anything runs."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from kvscout_bridge.main import main

ENGINE = ("--worker-id", "w", "--model", "m", "--block-size", "16")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--event-endpoint", "tcp://*:5557"), "event_endpoints[0].endpoint: tcp://*:5557 is what the engine binds"),
        (("--event-endpoint", "tcp://*:5557", "--bind-events"), "--allow-event-endpoints bind"),
        (("--event-endpoint", "ipc:///run/kv"), "--allow-event-endpoints ipc"),
        (
            ("--event-endpoint", "tcp://h:1", "--replay-endpoint", "tcp://*:2"),
            "event_endpoints[0].replay_endpoint: tcp://*:2 is what the engine binds",
        ),
        (("--event-endpoint", "tcp://h:1", "--http-endpoint", "http://u:p@h"), "http_endpoint: must not name a user"),
        (("--event-endpoint", "tcp://h:1", "--advertise", "nowhere"), "advertise: has no host"),
    ],
)
def test_addresses_that_are_wrong_or_not_allowed_are_refused(flags: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(main, [*ENGINE, *flags])
    assert result.exit_code == 2
    assert says in result.output
