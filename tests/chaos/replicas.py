"""`make chaos-replicas`: three schedulers under message loss, stops and kills; afterwards all agree exactly.

Gateways with Lifecycle streams and ordered lists of schedulers, in two zones, book, mark and free, and fail over when
theirs is gone; now and then one frees a request through another scheduler. What a scheduler that hangs did not answer
is booked at the next one, while the first still has the booking and its Free to carry out. Some gateways are killed
together with their scheduler, either first: what they had in flight ends with the owner's grace time, though it was
booked with a lease of 300 s. Some ask for a policy that raises. A relay in front of NATS loses 10 % of what each
replica publishes, repeats 5 % and reorders 5 %; others swallow what a gateway and a scheduler say to each other, in one
direction or both, without a word to either. After CHAOS_SECONDS the faults end; one quiet second later every replica
must have exactly what the gateways have in flight, and exactly nothing when they have freed it. CHAOS_SEED repeats the
choice of faults.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random, SystemRandom
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from support.nats_relay import NatsRelay
from support.nats_server import NatsServer, nats_server
from support.processes import eventually
from support.replica_client import BLOCK, MODEL, GatewayStream, ReplicaClient, free_of, gateway, ref
from support.scheduler_policy_plugin import install
from support.tcp_relay import TcpRelay

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.rpc.channel import open_channel

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("CHAOS_SEED", SystemRandom().randrange(2**32)))
REPLICAS = 3
GATEWAYS = 4
WORKERS = ("w0", "w1", "w2")
LEASE_SECONDS = 300
"""As callers write it: a whole number."""
STALE_SECONDS = 3.0
"""For how long a gateway tries to free what a scheduler has not answered."""
CALL_SECONDS = 1.0
"""A scheduler that takes longer is left for the next one."""
QUIET_SECONDS = 1.0
FORGOTTEN_SECONDS = 20.0
"""Until a replica counts as silent, and the grace time of an owner."""
FAILURES = (OSError, TimeoutError, grpc.RpcError, asyncio.InvalidStateError)
"""What a gateway leaves its scheduler for."""


NOT_YET = (grpc.StatusCode.NOT_FOUND.value[0], grpc.StatusCode.UNAVAILABLE.value[0])
"""What a scheduler says that does not know its workers yet; its health says so too."""


class Route:
    """How a gateway reaches a replica."""

    def __init__(self, replica: ReplicaClient) -> None:
        self.name = replica.name
        self.relay = TcpRelay(replica.address)

    async def start(self) -> None:
        """Listens."""
        await self.relay.start()
        self._channel = open_channel(self.relay.address)

    async def close(self) -> None:
        """Ends everything."""
        await self._channel.close()
        await self.relay.close()

    @property
    def stub(self) -> Any:
        """The rpcs of the replica."""
        return scheduler_pb2_grpc.SchedulerStub(self._channel)


class Gateway:
    """A gateway: its requests, and which scheduler it uses."""

    def __init__(self, name: str, replicas: list[ReplicaClient], seed: int, place: int) -> None:
        self.name = name
        self.paths = [Route(replica) for replica in replicas]
        self.attempts: dict[str, int] = {}
        """Of its requests."""
        self.in_flight: dict[str, tuple[str, bool]] = {}
        """Requests it was told are booked: on which worker, and whether their prefill is over."""
        self.booked = self.freed = self.moves = self.rebooked = self.refused = self.tried_again = 0
        self.history: dict[str, list[str]] = {}
        """Of what is in flight: what happened to it, where."""
        self.failure = ""
        """Why it left a scheduler last."""
        self.stop, self.quiet, self.release = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._owed: set[tuple[str, int]] = set()
        """What is to be freed, and in which attempt: it is not wanted any more, or not known to be booked."""
        self._asked: list[str] = []
        """Requests that are being booked."""
        self._marked: set[str] = set()
        """Requests whose prefill is over, and of which it was not heard that a scheduler was told so."""
        self._stale: set[asyncio.Task[None]] = set()
        self._replicas = replicas
        self._rng = Random(seed)
        self._numbers = itertools.count()
        self.place = place

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Works until told to stop, keeps what is in flight until told to release it, and frees it."""
        self._task = tasks.create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                async with gateway(
                    self.paths[self.place], self.name, list(self.in_flight), CALL_SECONDS, self.attempts
                ) as stream:
                    self._note("listed", set(self.in_flight) - set(stream.unknown))
                    await self._settle(stream)
                    while not self.stop.is_set():
                        await self._work(stream)
                    await asyncio.gather(*self._stale)
                    self.quiet.set()
                    while not self.release.is_set():
                        await stream.beat(CALL_SECONDS)
                        try:
                            await asyncio.wait_for(self.release.wait(), 0.2)
                        except TimeoutError:
                            pass
                    self._owed.update((name, self.attempts[name]) for name in self.in_flight)
                    self.in_flight.clear()
                    await self._settle(stream)
                    return
            except FAILURES as error:
                self.moves += 1
                for name in self._asked:
                    self._give_up(name)
                self.failure = f"{self.paths[self.place].name}: {error!r}"
                self.place = (self.place + 1) % len(self.paths)
                await asyncio.sleep(0.02)

    def die(self) -> None:
        """Is gone, with all that it would still have done."""
        self._task.cancel()
        for task in self._stale:
            task.cancel()

    def _give_up(self, name: str) -> None:
        """Goes on with another attempt, at the next scheduler; this one hears of that when it hears again."""
        stub, given_up = self.paths[self.place].stub, free_of(ref(name, self.attempts[name]))
        self.attempts[name] += 1

        async def free() -> None:
            try:
                await asyncio.wait_for(stub.Free(given_up), STALE_SECONDS)
            except FAILURES:
                pass

        task = asyncio.create_task(free())
        self._stale.add(task)
        task.add_done_callback(self._stale.discard)

    def _note(self, what: str, names: Iterable[str]) -> None:
        at = f"{time.monotonic() % 1000:.3f} {what} at {self.paths[self.place].name}"
        for name in names:
            self.history.setdefault(name, []).append(at)

    async def _settle(self, stream: GatewayStream) -> None:
        """Books again what the scheduler has lost, says once more whose prefill is over, and frees what is owed."""
        lost = [name for name in stream.unknown if name in self.in_flight]
        stream.unknown.clear()
        again = [
            {
                "reserve": scheduler_pb2.ReserveRequest(
                    model=MODEL, request_id=name, attempt_id=self.attempts[name], isl_tokens=BLOCK,
                    worker=types_pb2.WorkerRank(worker_id=self.in_flight[name][0]),
                )
            }
            for name in lost
        ]  # fmt: skip
        for answer in await stream.ask(*again, seconds=CALL_SECONDS):
            if answer.code in NOT_YET:
                raise ConnectionError(f"it has just started: {answer.message}")
            assert not answer.code, f"a request in flight cannot be booked again: {answer.message}"
            self.rebooked += 1
        self._note("booked again", lost)
        # What a replica takes over may be older than what the last one was told.
        over = [name for name, (_, marked) in self.in_flight.items() if marked or name in self._marked]
        await self._mark(stream, over)
        owed = list(self._owed)
        await stream.ask(*({"free": ref(*each)} for each in owed), seconds=CALL_SECONDS)
        self._owed.difference_update(owed)
        self.tried_again += len(self._asked)
        await self._book(stream, self._asked)

    async def _book(self, stream: GatewayStream, names: list[str], **fields: Any) -> None:
        self._asked = names
        asked = [(name, self.attempts.setdefault(name, 1)) for name in names]
        self._owed.update(asked)
        answers = await stream.book(*names, seconds=CALL_SECONDS, lease_seconds=LEASE_SECONDS, **fields)
        for name, answer in zip(names, answers, strict=True):
            if not answer.code:
                self.in_flight[name] = (answer.select.worker.worker_id, False)
                self.booked += 1
                self._note("booked", [name])
        self._owed.difference_update(asked)
        self._asked = []

    async def _mark(self, stream: GatewayStream, names: list[str]) -> None:
        self._marked = set(names)
        answers = await stream.ask(*({"prefill_complete": stream.ref(name)} for name in names), seconds=CALL_SECONDS)
        self._marked = set()
        for name, answer in zip(names, answers, strict=True):
            if answer.code:
                self.refused += 1
            else:
                self.in_flight[name] = (self.in_flight[name][0], True)
                self._note("marked", [name])

    async def _work(self, stream: GatewayStream) -> None:
        names = [f"{self.name}-{next(self._numbers)}" for _ in range(self._rng.randint(1, 5))]
        raising = types_pb2.RouterConfigOverride(policy="raising") if self._rng.random() < 0.1 else None
        await self._book(stream, names, router_config_override=raising)
        ripe = [name for name, (_, over) in self.in_flight.items() if not over and self._rng.random() < 0.5]
        await self._mark(stream, ripe)
        done = [name for name, (_, over) in self.in_flight.items() if over and self._rng.random() < 0.3]
        for name in done:
            del self.in_flight[name], self.history[name]
        owed = [(name, self.attempts[name]) for name in done]
        self._owed.update(owed)
        if done and self._rng.random() < 0.2:
            other = self._rng.choice(self._replicas)
            await asyncio.wait_for(other.stub.Free(free_of(stream.ref(done[0]))), CALL_SECONDS)
        await stream.ask(*({"free": stream.ref(name)} for name in done), seconds=CALL_SECONDS)
        self._owed.difference_update(owed)
        for name in done:
            del self.attempts[name]
        self.freed += len(done)
        await asyncio.sleep(self._rng.uniform(0, 0.02))


