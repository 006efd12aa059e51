"""`make h2spec`: the cases of RFC 7540 and 7541 that h2spec has, against an indexer on the native transport.

h2spec is built by Go the first time, into `.kvscout/peers`; bench/strangers.env has its version. It speaks plain HTTP,
which a gRPC server answers with headers alone, so a few of its cases wait for what cannot come. On a busy machine that
answer, which ends a stream, can also be there before the frame that h2spec wants to see refused on it: what fails is
tried again. A case that is met in no run ends this with 1.
"""

from __future__ import annotations

import asyncio
import re
import sys

from support.processes import running

from kvscout_bench.strangers import go_program

NOT_OURS = {
    "Sends a WINDOW_UPDATE frame on half-closed (remote) stream": "waits for a body: the answer to no gRPC is 415",
    "Sends a PRIORITY frame on half-closed (remote) stream": "the same",
    "Sends HEADERS frames that causes their advertised concurrent stream limit to be exceeded": "answered at once with"
    " 415, so that they are never open together; tests/transport counts calls that are",
    "Sends a HEADERS frame that contains a pseudo-header field as trailers": "the call is over with 415 before them",
    "Sends invalid connection preface": "the connection is closed, with a reset as it has bytes that nobody read",
}
"""Cases that cannot be met, and why."""
RUNS = 3


async def failures(port: int) -> set[str]:
    """Runs all cases once; the names of those that fail."""
    command = [str(go_program("H2SPEC")), "-h", "127.0.0.1", "-o", "5", "-p", str(port)]
    spec = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await spec.communicate()
    text = output.decode()
    print(text)
    if "tests," not in text:
        raise SystemExit("h2spec did not come to its end")
    return set(re.findall(r"^\s*× \d+: (.*)$", text.partition("Failures:")[2], re.MULTILINE))


async def main() -> int:
    """Runs it until each case was met once, but those that are not ours; 0 if that was so."""
    async with running("kvscout_indexer.main", "--rpc-transport", "native") as indexer:
        never_met = await failures(indexer.ready["port"])
        for _ in range(RUNS - 1):
            if never_met <= NOT_OURS.keys():
                break
            print("once more, for", *sorted(never_met - NOT_OURS.keys()), sep="\n  ")
            never_met &= await failures(indexer.ready["port"])
    if never_met - NOT_OURS.keys():
        print("failed:", *sorted(never_met - NOT_OURS.keys()), sep="\n  ")
        return 1
    for case in sorted(never_met):
        print(f"not ours: {case}: {NOT_OURS[case]}")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
