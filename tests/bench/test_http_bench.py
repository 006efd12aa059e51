"""The HTTP benchmark: a short run over a real pump."""

from kvscout_bench.http_bench import PEERS, HttpBench


def test_a_quick_run_tells_what_the_pump_takes_and_judges_nothing() -> None:
    said: list[str] = []
    rows = list(HttpBench(only=("pieces",), quick=True).run(said.append))
    assert [(row.workload, row.unit, row.goal, row.met) for row in rows] == [
        ("pieces/40/request", "µs", 550.0, None),
        ("pieces/40/chunk", "µs", 25.0, None),
    ]
    assert set(rows[0].as_json()["parts"]) == {"pump"}
    assert any("round 1 of 1" in line for line in said)


def test_its_peers_are_another_transport_and_another_program() -> None:
    assert set(PEERS) == {"aiohttp", "envoy"}