class Gateways(list[Gateway]):
    """The gateways that live.

    Args:
        replicas: In their order of preference.
        seed: Of what they do.
        tasks: In which they run.
        stack: Ends their connections.
    """

    def __init__(
        self, replicas: list[ReplicaClient], seed: int, tasks: asyncio.TaskGroup, stack: AsyncExitStack
    ) -> None:
        super().__init__()
        self.killed: list[Gateway] = []
        self._replicas, self._seed, self._tasks, self._stack = replicas, seed, tasks, stack

    async def add(self, place: int) -> None:
        """Starts a further one, which begins at a scheduler."""
        number = len(self) + len(self.killed)
        each = Gateway(f"g{number}", self._replicas, self._seed + number, place)
        for path in each.paths:
            await path.start()
            self._stack.push_async_callback(path.close)
        self.append(each)
        each.start(self._tasks)

    def kill(self, struck: Gateway) -> None:
        """Ends one with all that it has in flight."""
        self.remove(struck)
        self.killed.append(struck)
        struck.die()


class World:
    """The processes, and what stands between them and NATS."""

    def __init__(self, nats: NatsServer, seed: int, folder: Path) -> None:
        self.nats = nats
        install(folder)
        self._folder = folder
        # What replicas tell each other; the registry is another matter, and has its own chaos.
        self.relays = [
            NatsRelay(nats.port, seed + number, lambda subject: ".scheduler." in subject) for number in range(REPLICAS)
        ]
        self.replicas: list[ReplicaClient] = []

    async def start(self) -> None:
        """Starts everything."""
        for number, relay in enumerate(self.relays):
            await relay.start()
            self.replicas.append(ReplicaClient(f"s{number}", relay.url, path=self._folder))
        await asyncio.gather(*(replica.start() for replica in self.replicas))
        await self.replicas[0].register(*WORKERS)
        for replica in self.replicas:
            await eventually(replica.knows_workers(len(WORKERS)), what="the workers")

    async def close(self) -> None:
        """Ends everything."""
        for replica in self.replicas:
            await replica.close()
        for relay in self.relays:
            await relay.close()

    def faults(self, *, loss: float = 0.0, repeats: float = 0.0, reorder: float = 0.0) -> None:
        """What happens to messages from now on."""
        for relay in self.relays:
            relay.loss, relay.repeats, relay.reorder = loss, repeats, reorder

    async def strike(self, rng: Random, gateways: Gateways) -> str:
        """One fault; returns what it was, when it is over."""
        kinds = ["stop", "stop", "kill", "kill", "nats kill", "nats stop", "half-open", "half-open", "kill both"]
        kind, away = rng.choice(kinds), rng.uniform(0.1, 2.0)
        if kind == "kill both":
            struck, gateway_first = rng.choice(gateways), rng.random() < 0.5
            replica = self.replicas[struck.place]
            if gateway_first:
                gateways.kill(struck)
                await asyncio.sleep(away)
            await replica.kill()
            if not gateway_first:
                # Less than it takes to open a stream elsewhere: it goes with what it had in flight.
                await asyncio.sleep(away / 100)
                gateways.kill(struck)
            await gateways.add(struck.place)
            await asyncio.sleep(away)
            await replica.start()
            return f"{kind} {struck.name} with {len(struck.in_flight)} in flight and {replica.name}, {away:.1f} s"
        if kind == "half-open":
            struck = rng.choice(gateways)
            directions = rng.choice([("up",), ("down",), ("up", "down")])
            for path in rng.choice([struck.paths, [struck.paths[struck.place]]]):
                path.relay.swallow(*directions)
            await asyncio.sleep(away)
            for path in struck.paths:
                path.relay.heal()
            return f"{kind} {struck.name} {' and '.join(directions)}, {away:.1f} s"
        if kind == "nats kill":
            await self.nats.kill()
            await asyncio.sleep(away)
            await self.nats.start()
            return f"{kind}, {away:.1f} s"
        if kind == "nats stop":
            self.nats.pause()
            await asyncio.sleep(away)
            self.nats.resume()
            return f"{kind}, {away:.1f} s"
        replica = rng.choice(self.replicas)
        if kind == "stop":
            replica.signal(signal.SIGSTOP)
            await asyncio.sleep(away)
            replica.signal(signal.SIGCONT)
        else:
            await replica.kill()
            await asyncio.sleep(away)
            await replica.start()
        return f"{kind} {replica.name}, {away:.1f} s"

    async def differences(self, gateways: list[Gateway], *, but_extra: bool = False) -> list[str]:
        """Where a replica has something else than another one, or than the gateways have in flight.

        Args:
            gateways: What they have in flight.
            but_extra: Whether replicas may have more, if all have the same.
        """
        truth = {
            name: (each.attempts[name], worker_id, over)
            for each in gateways
            for name, (worker_id, over) in each.in_flight.items()
        }
        found, states = [], [await replica.state() for replica in self.replicas]
        for replica, (requests, loads) in zip(self.replicas, states, strict=True):
            seen = {
                name: (attempt_id, worker_id, phase == scheduler_pb2.REQUEST_PHASE_DECODE)
                for name, (attempt_id, worker_id, phase, *_) in requests.items()
            }
            missing, extra = truth.items() - seen.items(), seen.items() - truth.items()
            if missing or (extra and not but_extra):
                found.append(
                    f"{replica.name}: missing {sorted(missing)[:3]}, too many {sorted(extra)[:3]}, of {len(truth)}"
                )
                found += [
                    f"{name}: {', '.join(each.history[name])}"
                    for each in gateways
                    for name in sorted({name for name, _ in missing} & each.history.keys())[:3]
                ]
                # Every end of a booking is logged with its reason.
                found += [
                    f"{each.name} says: {line}"
                    for name in sorted({name for name, _ in missing})[:3]
                    for each in self.replicas
                    for line in each.member.log_about(f"request {name} ")
                ]
            if (requests, loads) != states[0]:
                found.append(f"{replica.name} and {self.replicas[0].name} differ, loads {loads} and {states[0][1]}")
            if sum(load[0] for load in loads.values()) != len(requests):
                found.append(f"{replica.name}: {len(requests)} requests, but loads {loads}")
        return found


