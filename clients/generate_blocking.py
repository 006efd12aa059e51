"""Write the blocking client from the asynchronous one: the same methods with the same signatures.

`generate_blocking.py` writes kvscout_client/blocking_router.py; `generate_blocking.py --check` exits 1 if it is not up
to date.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).resolve().parent / "kvscout_client"
BLOCKING = CLIENT / "blocking_router.py"
OWN = frozenset({"__init__", "__aenter__", "__aexit__", "close"})
"""Methods that the base class has in a form of its own."""

HEADER = '''"""The blocking forms of `Router` and `Booking`. Written by clients/generate_blocking.py: do not edit."""

from __future__ import annotations

'''


def generated() -> str:
    """Return the text of the blocking client, as ruff formats it."""
    router = ast.parse((CLIENT / "router.py").read_text())
    booking = ast.parse((CLIENT / "booking.py").read_text())
    imports = [node for tree in (router, booking) for node in tree.body if _is_import(node)]
    text = (
        HEADER
        + "\n".join(ast.unparse(node) for node in imports)
        + "\nfrom collections.abc import Iterator\n"
        + "from kvscout_client.blocking import BlockingBookingBase, BlockingRouterBase\n"
        + "from kvscout_client.router import UNCHANGED, Unchanged, WorkerId\n\n"
        + _class(router, "Router", "BlockingRouter", "self._router", "BlockingRouterBase")
        + _class(booking, "Booking", "BlockingBooking", "self._booking", "BlockingBookingBase")
    )
    for arguments in (("check", "--fix", "--exit-zero", "--select", "F401,F811,I"), ("format",)):
        command = [sys.executable, "-m", "ruff", *arguments, "--quiet", "--stdin-filename", str(BLOCKING), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom)) and ast.unparse(node) != "from __future__ import annotations"


def _class(tree: ast.Module, of: str, name: str, inner: str, base: str) -> str:
    [original] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == of]
    methods = [
        _method(method, of, inner)
        for method in original.body
        if isinstance(method, ast.AsyncFunctionDef) and method.name not in OWN and not method.name.startswith("_")
    ]
    head = f'class {name}({base}):\n    """`{of}` for code without an event loop, and for any number of threads."""\n\n'
    return head + "\n".join(methods) + "\n\n"


def _method(method: ast.AsyncFunctionDef, of: str, inner: str) -> str:
    overloaded = any(ast.unparse(one) == "overload" for one in method.decorator_list)
    returns = ast.unparse(method.returns) if method.returns is not None else "None"
    streams = returns.startswith("AsyncGenerator[")
    if streams:
        returns = "Iterator[" + returns.removeprefix("AsyncGenerator[").removesuffix(", None]") + "]"
    returns = returns.replace("Booking", "BlockingBooking")
    head = f"def {method.name}({ast.unparse(method.args)}) -> {returns}:"
    if overloaded:
        return _indented(f"@overload\n{head} ...")
    arguments = ", ".join(
        [*(one.arg for one in method.args.args[1:]), *(f"{one.arg}={one.arg}" for one in method.args.kwonlyargs)]
    )
    call = f"{inner}.{method.name}({arguments})"
    body = f"return self._each({call})" if streams else f"return self._answer({call})"
    if "BlockingBooking" in returns:
        # Which of the overloads it is, is known to the caller alone.
        body = (
            f"inner: Any = {inner}\n    "
            f"answer: RouteDecision | Booking = self._answer(inner.{method.name}({arguments}))\n    "
            "return BlockingBooking(self, answer) if isinstance(answer, Booking) else answer"
        )
    return _indented(f'{head}\n    """See `{of}.{method.name}`."""\n    {body}')


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in text.splitlines()) + "\n"


def main() -> None:
    text = generated()
    if "--check" not in sys.argv[1:]:
        BLOCKING.write_text(text)
    elif BLOCKING.read_text() != text:
        raise SystemExit(f"{BLOCKING.name} is not up to date (run `make protos`)")


if __name__ == "__main__":
    main()
