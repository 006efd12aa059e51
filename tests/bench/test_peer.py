"""Drivers as processes, on small programs that answer as a driver would."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from kvscout_bench import peer
from kvscout_bench.machine import usable_cores
from kvscout_bench.peer import Driver, native_driver
from kvscout_bench.strangers import DriverFailed

ECHO = "import sys, json\nfor line in sys.stdin: print(json.dumps({'asked': line.strip()}), flush=True)"
REFUSES = 'import sys\nfor line in sys.stdin: print(\'{"error": "no such thing"}\', flush=True)'
DIES = "import sys\nsys.stdin.readline()\nsys.exit('out of memory')"
HANGS = "import sys, signal\nsys.stdin.readline()\nsignal.pause()"


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_command_is_one_line_of_words() -> None:
    with Driver(program(ECHO)) as driver:
        assert driver.request("run", workload="find_hashes", seconds=0.5) == {
            "asked": "run workload=find_hashes seconds=0.5"
        }
        assert driver.request("quit") == {"asked": "quit"}


def test_an_error_answer_names_the_command() -> None:
    with Driver(program(REFUSES)) as driver, pytest.raises(DriverFailed, match=r"'run workload=x': no such thing"):
        driver.request("run", workload="x")


def test_a_driver_that_ends_leaves_its_last_words() -> None:
    with Driver(program(DIES)) as driver, pytest.raises(DriverFailed, match="out of memory"):
        driver.request("load")


def test_a_driver_that_does_not_answer_in_time_is_ended() -> None:
    with Driver(program(HANGS)) as driver, pytest.raises(DriverFailed, match="ended at 'load'"):
        driver.request("load", within_seconds=0.2)


def test_a_program_that_is_not_there_is_an_error_and_not_a_traceback() -> None:
    with pytest.raises(DriverFailed, match="cannot be started"):
        Driver(["/nonexistent/driver"])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no threads to cores")
def test_a_driver_is_bound_to_its_core() -> None:
    core = usable_cores()[0]
    asks = "import sys, os\nfor line in sys.stdin: print('{\"cores\": %s}' % list(os.sched_getaffinity(0)), flush=True)"
    with Driver(program(asks)) as driver:
        driver.request("hello")
        driver.pin(core, core)
        assert driver.request("hello") == {"cores": [core]}


def test_without_cargo_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(DriverFailed, match="install Rust"):
        native_driver("kvscout")


def test_without_a_source_tree_the_message_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer, "ROOT", tmp_path)
    with pytest.raises(DriverFailed, match="source tree"):
        native_driver("kvscout")