async def run(seconds: float, seed: int, *, quiet: bool = False) -> list[str]:
    """One run.

    Args:
        seconds: Of faults.
        seed: Of their choice.
        quiet: Prints nothing.

    Returns:
        What is wrong afterwards.
    """
    rng = Random(seed)

    def say(text: str) -> None:
        if not quiet:
            print(f"  {text}", flush=True)

    async with nats_server() as nats, AsyncExitStack() as stack:
        world = World(nats, seed, Path(stack.enter_context(TemporaryDirectory())))
        stack.push_async_callback(world.close)
        await world.start()
        world.faults(loss=0.1, repeats=0.05, reorder=0.05)
        async with asyncio.TaskGroup() as tasks:
            gateways = Gateways(world.replicas, seed, tasks, stack)
            for number in range(GATEWAYS):
                await gateways.add(number % 2)
            end, killed = time.monotonic() + seconds, False
            while time.monotonic() < end:
                strike = await world.strike(rng, gateways)
                killed |= strike.startswith("kill")
                say(f"{seconds - (end - time.monotonic()):5.1f} s  {strike}")
                await asyncio.sleep(rng.uniform(0.0, 1.0))
            for replica in world.replicas:
                replica.member.require_alive()
            world.faults()
            for each in gateways:
                each.stop.set()
            # A gateway is quiet when a scheduler has answered it; NATS may have been away until now.
            for each in gateways:
                try:
                    await asyncio.wait_for(each.quiet.wait(), 30)
                except TimeoutError:
                    for replica in world.replicas:
                        replica.member.require_alive()
                    raise AssertionError(f"{each.name} finds no scheduler; it left {each.failure}") from None
            for replica in world.replicas:
                await eventually(replica.has_problem(False), what="NATS")
            await asyncio.sleep(QUIET_SECONDS)
            wrong = await world.differences(gateways, but_extra=killed)
            began = time.monotonic()
            while not wrong and (extra := await world.differences(gateways)):
                # A Free that was answered by a replica that was killed before it could tell anyone: the owner, which
                # is connected and does not have it in flight, shows that it is over. And what a gateway had that was
                # killed with its scheduler: nobody hears of the owner.
                if time.monotonic() - began > FORGOTTEN_SECONDS:
                    wrong = extra
                await asyncio.sleep(0.2)
            say(f"agreed after a quiet second, exact after {time.monotonic() - began:.1f} s more")
            held = sum(len(each.in_flight) for each in gateways)
            for each in gateways:
                each.release.set()
        await asyncio.sleep(QUIET_SECONDS)
        for line in wrong:
            say(f"WRONG {line}")
        after = await world.differences(gateways)
        wrong += after
        for line in after:
            say(f"WRONG after all was freed: {line}")
        figures = [await replica.rpc("GetReplicas", scheduler_pb2.GetReplicasRequest()) for replica in world.replicas]
        for replica, figure in zip(world.replicas, figures, strict=True):
            # Every lost event shows as a gap: what agrees on the sequence must agree on the rest.
            wrong += [f"{replica.name} diverged from {each.replica_id}" for each in figure.replicas if each.divergences]
        booked, freed, moves, rebooked, refused, again = (
            sum(getattr(each, name) for each in [*gateways, *gateways.killed])
            for name in ("booked", "freed", "moves", "rebooked", "refused", "tried_again")
        )
        say(f"{booked} booked, {freed} freed, {held} compared in flight; gateways moved {moves} times, "
            f"booked {rebooked} again that died with their replica, and {again} that were not answered for; "
            f"{refused} marks refused")  # fmt: skip
        lost, repeated, reordered = (
            sum(getattr(relay, name) for relay in world.relays) for name in ("lost", "repeated", "reordered")
        )
        say(f"messages: {lost} lost, {repeated} repeated, {reordered} reordered; now "
            + ", ".join(f"{r.name}: {f.taken_over} taken over, {f.forwarded} forwarded, "
                        f"{sum(e.snapshots for e in f.replicas)} snapshots, {sum(e.gaps for e in f.replicas)} gaps"
                        for r, f in zip(world.replicas, figures, strict=True)))  # fmt: skip
        return wrong


async def main() -> int:
    """One run; 0 if all agreed."""
    print(f"CHAOS_SEED={SEED} CHAOS_SECONDS={SECONDS:g}", flush=True)
    return 1 if await run(SECONDS, SEED) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
