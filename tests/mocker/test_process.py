"""The life of a mocker process, run inside this one."""

from __future__ import annotations

import asyncio

import pytest

from kvscout_mocker.config import MockerConfig, config_from_flags
from kvscout_mocker.engine.engine import Engine, Step
from kvscout_mocker.main import main, run


def free_port_config(*arguments: str) -> MockerConfig:
    ports = ["--port", "0", "--events-port", "0", "--replay-port", "0"]
    with main.make_context("mocker", [*ports, *arguments]) as context:
        values = dict(context.params)
    values.pop("log_level")
    return config_from_flags(**values)


async def test_a_crashed_step_loop_ends_the_process_with_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(_: Engine) -> Step | None:
        raise RuntimeError("scheduler on fire")

    monkeypatch.setattr(Engine, "begin_step", crash)
    async with asyncio.timeout(20):
        assert await run(free_port_config("--dp-size", "2")) == 1
    assert "scheduler on fire" in caplog.text
