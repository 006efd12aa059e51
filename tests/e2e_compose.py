"""`make e2e-compose`: compose.yaml on a Docker engine, under load through both fronts, killed in parts, and upgraded.

It builds the image, starts everything, and asks both gateways for completions all the time, as clients of two gateways
do: one that is not reached, or breaks off, is left for the other one. An indexer, a scheduler and a gateway are killed
and brought back; then each service is replaced by a new image, one at a time. No request may fail, and none may need
the other gateway but where a gateway itself was struck.

`COMPOSE` is the program, such as `docker-compose`; else `docker compose`, else that. `E2E_IMAGE` is tried instead of
one that is built. Where no registry can be reached the base image is made by debootstrap, the wheels by this machine.
Where no Docker engine answers it is skipped, and says so; where anything else is missing it fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
from support.free_ports import free_ports

from kvscout_cli.embedded_nats import server_binary
from kvscout_client import Router, StopConditions
from kvscout_common.errors import DeadlineExceeded, Unavailable

ROOT = Path(__file__).parents[1]
SEED = int(os.environ.get("E2E_SEED", random.SystemRandom().randrange(2**32)))
MODELS = ("mock-model", "mock-disagg")
HEALTHY_SECONDS = 300.0
BRIDGES = ("bridge", "bridge-prefill", "bridge-decode")
UPGRADED = ("indexer-1", "indexer-2", "scheduler-1", "scheduler-2", *BRIDGES, "gateway-1", "gateway-2")
"""In this order: who is called before who calls."""
BASE, NATS = (
    re.search(rf"{name}:-([^}}]+)}}", (ROOT / "compose.yaml").read_text())[1]  # type: ignore[index]
    for name in ("BASE_IMAGE", "NATS_IMAGE")
)
"""Those that compose.yaml names."""
NEXT_IMAGE = "kvscout:e2e-next"
STAND_IN = "kvscout-e2e-base:bookworm"
STAND_IN_NATS = "kvscout-e2e-nats:bookworm"
REQUEST_SECONDS = 60.0
SENDERS = 4
BUILDX_SINCE = 23
"""Docker's own command has BuildKit in itself before."""


class Skipped(Exception):
    """There is no Docker engine here."""


class Failed(Exception):
    """What is missing beside a Docker engine that answers."""


def run(*command: str, environment: Mapping[str, str] | None = None, check: bool = True, given: str = "") -> str:
    """What a command prints; on failure all that it said."""
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, input=given)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def works(*command: str) -> bool:
    """Whether a command can be run and says yes."""
    try:
        return subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def docker_major() -> int:
    """Of the command, not of the engine."""
    return int(run("docker", "version", "--format", "{{.Client.Version}}").partition(".")[0])


