"""Turns this process into another program that the kernel kills when its parent ends, however that ended.

Run as a script, `python -I -S child.py PARENT_PID PROGRAM ARGUMENT…`, so that it costs one bare interpreter start. The
setting survives the exec; `preexec_fn` would do the same only by running Python between fork and exec in a process
that has threads. It follows the parent's *thread*: start such children from the main thread.

Only Linux has it. Elsewhere the program runs without: an orderly end of the parent still stops its children.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Request SIGKILL on the parent's death and become the program; never returns.

    Args:
        arguments: Parent's process id, program, its arguments.
    """
    parent, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        # It died before the kernel knew that we care.
        sys.exit(f"parent {parent} has ended")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
