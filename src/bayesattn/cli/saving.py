"""What a command says about its results when it cannot finish."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bayesattn.errors import UserError
from bayesattn.interrupts import keeps

# What the system says of a disk that takes no more; of these errors some come without the name of the file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextmanager
def saving_to(*files: Path) -> Iterator[None]:
    """Within it, results are saved in the files as they come, and the same command resumes."""

    def kept() -> str:
        there = [str(file) for file in files if file.exists()]
        if not there:
            return "there are no results yet, and the same command starts again"
        return f"the results so far are in {', '.join(there[-1:])}, and the same command resumes"

    try:
        with keeps(kept):
            yield
    except OSError as problem:
        if problem.errno not in NO_ROOM:
            raise
        names = [str(file) for file in files if str(file) == str(problem.filename).removesuffix(".partial")]
        raise UserError(
            f"{(names or [str(files[-1])])[0]} cannot be written: {problem.strerror}; {kept()}"
        ) from problem