def say(text: str) -> None:
    """One line of what happens, with the time since the beginning."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


BEGAN = time.monotonic()


def compose_program() -> tuple[str, ...]:
    """The Compose to use."""
    if named := os.environ.get("COMPOSE"):
        return tuple(named.split())
    for program in (("docker", "compose"), ("docker-compose",)):
        if works(*program, "version"):
            return program
    raise Failed("there is neither `docker compose` nor docker-compose")


@dataclass(slots=True)
class Stack:
    """The containers of one run."""

    program: tuple[str, ...]
    project: str
    environment: dict[str, str]

    def compose(self, *arguments: str) -> str:
        """Runs Compose."""
        return run(*self.program, "--project-name", self.project, *arguments, environment=self.environment)

    def container(self, service: str) -> str:
        """Id of the container of a service."""
        return self.compose("ps", "--quiet", service)

    def state(self, service: str) -> dict[str, Any]:
        """What Docker tells of it."""
        (state,) = json.loads(run("docker", "inspect", self.container(service)))
        return dict(state)

    def services(self) -> list[str]:
        """All that was started: Compose itself names those of other profiles, too."""
        mine = f"label=com.docker.compose.project={self.project}"
        named = '{{.Label "com.docker.compose.service"}}'
        return sorted(run("docker", "ps", "--all", "--filter", mine, "--format", named).split())

    async def kill(self, service: str) -> None:
        """The end of a process that nobody expects."""
        await asyncio.to_thread(run, "docker", "kill", self.container(service))

    async def renew(self, service: str) -> None:
        """Starts a service again, or replaces it where its image is another one now."""
        await asyncio.to_thread(self.compose, "up", "--detach", "--no-build", "--no-deps", service)
        await self.until_healthy(service)

    async def until_healthy(self, *services: str) -> None:
        """Waits for the health checks of the image."""
        deadline = time.monotonic() + HEALTHY_SECONDS
        for service in services:
            while True:
                state = (await asyncio.to_thread(self.state, service))["State"]
                if state.get("Health", {}).get("Status") == "healthy":
                    break
                if time.monotonic() > deadline:
                    raise AssertionError(f"{service} is not healthy: {json.dumps(state)[:2000]}")
                await asyncio.sleep(0.5)


@dataclass(slots=True)
class Gateway:
    """Where a gateway is published."""

    service: str
    grpc: str
    http: str


@dataclass(slots=True)
class Load:
    """Clients that never stop asking."""

    gateways: Sequence[Gateway]
    seed: int
    served: int = 0
    elsewhere: list[str] = field(default_factory=list)
    """Why a request was sent to the other gateway."""
    failed: list[str] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0

    async def send_for_ever(self, number: int) -> None:
        """One client: conversations that grow, by turns over fronts, models and gateways."""
        rng = random.Random(self.seed + number)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_SECONDS)) as http:
            routers = [Router(gateway.grpc, timeout_seconds=REQUEST_SECONDS) for gateway in self.gateways]
            try:
                while True:
                    model, tokens = rng.choice(MODELS), [rng.randrange(1, 30_000) for _ in range(64)]
                    for _ in range(4):
                        tokens += [rng.randrange(1, 30_000) for _ in range(64)]
                        await self.request(http, routers, model, tokens, over_grpc=rng.random() < 0.5, rng=rng)
            finally:
                for router in routers:
                    await router.close()

    async def request(
        self,
        http: aiohttp.ClientSession,
        routers: Sequence[Router],
        model: str,
        tokens: Sequence[int],
        *,
        over_grpc: bool,
        rng: random.Random,
    ) -> None:
        """One completion, from whichever gateway serves it."""
        order = rng.sample(range(len(self.gateways)), len(self.gateways))
        reasons: list[str] = []
        for which in [*order, *order]:
            try:
                if over_grpc:
                    prompt, cached = await generate(routers[which], model, tokens)
                else:
                    prompt, cached = await complete(http, self.gateways[which].http, model, tokens)
            except (Unavailable, DeadlineExceeded, aiohttp.ClientError, TimeoutError) as error:
                reasons.append(f"{'gRPC' if over_grpc else 'OpenAI'} {self.gateways[which].service}: {error!r}"[:300])
                continue
            self.served += 1
            self.prompt += prompt
            self.cached += cached
            self.elsewhere += reasons
            return
        self.failed.append("; ".join(reasons))

    async def more(self, requests: int) -> None:
        """Waits until so many more have been served."""
        wanted = self.served + requests
        async with asyncio.timeout(HEALTHY_SECONDS):
            while self.served < wanted and not self.failed:
                await asyncio.sleep(0.05)


async def generate(router: Router, model: str, tokens: Sequence[int]) -> tuple[int, int]:
    """A completion over gRPC; prompt tokens, and those that the engine had cached."""
    chunks = [chunk async for chunk in router.generate(tokens, model=model, stop=StopConditions(max_tokens=4))]
    usage = chunks[-1].usage
    assert usage is not None, chunks
    return usage.prompt_tokens, usage.cached_tokens or 0


async def complete(http: aiohttp.ClientSession, url: str, model: str, tokens: Sequence[int]) -> tuple[int, int]:
    """The same over OpenAI's API; a gateway that says 503 is not reached."""
    asked = {"model": model, "prompt": list(tokens), "max_tokens": 4}
    async with http.post(f"{url}/v1/completions", json=asked) as answer:
        if answer.status != 200:
            raise Unavailable(f"{answer.status}: {await answer.text()}")
        usage = (await answer.json())["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def struck(load: Load, what: str, strike: Callable[[], Awaitable[None]], *, gateway: bool = False) -> None:
    """Something is done to the stack, under load; afterwards all must have been served."""
    served, elsewhere, began = load.served, len(load.elsewhere), time.monotonic()
    await strike()
    await load.more(40)
    moved = load.elsewhere[elsewhere:]
    say(
        f"{what}: {load.served - served} requests in {time.monotonic() - began:.0f} s, {len(load.failed)} failed, "
        f"{len(moved)} served by the other gateway"
    )
    assert not load.failed, load.failed
    assert gateway or not moved, moved


async def exercise(stack: Stack, gateways: Sequence[Gateway]) -> None:
    """All of it, on a stack that is up."""
    load = Load(gateways, SEED)
    async with asyncio.TaskGroup() as group:
        senders = [group.create_task(load.send_for_ever(number)) for number in range(SENDERS)]
        await struck(load, "all up", lambda: asyncio.sleep(0))
        for service in ("indexer-1", "scheduler-1", "gateway-1"):
            is_gateway = service.startswith("gateway")
            await struck(load, f"{service} killed", partial(stack.kill, service), gateway=is_gateway)
            await struck(load, f"{service} started again", partial(stack.renew, service), gateway=is_gateway)
        stack.environment["KVSCOUT_IMAGE"] = NEXT_IMAGE
        for service in UPGRADED:
            renew = partial(stack.renew, service)
            await struck(load, f"{service} upgraded", renew, gateway=service.startswith("gateway"))
            assert stack.state(service)["Config"]["Image"] == NEXT_IMAGE
        for sender in senders:
            sender.cancel()
    say(f"{load.served} requests, token hit rate {100 * load.cached / load.prompt:.0f} %")
    assert load.cached > load.prompt / 4


def confined(stack: Stack) -> None:
    """Every container is bounded; those of ours run as nobody in particular, and can write nothing but /tmp."""
    for service in stack.services():
        state = stack.state(service)
        host = state["HostConfig"]
        assert host["Memory"] and host["NanoCpus"] and host["PidsLimit"], service
        assert host["LogConfig"]["Config"].keys() == {"max-size", "max-file"}, service
        assert host["CapDrop"] == ["ALL"], service
        if service == "nats":
            continue
        assert state["Config"]["User"] == "65532:65532", service
        assert host["ReadonlyRootfs"], service


async def seen_from_inside(stack: Stack, gateways: Sequence[Gateway]) -> None:
    """`kvscout status` within the network finds nothing wrong, and `doctor` no error.

    How a gateway's last call to a helper went is told until the next one: on a busy machine it may have been late.
    """
    inside = ("docker", "exec", stack.container("gateway-2"))
    deadline = time.monotonic() + HEALTHY_SECONDS
    while True:
        async with aiohttp.ClientSession() as http:
            for gateway, model in product(gateways, MODELS):
                await complete(http, gateway.http, model, range(1, 65))
        try:
            print(run(*inside, "kvscout", "status", "localhost:7050", "gateway-1:7050"), flush=True)
            break
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
    findings = json.loads(run(*inside, "kvscout", "doctor", "--json", check=False))["findings"]
    assert not [one for one in findings if one["severity"] == "error"], findings


def stop(stack: Stack) -> None:
    """An orderly end: every process exits with 0."""
    services = stack.services()
    stack.compose("stop")
    codes = {service: stack.state(service)["State"]["ExitCode"] for service in services}
    assert set(codes.values()) == {0}, codes


def images(environment: dict[str, str]) -> None:
    """Builds the image, or takes that of E2E_IMAGE, and finds the one of NATS; sets what compose.yaml reads.

    Raises:
        Failed: No registry can be reached, and there is nothing to make base images of.
    """
    arguments: dict[str, str] = {}
    if not all(works("docker", "image", "inspect", one) or works("docker", "pull", one) for one in (BASE, NATS)):
        say("no registry can be reached: base image by debootstrap, wheels by this machine")
        make_stand_ins()
        environment["NATS_IMAGE"] = STAND_IN_NATS
        arguments = {"BASE_IMAGE": STAND_IN, "RUST_IMAGE": STAND_IN, "WHEELS": "given"}
    image = environment["KVSCOUT_IMAGE"] = os.environ.get("E2E_IMAGE", "kvscout:e2e")
    if "E2E_IMAGE" not in os.environ:
        if arguments:
            run("make", "image-wheels")
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        run("docker", "build", *given, "--tag", image, ".", environment={**os.environ, "DOCKER_BUILDKIT": "1"})
    size = int(run("docker", "image", "inspect", "--format", "{{.Size}}", image)) / 1e6
    say(f"the image {image} has {size:.0f} MB")
    run("docker", "build", "--label", "of=upgrade", "--tag", NEXT_IMAGE, "-", given=f"FROM {image}\n")


def make_stand_ins() -> None:
    """Images of the same names of files as those from a registry."""
    if not works("docker", "image", "inspect", STAND_IN):
        if os.geteuid() or not shutil.which("debootstrap"):
            raise Failed("no registry can be reached, and only root can make a base image, with debootstrap")
        if sys.version_info[:2] != (3, 11):
            raise Failed(f"Debian's Python is 3.11, the wheels made here are for {platform.python_version()}")
        with tempfile.TemporaryDirectory(prefix="kvscout-base-") as folder:
            run("debootstrap", "--variant=minbase", "--include=python3,python3-venv,wget", "bookworm", folder)
            subprocess.run(
                f"tar --directory {folder} --exclude ./var/cache --exclude ./var/lib/apt --create . "
                f"| docker import - {STAND_IN}",
                shell=True, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
    binary = server_binary()
    assert binary is not None, "nats-server is missing: the extra [embedded] brings it"
    with tempfile.TemporaryDirectory(prefix="kvscout-nats-") as folder:
        shutil.copy(binary, f"{folder}/nats-server")
        Path(folder, "Dockerfile").write_text(f"FROM {STAND_IN}\nCOPY nats-server /usr/local/bin/nats-server\n")
        run("docker", "build", "--tag", STAND_IN_NATS, folder)


def main() -> int:
    """Exit code: 0, also where there is no Docker engine; 1 where something else is missing, or was lost."""
    print(f"E2E_SEED={SEED}", flush=True)
    try:
        if not shutil.which("docker"):
            raise Skipped("there is no docker")
        if not works("docker", "version"):
            raise Skipped("no Docker engine answers (dockerd)")
        if docker_major() >= BUILDX_SINCE and not works("docker", "buildx", "version"):
            raise Failed("this docker builds with its plugin buildx, which is not installed")
        program = compose_program()
        project = f"kvscout-e2e-{os.getpid()}"
        ports = free_ports(4)
        names = ("GATEWAY_1_GRPC", "GATEWAY_2_GRPC", "GATEWAY_1_HTTP", "GATEWAY_2_HTTP")
        environment = {**os.environ, **{name: str(port) for name, port in zip(names, ports, strict=True)}}
        environment |= {name: f"k{secrets.token_hex(20)}" for name in ("NATS_PASSWORD", "GRAFANA_PASSWORD")}
        images(environment)
    except Skipped as reason:
        print(f"skipped: {reason}")
        return 0
    except Failed as reason:
        print(f"FAILED: {reason}", file=sys.stderr)
        return 1
    stack = Stack(program, project, environment)
    gateways = [
        Gateway(f"gateway-{n + 1}", f"127.0.0.1:{ports[n]}", f"http://127.0.0.1:{ports[n + 2]}") for n in range(2)
    ]
    try:
        stack.compose("up", "--detach", "--no-build")
        asyncio.run(stack.until_healthy(*stack.services()))
        say(f"up, by {' '.join(program)} {run(*program, 'version', '--short')}")
        confined(stack)
        asyncio.run(exercise(stack, gateways))
        asyncio.run(seen_from_inside(stack, gateways))
        stop(stack)
        say("done: every process ended with 0")
    except BaseException:
        with suppress(RuntimeError):
            print(stack.compose("logs", "--tail", "30"), file=sys.stderr)
        raise
    finally:
        stack.compose("down", "--volumes", "--timeout", "5")
    return 0


if __name__ == "__main__":
    sys.exit(main())
