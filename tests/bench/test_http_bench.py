"""The HTTP benchmark: a short run over a real pump."""

from kvscout_bench.http_bench import HttpBench


def test_a_quick_run_tells_what_the_pump_takes_and_judges_nothing() -> None:
    said: list[str] = []
    rows = list(HttpBench(only=("messages",), quick=True).run(said.append))
    assert [(row.case.name, row.case.unit, row.case.goal, row.met) for row in rows] == [
        ("messages/40/request", "µs", 550.0, None),
        ("messages/40/chunk", "µs", 25.0, None),
    ]
    assert set(rows[0].as_json()["parts"][0]) == {"pump"}
    assert "messages/1/40, ours" in said


def test_its_peers_are_another_transport_and_another_program() -> None:
    assert set(HttpBench.PEERS) == {"aiohttp", "envoy"}
