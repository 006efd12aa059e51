"""Policies that only the laboratory has: for comparison, and in no scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvscout_lab.cells.online_ttft import OnlineTtft
from kvscout_scheduler.policies import Candidates, PolicyRegistry, installed_policies
from kvscout_scheduler.policies.builtin import LeastLoaded
from kvscout_scheduler.policies.policy import Policy


class SessionSticky(LeastLoaded):
    """The worker where the request's session was last, whatever its load; a new session: the fewest active requests."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        columns = zip(candidates.slots, candidates.active_requests, strict=True)
        return [-1 if slot == candidates.home else requests for slot, requests in columns]


class Dynamo(Policy):
    """The cost of Dynamo's router since 1.2, with its newer weights.

    ::

        excess(w)  = (active_prefill_blocks(w) − least active_prefill_blocks) / blocks of the prompt
        credit(w)  = overlap_credit / (1 + decay · excess(w))
        prefill(w) = max(0, active_prefill_blocks(w) + prompt_blocks − credit(w) · device_blocks(w)
                            − blocks of slower tiers, weighted)
        cost(w)    = prefill_load_scale · prefill(w) + decode_blocks(w)

    With scale 1, credit 1 and no decay, Dynamo's defaults, it is `kv`. Not modelled: the surcharge of active requests
    (0 by default), loads that shrink while a prompt is computed (`--router-prefill-load-model aic`), its queue.
    Source: https://docs.nvidia.com/dynamo/v1.2.1/components/router/configuration-and-tuning

    Args:
        prefill_load_scale: `--router-prefill-load-scale`.
        overlap_credit: `--router-kv-overlap-score-credit`.
        decay: `--router-kv-overlap-score-credit-decay`.
    """

    unit = "blocks"

    def __init__(self, prefill_load_scale: float = 1.0, overlap_credit: float = 1.0, decay: float = 0.0) -> None:
        self._scale = prefill_load_scale
        self._credit = overlap_credit
        self._decay = decay

    def costs(self, candidates: Candidates) -> Sequence[float]:
        request = candidates.request
        active = candidates.active_prefill_tokens
        least = min(active)
        columns = zip(
            candidates.specs,
            active,
            candidates.device_blocks,
            candidates.effective_blocks,
            candidates.decode_blocks,
            strict=True,
        )
        costs = []
        for spec, tokens, device, effective, decode in columns:
            size = spec.block_size
            blocks = tokens / size
            if request.charge_prefill:
                excess = (tokens - least) / size / -(-request.isl_tokens // size)
                credit = self._credit / (1 + self._decay * excess)
                blocks += request.isl_tokens / size - credit * device - (effective - device)
            costs.append(self._scale * max(0.0, blocks) + decode)
        return costs


def lab_policies() -> PolicyRegistry:
    """Return the registry of schedulers' policies and those of the laboratory."""
    return installed_policies(
        {
            "dynamo-decay-1": partial(Dynamo, decay=1.0),
            "dynamo-defaults": Dynamo,
            "dynamo-scale-3": partial(Dynamo, prefill_load_scale=3.0),
            "online-ttft": OnlineTtft,
            "session-sticky": SessionSticky,
        }
    )
