"""A prompt and its block hashes, one set for each kind of pool that serves its model. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_common.hashing import MmItem, block_hashes_packed
from kvscout_common.worker import WorkerSpec

HASH_BYTES = 8
Judge: TypeAlias = Callable[[bool], None]


class PromptTooLong(InvalidArgument):
    """No worker of the model can hold the prompt; said as engines and OpenAI do, which is what clients look for.

    Args:
        tokens: Of the prompt.
        longest: That any may have.
        field: Of the client's request, in which the prompt is.
    """

    def __init__(self, tokens: int, longest: int, *, field: str) -> None:
        super().__init__(
            f"This model's maximum context length is {longest} tokens. However, your request has {tokens} input tokens."
            " Please reduce the length of the input.",
            field=field,
        )


class Geometry(NamedTuple):
    """Block size and EAGLE windows of a pool, on which a prompt's block hashes depend."""

    block_size: int
    eagle: bool


class TokenClass(NamedTuple):
    """Prompts whose tokens are found in one way: those of a class are the engine's, or none is."""

    tenant: str
    model: str
    dialect: str
    tools: bool
    """The requests have tools."""
    source: str
    """Source of the tokens."""

    def __str__(self) -> str:
        return f"{self.dialect} {'with' if self.tools else 'without'} tools, by {self.source}"


@dataclass(slots=True)
class Prompt:
    """Prompt of a request: token ids, the block hashes of one geometry, or only an estimate of its length."""

    isl_tokens: int
    """With those of further prompts."""
    token_ids: bytes = b""
    """Little-endian u32, four bytes a token; empty where only hashes are known."""
    given_hashes: bytes = b""
    """Little-endian u64, eight bytes a block."""
    given_block_size: int = 0
    cache_salt: str = ""
    mm_items: tuple[MmItem, ...] = ()
    unknown: str = ""
    """Reason why neither tokens nor hashes are known: the length is an estimate, and it is placed by load alone."""
    partial: str = ""
    """Reason why only the first tokens are known: it is placed by these."""
    further_tokens: int = 0
    """Estimated tokens of the request's further prompts, or behind those that are known; only their number counts."""
    field: str = "token_ids"
    """Field of the client's request that has the prompt."""
    token_class: TokenClass | None = None
    """Class of the tokens, if they are all that the engine computes; None = they are not compared with the engine's."""
    wanted: object | None = None
    """The request, if its tokens are to be compared with the engine's one by one; None = only their number is."""
    judge: Judge | None = None
    """Called with whether the engine counted as many tokens; None = nobody learns from it."""
    reuse: tuple[tuple[int, ...], int] | None = None
    """What `ladder` found of its blocks, and the weight of its sample; None = it was not looked at yet."""

    @classmethod
    def of_tokens(cls, token_ids: bytes, *, further_tokens: int = 0) -> Prompt:
        """Return the prompt of some token ids, little-endian u32."""
        return cls(len(token_ids) // 4 + further_tokens, token_ids, further_tokens=further_tokens)

    @property
    def own_tokens(self) -> int:
        """Return its length without further prompts."""
        return self.isl_tokens - self.further_tokens

    def settle(self) -> None:
        """Release the tokens: it is not placed again."""
        self.token_ids = self.given_hashes = b""
        self.wanted = None


def geometries(workers: Iterable[WorkerSpec]) -> tuple[Geometry, ...]:
    """Return the distinct geometries of a model's workers, the commonest first: one hashing pass each."""
    counts: dict[Geometry, int] = {}
    for spec in workers:
        key = Geometry(spec.block_size, spec.eagle)
        counts[key] = counts.get(key, 0) + 1
    return tuple(sorted(counts, key=lambda key: (-counts[key], key)))


def hash_prompt(prompt: Prompt, pools: Sequence[Geometry], lora_name: str) -> dict[Geometry, bytes]:
    """Local hashes of a prompt for each geometry, in the order of `pools`, little-endian u64s.

    Args:
        prompt: Token ids, or the hashes of one geometry; other geometries then get none. Hashes are taken for
            those of EAGLE windows only where no other worker has their block size.
        pools: The geometries of the model's workers; empty = the model has none that is known here.
        lora_name: Adapter; "" = none.

    Raises:
        FailedPrecondition: No worker has the block size of the given hashes; names those there are.
    """
    if not prompt.given_block_size:
        return {
            pool: block_hashes_packed(
                prompt.token_ids,
                pool.block_size,
                lora_name=lora_name,
                cache_salt=prompt.cache_salt,
                mm_items=prompt.mm_items,
                eagle=pool.eagle,
            )
            for pool in pools
        }
    if not pools:
        return {Geometry(prompt.given_block_size, eagle=False): prompt.given_hashes}
    fitting = sorted(pool for pool in pools if pool.block_size == prompt.given_block_size)
    if not fitting:
        sizes = ", ".join(str(size) for size in sorted({pool.block_size for pool in pools}))
        raise FailedPrecondition(
            f"block_size is {prompt.given_block_size}, the model's workers have {sizes}", field="block_size"
        )
    return {pool: prompt.given_hashes if pool == fitting[0] else b"" for pool in pools}
