"""Mistakes a user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """Said in one sentence: what was given, what is allowed. The command line prints it and exits with code 2."""
