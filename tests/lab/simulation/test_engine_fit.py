"""Engine speeds that are fitted to a recording are those of the engines that were recorded."""

from __future__ import annotations

from random import Random

import pytest
from support.laboratory_worlds import SIZE
from support.recorded_runs import recorded_run
from support.seeds import test_seed

from kvscout_common.errors import ConfigError
from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.engine_fit import fit_engine
from kvscout_lab.simulation.timing import StepTime
from kvscout_lab.simulation.worker import EngineSettings


@pytest.mark.parametrize(
    "step",
    [
        StepTime(base_ms=8.0, prefill_us_per_token=50.0, decode_us_per_request=0.0, context_ns_per_token=0.0),
        StepTime(base_ms=4.0, prefill_us_per_token=120.0, decode_us_per_request=300.0, context_ns_per_token=0.0),
        StepTime(base_ms=20.0, prefill_us_per_token=30.0, decode_us_per_request=100.0, context_ns_per_token=0.0),
    ],
)
def test_the_speeds_of_simulated_engines_come_out(step: StepTime) -> None:
    engine = EngineSettings(block_size=SIZE, kv_tokens=65_536, max_num_batched_tokens=2_048, step=step)
    recording = recorded_run(Random(test_seed()), Cluster(workers=2, engine=engine))
    fitted = fit_engine(recording.requests, engine.max_num_batched_tokens)
    assert fitted.step.base_ms == pytest.approx(step.base_ms, rel=0.35)
    assert fitted.step.prefill_us_per_token == pytest.approx(step.prefill_us_per_token, rel=0.2)
    assert 0 <= fitted.ttft_error < 0.15


def test_too_few_requests_with_an_output_are_not_fitted() -> None:
    engine = EngineSettings(block_size=SIZE, kv_tokens=65_536)
    recording = recorded_run(Random(1), Cluster(workers=2, engine=engine))
    silent = [request._replace(ttft_seconds=0.0) for request in recording.requests]
    with pytest.raises(ConfigError, match="19 recorded requests have an output, and 20 are needed"):
        fit_engine([*recording.requests[:19], *silent], 8_192)
