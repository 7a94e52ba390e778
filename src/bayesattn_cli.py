"""The console script: it ends quietly on Ctrl-C and SIGTERM while the command line is imported."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """`bayesattn` on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))
    from bayesattn.cli import main as run

    run()
