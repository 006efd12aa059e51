"""What is read of a machine."""

from __future__ import annotations

from kvscout_bench.machine import cpu_model, memory_kib, this_machine, usable_cores


def test_the_cpu_is_the_first_model_name() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: A CPU: fast\nmodel name\t: another\n") == "A CPU: fast"
    assert cpu_model("") == ""


def test_the_memory_is_the_total() -> None:
    assert memory_kib("MemTotal:       1048576 kB\nMemFree: 1 kB\n") == 1048576
    assert memory_kib("") == 0


def test_this_machine_has_cores_and_a_python() -> None:
    machine = this_machine()
    assert machine.cores == len(usable_cores()) >= 1
    assert machine.python.startswith("3.")
