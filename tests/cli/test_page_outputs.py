"""Outputs that pages show have the shape of what the commands print now, and their commands run as they stand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cli.test_up import up
from docs_outputs import SEED, marked_pages
from support.page_outputs import Example, Session, rewritten, sessions, shape, shell, shortened

SESSIONS = [
    pytest.param(page, session, id=f"{page.name}-{number}")
    for page in marked_pages()
    for number, session in enumerate(sessions(page.read_text()))
]


def test_the_pages_that_newcomers_read_first_are_marked() -> None:
    assert {"quick-start.md", "grpcurl.md", "operating.md"} <= {page.name for page in marked_pages()}


@pytest.mark.timeout(300)  # a busy machine may need seconds for each command
@pytest.mark.parametrize(("page", "session"), SESSIONS)
async def test_a_page_shows_what_its_commands_print(page: Path, session: Session, tmp_path: Path) -> None:
    commands = [example.command for _, examples in session.blocks for example in examples]
    if any("grpcurl" in command for command in commands) and shutil.which("grpcurl") is None:
        pytest.skip("there is no grpcurl: `make grpcurl` builds it where Go is")
    async with up(tmp_path / ".kvscout", "--seed", SEED, *session.flags) as (process, state):
        addresses = {
            "localhost:7050": state["gateway"],
            "localhost:7051": state["indexer"],
            "localhost:8000": state["openai"].removeprefix("http://").removesuffix("/v1"),
        }
        async with shell(tmp_path, addresses, KVSCOUT_GATEWAY=state["gateway"]) as run:
            for before, examples in session.blocks:
                if before:
                    await run.run(before)
                for example in examples:
                    code, printed = await run.run(example.command)
                    if not example.output:
                        assert code == 0, f"{example.command}: {printed}"
                        continue
                    stale = f"{page.name} shows an output that is not that of now: `make docs-outputs` renews it"
                    assert shape(shortened(printed, example)) == shape(example.output), stale
        if commands[-1] == "kvscout down":
            assert await process.wait() == 0


PAGE = """
<!-- outputs of: kvscout up --mockers 2; after: true -->
```console
$ one
line 12 of gen-0123456789abcdef0123456789abcdef
second

$ silent \\
   continued
$ long
1
…
```
<!-- outputs -->
```
$ other
x
```
"""


def test_marks_name_flags_commands_and_what_is_shown() -> None:
    (session,) = sessions(PAGE)
    assert session.flags == ("--mockers", "2")
    (before, first), (nothing, second) = session.blocks
    assert (before, nothing) == ("true", "")
    assert [example.command for example in first] == ["one", "silent \\\n   continued", "long"]
    assert [bool(example.output) for example in first] == [True, False, True]
    assert [example.output for example in second] == ["x\n"]


def test_a_page_is_rewritten_where_outputs_stand_and_nowhere_else() -> None:
    (session,) = sessions(PAGE)
    shown = [example for _, examples in session.blocks for example in examples if example.output]
    assert rewritten(PAGE, [(example, example.output) for example in shown]) == PAGE.replace(
        "gen-0123456789abcdef0123456789abcdef", "gen-499a46646b6d40568a144a496f980e72"
    )
    renewed = rewritten(PAGE, list(zip(shown, ["a\n", "1\n2\n3\n", "y\n"], strict=True)))
    assert renewed == re.sub(r"line.*\nsecond\n", "a\n", PAGE).replace("\nx\n", "\ny\n")


def test_numbers_may_differ_words_may_not() -> None:
    example = Example("c", "mocker-1   208 of 220 tokens, 35 ms\n", (0, 0))
    assert shape("mocker-3 8 of 9 tokens, 1.2 s\n") == shape(example.output)
    assert shape("mocker-3 8 of 9 blocks, 1.2 s\n") != shape(example.output)
    assert shape("mocker-3 8 of 9 tokens, 1.2 s\nmore\n") != shape(example.output)
