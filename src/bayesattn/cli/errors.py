"""How the command line ends: an error that the user can correct is one sentence and exit code 2."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from contextlib import suppress
from itertools import pairwise
from typing import NoReturn

import typer

from bayesattn.errors import UserError, one_line, shown
from bayesattn.files import is_main_process
from bayesattn.interrupts import Interrupted, interruptible

# Typer has a click of its own in some versions; this is the base class of its errors in all of them.
ClickException: type[Exception] = typer.BadParameter.__mro__[2]
# What the extra `demo` brings; other modules come with `train`, or say themselves what brings them.
IN_DEMO = {"huggingface_hub", "safetensors", "tokenizers", "transformers", "yaml"}
# How long other processes of a training run wait with an error that the main process may print just as well. Then its
# launcher ends them.
SECONDS_TO_WAIT = 10.0


def run(app: typer.Typer) -> None:
    """Run the command line; it ends without a traceback for what the user can correct."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # a stream of a test may not have it
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # an ASCII terminal has no ² or √
    code = None
    try:
        with interruptible():
            code = app(standalone_mode=False)
        sys.stdout.flush()
    except Interrupted as stop:
        sys.unraisablehook = lambda _: None  # what was interrupted while it was made may complain when it is deleted
        if is_main_process():  # one line, however many processes train
            _end_bars()
            print(f"bayesattn: {stop}", file=sys.stderr)
        sys.exit(stop.exit_code)
    except BrokenPipeError:  # such as `| head -1`
        _silence()
        sys.exit(1)
    except typer.Abort:
        sys.exit(1)
    except (ClickException, ModuleNotFoundError, OSError, UserError) as problem:
        end(problem)
    if isinstance(code, int) and code:
        sys.exit(code)


def end(problem: Exception) -> NoReturn:
    """Print the error as one sentence, and exit with code 2."""
    if type(problem).__name__ == "NoArgsIsHelpError":  # a command without arguments shows its help
        problem.show()  # type: ignore[attr-defined]
        sys.exit(2)
    try:
        sys.stdout.flush()
    except OSError:
        _silence()  # Python would try again at exit
    if not is_main_process():
        time.sleep(SECONDS_TO_WAIT)
    _end_bars()
    print(f"bayesattn: {sentence(problem)}", file=sys.stderr)
    sys.exit(2)


def sentence(problem: Exception) -> str:
    """An error on one line of at most 300 characters; a longer one loses its middle."""
    if isinstance(problem, ModuleNotFoundError) and problem.name:
        extra = "demo" if problem.name in IN_DEMO else "train"
        text = f"{problem}; this command needs {problem.name}: pip install 'bayesattn[{extra}]'"
    elif isinstance(problem, OSError) and problem.strerror:
        text = problem.strerror
        if problem.filename is not None:
            text = f"{shown(str(problem.filename))} cannot be read or written: {text}"
        elif problem.errno == errno.ENOSPC:  # files are written with their names, so this is the output
            text = f"the output cannot be written: {text}"
    elif isinstance(problem, ClickException):
        text = _usage(problem)
    else:
        text = str(problem)
    return one_line(text)


def _usage(problem: Exception) -> str:
    """Typer's message, with what was given, and where to look up what is allowed."""
    text = problem.format_message().rstrip(".").replace("Value error, ", "")  # type: ignore[attr-defined]
    given = _given(problem)
    text = re.sub(r"Input should be (.*?)(, unable to parse.*)?$", rf"{given} should be \1", text)
    context = getattr(problem, "ctx", None)
    if text.startswith(("Missing", "No such", "Got unexpected")) and context is not None:
        text = text.replace(". Did you mean", "; did you mean")
        text += f"{'' if text.endswith('?') else ';'} `{context.command_path} --help` shows what is allowed"
    return text


def _given(problem: Exception) -> str:
    """The value that was given, where Typer's message has only what is allowed."""
    names = getattr(getattr(problem, "param", None), "opts", ())
    for argument, value in pairwise([*sys.argv[1:], ""]):
        name, equals, joined = argument.partition("=")
        if name in names:
            return shown(joined if equals else value)
    return "the value"


def _end_bars() -> None:
    """Close progress bars that are still there, so that a sentence has a line of its own."""
    if (tqdm := sys.modules.get("tqdm")) is not None:
        for bar in list(getattr(tqdm.tqdm, "_instances", ())):
            with suppress(Exception):  # one that is half made
                bar.close()


def _silence() -> None:
    """Send what is left of the output nowhere."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
