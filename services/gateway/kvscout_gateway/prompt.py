"""A prompt and its block hashes, one set for each kind of pool that serves its model. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_common.hashing import MmItem, block_hashes
from kvscout_common.worker import WorkerSpec


class Geometry(NamedTuple):
    """What a prompt's block hashes depend on besides the prompt."""

    block_size: int
    eagle: bool


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a request means: a base model, and the adapter on it ("" = none)."""

    model: str
    lora_name: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be placed: token ids, or the block hashes of one geometry."""

    isl_tokens: int
    token_ids: bytes = b""
    """Little-endian u32, four bytes a token; empty where only hashes are known."""
    given_hashes: tuple[int, ...] = ()
    given_block_size: int = 0
    cache_salt: str = ""
    mm_items: tuple[MmItem, ...] = ()

    def hashes(self, geometry: Geometry, lora_name: str) -> list[int]:
        """Local hashes for one geometry; none where the prompt came as hashes of another one."""
        if not self.token_ids:
            fits = geometry == Geometry(self.given_block_size, eagle=False)
            return list(self.given_hashes) if fits else []
        return block_hashes(
            self.token_ids,
            geometry.block_size,
            lora_name=lora_name,
            cache_salt=self.cache_salt,
            mm_items=self.mm_items,
            eagle=geometry.eagle,
        )


def geometries(workers: Iterable[WorkerSpec]) -> list[Geometry]:
    """The distinct geometries of a model's workers, the commonest first: one hashing pass each."""
    counts: dict[Geometry, int] = {}
    for spec in workers:
        key = Geometry(spec.block_size, spec.eagle)
        counts[key] = counts.get(key, 0) + 1
    return sorted(counts, key=lambda key: (-counts[key], key))


def resolve_target(model: str, lora_name: str, workers: Iterable[WorkerSpec]) -> Target:
    """What a request's model name means: an adapter's name stands for its base model.

    Args:
        model: As the request names it.
        lora_name: As the request names it; "" = none.
        workers: Every worker of the tenant.

    Raises:
        InvalidArgument: If `model` is empty, or names one adapter and `lora_name` another.
    """
    if not model:
        raise InvalidArgument("must not be empty", field="model")
    base = ""
    for spec in workers:
        if spec.model == model:
            return Target(model, lora_name)
        if any(adapter.name == model for adapter in spec.adapters):
            base = spec.model
    if base and lora_name not in ("", model):
        raise InvalidArgument(f"{model!r} is an adapter itself", field="lora_name")
    return Target(base, model) if base else Target(model, lora_name)


def require_block_size(prompt: Prompt, known: list[Geometry]) -> None:
    """Refuses block hashes that no worker of the model can match.

    Raises:
        FailedPrecondition: Naming the block sizes there are.
    """
    if prompt.given_block_size and known and all(g.block_size != prompt.given_block_size for g in known):
        sizes = ", ".join(str(g.block_size) for g in known)
        raise FailedPrecondition(
            f"block_size is {prompt.given_block_size}, the model's workers have {sizes}", field="block_size"
        )
