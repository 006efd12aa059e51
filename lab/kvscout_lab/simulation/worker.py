"""One engine: continuous batching with a token budget a step, as vLLM's scheduler decides it.

A step is planned as a whole: every decoding request gets one token; what is left of the budget goes to prompts, oldest
first, in chunks; then, in order of arrival, to requests that wait, each admitted only if its whole prompt fits. A
request that needs a block when there is none preempts the youngest, which later computes again what it has lost.

Between two changes of the batch nothing but its contexts grows, so any number of decode steps is one arithmetic
series: `Worker` jumps over them, up to the next one in which a request ends or needs a block, or to the boundary at
which one that arrives meanwhile is looked at. Times are whole picoseconds, so the jump equals its steps exactly;
`max_jump` 1 takes them one by one.

::

    submit ─▶ waiting ─admitted─▶ prefills ─last chunk: first token─▶ decoding ─▶ finished
                 ▲───────────────────preempted──────┴────────────────────┘

Where it is kinder than an engine: a prompt's blocks are all taken when it is admitted, and a decode worker takes a
transferred prompt's blocks when the transfer is over, not when it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from kvscout_common.errors import ConfigError
from kvscout_lab.simulation.kv_cache import KvCache
from kvscout_lab.simulation.timing import StepTime, picoseconds

NEVER = 1 << 62
COPY = 0
"""In the place of a node that the worker has twice: this request's copy is its own."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine; all workers of a run are alike but for their speeds."""

    block_size: int = 64
    kv_tokens: int = 600_000
    """Tokens whose keys and values fit on the device."""
    offload_tokens: int = 0
    """Tokens of the offload tier, to which evicted blocks go; 0 = there is none."""
    offload_us_per_token: float = 5.0
    """Time to copy a token back from it, during which nothing is computed."""
    max_num_batched_tokens: int = 8_192
    """Tokens of a step."""
    max_num_seqs: int = 256
    """Requests of a batch."""
    step: StepTime = StepTime()
    max_jump: int = NEVER
    """Decode steps taken at once; 1 = one by one, for comparison."""

    @property
    def blocks(self) -> int:
        """KV blocks."""
        return self.kv_tokens // self.block_size

    @property
    def offload_blocks(self) -> int:
        """Blocks of the offload tier."""
        return self.offload_tokens // self.block_size

    def validate(self) -> EngineSettings:
        """Itself, if every setting is in range.

        Raises:
            ConfigError: Naming the first that is not.
        """
        for name in ("block_size", "kv_tokens", "max_num_batched_tokens", "max_num_seqs", "max_jump"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", field=name)
        if self.max_num_seqs >= self.max_num_batched_tokens:
            raise ConfigError("must be below max_num_batched_tokens", field="max_num_seqs")
        if not self.blocks:
            raise ConfigError(f"holds no block of {self.block_size} tokens", field="kv_tokens")
        if self.offload_tokens < 0:
            raise ConfigError("must not be negative", field="offload_tokens")
        if not 0 <= self.offload_us_per_token < float("inf"):
            raise ConfigError("must be a finite number of at least 0", field="offload_us_per_token")
        self.step.validate()
        return self


@dataclass(slots=True, eq=False)
class Job:
    """A request on a worker."""

    request: object
    """Whose it is; not looked at."""
    nodes: Sequence[int]
    """Nodes of all complete blocks of prompt and output."""
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate here."""
    computed_remotely: bool = False
    """Its prompt's keys and values come from another worker: it decodes at once."""
    holds: bool = False
    """Its blocks stay when it is done, until `Worker.release`: another worker fetches them."""
    generated: int = 0
    target: int = 0
    """Tokens that its prefill has to compute: the prompt, and after a preemption what it had generated."""
    computed: int = 0
    cached_tokens: int | None = None
    """Prompt tokens cached when it was admitted first."""
    held: list[int] = field(default_factory=list)
    """The node of each of its first blocks, or `COPY`."""
    private: int = 0
    born: int = 0
    """Number of the decode step after which it had `target` tokens: in step s its context is target + s − born."""
    life: int = 0
    """Counts its preemptions: what was planned for an earlier life is void."""
    last_token: int = 0
    """Time of its last token, where it was preempted since."""


class Done(NamedTuple):
    """Result of a step for a request."""

    job: Job
    finished: bool


class Gap(NamedTuple):
    """Decode steps of one length or of slowly growing lengths, for those who count inter-token latencies."""

    first: int
    """Length of the first one."""
    growth: int
    """By which each is longer than the one before it."""
    steps: int
    requests: int
    """Requests that got a token in each."""


class Worker:
    """See the module.

    Args:
        settings: Settings of the engine.
        prefill_speed: Divides the time of prompt tokens.
        decode_speed: Divides the time of all else.
    """

    def __init__(self, settings: EngineSettings, prefill_speed: float = 1.0, decode_speed: float = 1.0) -> None:
        self.settings = settings
        self.cache = KvCache(settings.blocks, settings.offload_blocks)
        self._copied = 0
        """Tokens that are copied back from the offload tier in the step under way."""
        self.preemptions = 0
        self.busy_time = 0
        self._aborted: list[Job] = []
        self._rates = settings.step.rates(prefill_speed, decode_speed)
        self._waiting: deque[Job] = deque()
        self._prefills: list[Job] = []
        self._decoding: dict[Job, None] = {}
        """In order of admission."""
        self._running: dict[Job, None] = {}
        """Both, in order of admission."""
        self._step = 0
        """Steps with decoding requests so far."""
        self._offset = 0
        """Σ (target − born) of the decoding ones: their contexts are this + their number · the step's number."""
        self._ends: list[tuple[int, int, int, Job]] = []
        """Step after which a request is done; life; order; request."""
        self._grows: list[tuple[int, int, int, Job]] = []
        """Step for which a request needs another block."""
        self._order = 0
        self._started = 0
        self._steps = 0
        """Steps under way; 0 = idle."""
        self._chunks: list[tuple[Job, int]] = []
        """Prompt tokens of the step under way."""
        self._first_length = 0
        self._growth = 0
        self._requests = 0
        """Decoding in the step under way."""
        self.end = NEVER
        """End of the steps under way."""

    @property
    def batch(self) -> int:
        """Return requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Return requests that are not."""
        return len(self._waiting)

    def submit(self, job: Job, now: int) -> None:
        """Take a request. `end` may come nearer.

        Raises:
            ConfigError: It fits into no empty cache.
        """
        if -(-(job.prompt_tokens + job.output_tokens) // self.settings.block_size) > self.cache.capacity:
            raise ConfigError(f"{job.prompt_tokens + job.output_tokens} tokens do not fit", field="kv_tokens")
        job.target = job.prompt_tokens
        alone = not self._waiting
        self._waiting.append(job)
        if not self._steps:
            self.begin(now)
        elif alone and self._steps > 1:
            self._cut(now)

    def abort(self, job: Job, now: int) -> None:
        """End a request that nobody waits for any more, at the next boundary between steps. `end` may come nearer."""
        if job in self._running:
            self._aborted.append(job)
            self._cut(now)
        elif job in self._waiting:
            self._waiting.remove(job)

    def set_speeds(self, prefill_speed: float, decode_speed: float, now: int) -> None:
        """Change its speeds from the next boundary between steps on. `end` may come nearer."""
        self._rates = self.settings.step.rates(prefill_speed, decode_speed)
        if self._steps:
            self._cut(now)

    def release(self, job: Job) -> None:
        """Free the blocks that a finished request holds."""
        self.cache.release([node for node in job.held if node != COPY], job.private)
        job.held, job.private = [], 0

    def begin(self, now: int) -> None:
        """Plan what comes next, from a boundary between steps."""
        preempted = self._grow(now)
        self._copied = 0
        chunks = self._chunks = []
        budget = self.settings.max_num_batched_tokens - len(self._decoding)
        for job in self._prefills:
            if not budget:
                break
            budget -= self._chunk(job, budget)
        if not preempted:
            self._admit(budget)
        requests = self._requests = len(self._decoding)
        self._started = now
        if not requests and not chunks:
            self._steps, self.end = 0, NEVER
            return
        # A prompt of which all but the last token is cached costs what decoding it costs.
        last = sum(1 for job, tokens in chunks if tokens == 1 and job.computed >= job.prompt_tokens - 1)
        prompt_tokens = sum(tokens for _, tokens in chunks) - last
        contexts = self._offset + requests * (self._step + 1)
        rates = self._rates
        attention = sum(rates.attention(job.computed, tokens) for job, tokens in chunks) if rates.pair else 0
        self._first_length = rates.step(prompt_tokens, requests + last, contexts, attention, len(self._running))
        self._first_length += self._copied * picoseconds(self.settings.offload_us_per_token / 1e6)
        self._growth = rates.context_token * requests
        # After a preemption nobody was admitted: at the next boundary somebody may be.
        self._steps = 1 if chunks or preempted else self._jump()
        self.end = now + self._length(self._steps)

    def finish(self) -> tuple[list[Done], Gap | None, list[tuple[int, int]]]:
        """End the steps under way, at `end`.

        Returns:
            What they brought to requests; their lengths, if any request decoded; and (since, until) of each token that
            a preempted request had to wait for.
        """
        steps, now = self._steps, self.end
        self.busy_time += now - self._started
        done: list[Done] = []
        late: list[tuple[int, int]] = []
        gap = None
        if self._requests:
            self._step += steps
            gap = Gap(self._first_length, self._growth, steps, self._requests)
            ends = self._ends
            while ends and ends[0][0] <= self._step:
                _, life, _, job = heappop(ends)
                if job.life == life:
                    self._leave_batch(job)
                    job.generated = job.output_tokens
                    self._end(job)
                    done.append(Done(job, True))
        for job, tokens in self._chunks:
            job.computed += tokens
            if job.computed == job.target:
                self._prefills.remove(job)
                if job.last_token:
                    late.append((job.last_token, now))
                    job.last_token = 0
                done.append(self._first_token(job))
        self._chunks = []
        self._steps = 0
        for job in self._aborted:
            self._drop(job)
        self._aborted = []
        return done, gap, late

    def _drop(self, job: Job) -> None:
        """End a request without its last token, if it still runs."""
        if job in self._decoding:
            self._leave_batch(job)
        elif job in self._running:
            del self._running[job]
            self._prefills.remove(job)
        else:
            if job in self._waiting:
                self._waiting.remove(job)
            return
        job.life += 1
        self.release(job)

    def _first_token(self, job: Job) -> Done:
        job.generated += 1
        if job.generated == job.output_tokens:
            del self._running[job]
            self._end(job)
            return Done(job, True)
        self._decode(job)
        return Done(job, False)

    def _decode(self, job: Job) -> None:
        """From now on it is in each step."""
        job.born = self._step
        self._decoding[job] = None
        self._offset += job.target - job.born
        self._order += 1
        last = self._step + job.output_tokens - job.generated
        heappush(self._ends, (last, job.life, self._order, job))
        full = -job.target % self.settings.block_size
        heappush(self._grows, (self._step + 1 + full, job.life, self._order, job))

    def _leave_batch(self, job: Job) -> None:
        del self._running[job]
        del self._decoding[job]
        self._offset -= job.target - job.born

    def _end(self, job: Job) -> None:
        job.life += 1
        self._register(job, job.prompt_tokens + job.output_tokens - 1)
        if not job.holds:
            self.release(job)

    def _grow(self, now: int) -> bool:
        """Assign the blocks that the next step needs; where there is none, preempt the youngest: True."""
        step, grows, size = self._step + 1, self._grows, self.settings.block_size
        preempted = False
        while grows and grows[0][0] <= step:
            _, life, order, job = heappop(grows)
            if job.life != life:
                continue
            self._register(job, job.target + step - 1 - job.born)
            while not self.cache.grow():
                preempted = True
                youngest = next(reversed(self._running))
                self._preempt(youngest, now)
                if youngest is job:
                    break
            else:
                job.private += 1
                heappush(grows, (step + size, life, order, job))
        return preempted

    def _preempt(self, job: Job, now: int) -> None:
        self.preemptions += 1
        if job in self._decoding:
            self._leave_batch(job)
            job.generated += self._step - job.born
            job.last_token = now
        else:
            del self._running[job]
            self._prefills.remove(job)
        job.life += 1
        job.target, job.computed = job.prompt_tokens + job.generated, 0
        job.computed_remotely = False
        self.release(job)
        self._waiting.appendleft(job)

    def _admit(self, budget: int) -> None:
        waiting, cache, size = self._waiting, self.cache, self.settings.block_size
        while waiting and budget > 0 and len(self._running) < self.settings.max_num_seqs:
            job = waiting[0]
            hit = cache.hit(job.nodes[: (job.target - 1) // size])
            held = list(job.nodes[:hit])
            blocks = -(-job.target // size) - hit
            if not cache.fits(held, blocks):
                break
            waiting.popleft()
            cache.acquire(held, blocks)
            job.held, job.private = held, blocks
            job.computed = hit * size
            if cache.offload_capacity:
                self._copy_back(job, hit)
            if job.cached_tokens is None:
                job.cached_tokens = job.computed
            self._running[job] = None
            if job.computed_remotely:
                # Its last token is computed here: that gives the first one of the answer.
                job.computed = max(job.computed, job.target - 1)
            self._prefills.append(job)
            budget -= self._chunk(job, budget)

    def _copy_back(self, job: Job, hit: int) -> None:
        """Copy what the offload tier has of a prompt, behind what the device has."""
        size = self.settings.block_size
        copied = self.cache.offload_hit(job.nodes[hit : (job.target - 1) // size]) * size
        if copied:
            self._copied += copied
            job.computed += copied
            self._register(job, job.computed)

    def _chunk(self, job: Job, budget: int) -> int:
        tokens = min(job.target - job.computed, budget)
        self._chunks.append((job, tokens))
        self._register(job, job.computed + tokens)
        return tokens

    def _register(self, job: Job, tokens: int) -> None:
        """Make the complete blocks of a request's first tokens known."""
        size, held = self.settings.block_size, job.held
        for node in job.nodes[len(held) : tokens // size]:
            if self.cache.register(node):
                held.append(node)
                job.private -= 1
            else:
                held.append(COPY)

    def _jump(self) -> int:
        """Decode steps until the batch changes by itself."""
        until = self.settings.max_jump + self._step
        for planned, last in ((self._ends, 0), (self._grows, 1)):
            while planned and planned[0][3].life != planned[0][1]:
                heappop(planned)
            if planned:
                until = min(until, planned[0][0] - last)
        return until - self._step

    def _cut(self, now: int) -> None:
        """End the jump at the first boundary that is not before a time."""
        low, high = 1, self._steps
        while low < high:
            middle = (low + high) // 2
            if self._started + self._length(middle) >= now:
                high = middle
            else:
                low = middle + 1
        self._steps = low
        self.end = self._started + self._length(low)

    def _length(self, steps: int) -> int:
        return steps * self._first_length + self._growth * (steps * (steps - 1) // 2)

    def check_invariants(self) -> None:
        """Raise AssertionError if the structure contradicts itself."""
        self.cache.check_invariants()
        assert set(self._running) == {*self._prefills, *self._decoding}, "who runs prefills or decodes"
        assert self._offset == sum(job.target - job.born for job in self._decoding), "contexts add up"
        assert sum(job.private for job in self._running) <= self.cache.private, "private blocks are somebody's"
