"""The link to NATS: never waited for, made again for ever, hooks after each connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import click
import nats.errors
import pytest
from click.testing import CliRunner
from nats.aio.msg import Msg
from support.nats_server import NatsServer, nats_server
from support.processes import eventually

from kvscout_common.errors import ConfigError, Unavailable
from kvscout_common.nats import link as nats_link
from kvscout_common.nats.config import NatsConfig, nats_flags
from kvscout_common.nats.link import NatsLink

GIVEN = {"namespace": "n", "nats_credentials": None, "nats_ca": None, "nats_replicas": 1}


@asynccontextmanager
async def running_link(link: NatsLink) -> AsyncIterator[NatsLink]:
    task = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await link.close()


def into(received: asyncio.Queue[bytes]) -> Callable[[Msg], Awaitable[None]]:
    async def hear(message: Msg) -> None:
        received.put_nowait(message.data)

    return hear


async def until_usable(link: NatsLink) -> None:
    await eventually(lambda: link.connected and not link.problem, what="a usable link")


async def until_lost(link: NatsLink) -> None:
    await eventually(lambda: not link.connected and bool(link.problem), what="a lost link")


def test_no_server_means_no_nats_and_several_may_stand_in_one_value() -> None:
    assert NatsConfig.from_flags({**GIVEN, "nats_server": ()}) is None
    config = NatsConfig.from_flags({**GIVEN, "nats_server": ("nats://a:1,tls://b:2", "nats://c:3")})
    assert config is not None
    assert config.servers == ("nats://a:1", "tls://b:2", "nats://c:3")
    assert config.names.namespace == "n"


def test_wrong_values_are_refused_by_the_name_of_their_flag() -> None:
    with pytest.raises(ConfigError) as wrong_url:
        NatsConfig.from_flags({**GIVEN, "nats_server": ("http://a:1",)})
    with pytest.raises(ConfigError) as no_namespace:
        NatsConfig.from_flags({**GIVEN, "namespace": "", "nats_server": ()})
    assert (wrong_url.value.field, no_namespace.value.field) == ("nats_server", "namespace")


def test_the_environment_of_other_nats_tools_is_honoured(tmp_path: Path) -> None:
    seen: list[NatsConfig | None] = []

    @click.command()
    @nats_flags()
    def command(**values: object) -> None:
        seen.append(NatsConfig.from_flags(values))

    for environment in ({}, {"NATS_SERVER": "nats://a:1"}, {"NATS_SERVER": "nats://a:1", "KVSCOUT_NATS_SERVER": ""}):
        assert CliRunner().invoke(command, env={"NATS_SERVER": None, **environment}).exit_code == 0
    assert [config and config.servers for config in seen] == [None, ("nats://a:1",), ("nats://a:1",)]


async def test_the_log_names_the_server_and_not_the_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with nats_server(extra_flags=("--user", "kvscout", "--pass", "k0123")) as server:
        link = NatsLink(NatsConfig((server.url.replace("//", "//kvscout:k0123@"),)), "test")
        async with running_link(link):
            await until_usable(link)
    assert f"connected to NATS at 127.0.0.1:{server.port}" in caplog.text
    assert "k0123" not in caplog.text


async def test_hooks_run_after_each_connection_and_subscriptions_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nats_server() as server:
        link = NatsLink(NatsConfig((server.url,)), "test")
        ran: list[str] = []
        failures = [nats.errors.TimeoutError(), None, None]

        async def first() -> None:
            ran.append("first")
            if (failure := failures.pop(0)) is not None:
                raise failure

        async def second() -> None:
            ran.append("second")

        link.on_connected(first)
        link.on_connected(second)
        monkeypatch.setattr(nats_link, "FIRST_SECONDS", 0.05)
        with pytest.raises(Unavailable, match="not connected"):
            await link.require()
        async with running_link(link):
            await until_usable(link)
            assert ran == ["first", "first", "second"]
            received: asyncio.Queue[bytes] = asyncio.Queue()
            await (await link.require()).subscribe("s", cb=into(received))
            await server.kill()
            await until_lost(link)
            with pytest.raises(Unavailable, match="NATS"):
                await link.require()
            await server.start()
            await until_usable(link)
            assert ran[3:] == ["first", "second"]
            await (await link.require()).publish("s", b"again")
            async with asyncio.timeout(30):
                assert await received.get() == b"again"


async def test_a_service_starts_before_its_nats() -> None:
    async with nats_server() as server:
        await server.kill()
        link = NatsLink(NatsConfig((server.url,)), "test")
        async with running_link(link):

            async def explained() -> bool:
                return "Connect" in link.problem or "refused" in link.problem

            await eventually(explained, what="a problem that says why")
            await server.start()
            await until_usable(link)


async def test_a_connection_that_the_server_ends_for_good_is_an_error_of_the_process() -> None:
    async with nats_server() as server:
        link = NatsLink(NatsConfig((server.url,)), "test")
        task = asyncio.create_task(link.run())
        await until_usable(link)
        await (await link.require()).close()
        with pytest.raises(Unavailable, match="permanently"):
            async with asyncio.timeout(30):
                await task


async def test_a_link_closes_although_its_connection_breaks_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nats_server() as server:
        link = NatsLink(NatsConfig((server.url,)), "closing")
        async with running_link(link):
            await until_usable(link)
            client = await link.require()
            close = client.close

            async def breaks() -> None:
                await close()
                # What uvloop says where the server has gone between the client's last look and its last words.
                raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

            monkeypatch.setattr(client, "close", breaks)
            await link.close()
            assert client.is_closed


async def test_what_was_published_is_sent_before_the_link_closes(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    try:
        config = NatsConfig((server.url,))
        listener, speaker = NatsLink(config, "listener"), NatsLink(config, "speaker")
        async with running_link(listener):
            await until_usable(listener)
            received: asyncio.Queue[bytes] = asyncio.Queue()
            await (await listener.require()).subscribe("s", cb=into(received))
            await (await listener.require()).flush()
            async with running_link(speaker):
                await until_usable(speaker)
                await (await speaker.require()).publish("s", b"last words")
            async with asyncio.timeout(30):
                assert await received.get() == b"last words"
    finally:
        await server.kill()


class Panic(BaseException):
    """As the native extension's, which is no Exception."""


