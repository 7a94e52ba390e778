"""Files are written completely or not at all, and what cannot be written is said with its name before work begins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bayesattn import demo
from bayesattn.drawing.figures import make_figure, save_figure
from bayesattn.errors import UserError
from bayesattn.files import check_writable, write_whole
from tests.bad_inputs.cases import changed, write
from tests.bad_inputs.rows import check_refused


def refused_places(tmp_path: Path) -> dict[Path, str]:
    (tmp_path / "file").write_text("before")
    (tmp_path / "folder").mkdir()
    return {
        Path("/"): "it is a folder",
        tmp_path / "folder": "it is a folder",
        tmp_path / "file" / "below.json": "Not a directory",
        tmp_path / "file" / "far" / "below.json": "Not a directory",
        tmp_path / ("x" * 300): "File name too long",
        tmp_path / ("x" * 250): "File name too long",  # with the suffix of the file before it is complete
        Path("/dev/full"): "it is not a regular file",
        tmp_path / "a\0b": "null",
    }


def test_places_that_cannot_be_written_are_named_before_and_while_writing(tmp_path: Path) -> None:
    places = refused_places(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for path, reason in places.items():
        for act in (lambda path=path: check_writable(path), lambda path=path: write_whole(path, "text")):  # type: ignore[misc]
            check_refused(act, "cannot be written: ")
            with pytest.raises(UserError, match=reason):
                act()
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "before"


def test_checking_a_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("before")
    (tmp_path / "there.json.partial").write_text("of a run that is still writing")
    check_writable(tmp_path / "there.json", tmp_path / "new.json", tmp_path / "a" / "b" / "new.json")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["there.json", "there.json.partial"]
    assert (tmp_path / "there.json").read_text() == "before"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_keeps_the_file_before_and_leaves_no_part(tmp_path: Path) -> None:
    file = tmp_path / "there.json"
    file.write_text("before")
    (tmp_path / "there.json.partial").symlink_to("/dev/full")
    check_refused(lambda: write_whole(file, "after"), "there.json cannot be written: No space left on device")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"there.json": "before"}
    (tmp_path / "picture.png.partial").symlink_to("/dev/full")
    check_refused(
        lambda: save_figure(make_figure(1, 1), tmp_path / "picture"),
        "picture.png cannot be written: No space left on device",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]


def test_text_that_is_no_text_is_refused(tmp_path: Path) -> None:
    check_refused(lambda: write_whole(tmp_path / "x", "\ud800"), "cannot be written: surrogates not allowed")
    assert list(tmp_path.iterdir()) == []


def test_the_demo_checks_the_place_before_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from bayesattn.cli import app

    def measure(*_: object, **__: object) -> None:
        raise AssertionError("it measured first")

    monkeypatch.setattr(demo, "demo", measure)
    (tmp_path / "taken").write_text("a file")
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "taken")])
    assert isinstance(done.exception, UserError)


def run(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    line = f"{sys.executable} -m bayesattn.cli {command}"
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=folder, env={**os.environ, **environment}
    )


def test_an_ascii_terminal_gets_ascii(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "passkey")
    write(tmp_path / "b.json", "passkey", changed("passkey", "model", "größer"))
    done = run("compare a.json b.json", tmp_path, PYTHONIOENCODING="ascii", COLUMNS="120")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "gr??er" in done.stdout


def test_output_that_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        write(tmp_path / name, "passkey")
    done = run("compare a.json b.json | head -1", tmp_path)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    done = run("--version > /dev/full", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "bayesattn: the output cannot be written: No space left on device\n"


def test_commands_without_arguments_show_their_help(tmp_path: Path) -> None:
    done = run("eval", tmp_path)
    assert "Usage: " in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
