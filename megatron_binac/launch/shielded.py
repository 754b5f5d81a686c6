"""Run Python with signals that a job gets before its limit blocked: `... shielded -m MODULE ...`.

Slurm sends them to every step. The ranks save and leave; a server has to answer until they have.
Blocked signals stay blocked over exec, whatever handlers the program then sets. SIGKILL ends it.
"""

from __future__ import annotations

import os
import signal
import sys

SHIELDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Become `python ARGS` with the signals blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