@pytest.mark.parametrize("defect", [KeyError("no such claim"), Panic("index out of range")], ids=["error", "panic"])
async def test_a_callback_with_a_defect_ends_the_link_with_it(defect: BaseException) -> None:
    async def fail(message: Msg) -> None:
        raise defect

    async with nats_server() as server:
        link = NatsLink(NatsConfig((server.url,)), "test")
        running = asyncio.create_task(link.run())
        await until_usable(link)
        await link.client.subscribe("defect", cb=fail)
        await link.client.publish("defect", b"")
        async with asyncio.timeout(30):
            done, _ = await asyncio.wait([running])
        assert next(iter(done)).exception() is defect
        await link.close()


async def test_a_callback_that_meets_trouble_of_the_connection_goes_on() -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(message: Msg) -> None:
        received.put_nowait(message.data)
        if message.data == b"first":
            raise nats.errors.ConnectionClosedError

    async with nats_server() as server, running_link(NatsLink(NatsConfig((server.url,)), "test")) as link:
        await until_usable(link)
        await link.client.subscribe("trouble", cb=answer)
        for payload in (b"first", b"second"):
            await link.client.publish("trouble", payload)
        async with asyncio.timeout(30):
            assert [await received.get(), await received.get()] == [b"first", b"second"]


@pytest.mark.parametrize(
    ("version", "too_old"), [("2.9.25", True), ("1.4.1", True), ("2.10.0", False), ("2.11.0-dev", False), ("", False)]
)
def test_a_server_is_too_old_by_its_version(version: str, too_old: bool) -> None:
    assert nats_link.is_too_old(version) is too_old


async def test_a_server_that_is_too_old_is_a_problem_that_names_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_link, "OLDEST_SERVER", (1000, 7))
    hooked: list[bool] = []

    async def hook() -> None:
        hooked.append(True)

    async with nats_server() as server, running_link(NatsLink(NatsConfig((server.url,)), "test")) as link:
        link.on_connected(hook)
        await eventually(lambda: "is too old: 1000.7 or later is needed" in link.problem)
        assert link.problem.startswith("NATS server 2.")
        assert not hooked
