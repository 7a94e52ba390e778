"""A study is one folder: the toy study of docs/extending.md has everything that a study has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bayesattn import studies
from bayesattn.cli import make_app
from bayesattn.errors import UserError
from bayesattn.report.page import make_page
from bayesattn.studies.results import read_results

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The toy study in a folder that the registry looks into; the working directory is empty."""
    files = re.findall(r"^```py\n# studies/(\S+)\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["induction/run.py", "induction/show.py"]
    for name, text in files:
        (tmp_path / "added" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "added" / name).write_text(text)
    monkeypatch.setattr(studies, "__path__", [*studies.__path__, str(tmp_path / "added")])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "here"
    for name in [name for name in sys.modules if name.startswith("bayesattn.studies.induction")]:
        del sys.modules[name]


def invoke(command: str) -> Result:
    done = CliRunner().invoke(make_app(), command.split(), env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.exception
    return done


def test_a_toy_study_in_one_folder_has_everything(toy: Path) -> None:
    assert "induction" in invoke("eval --help").output
    told = " ".join(invoke("eval induction --help").output.split())
    for text in ("Whether a model continues", "[default: 1x,4x,16x]", "1<=x<=1000000", "--json FILE"):
        assert text in told
    for model in ("bam-tiny", "rope-tiny"):
        told = invoke(f"eval induction {model} --lengths 1x --trials 4").output
        assert f"{model}: induction, seed 0" in told
        file = toy / "runs" / f"induction-{model}" / "induction.json"
        result = read_results(file, "induction")
        assert (result["model"], result["cells"][0]["trials"]) == (model, 4)
        assert file.with_name("induction.png").stat().st_size > 10_000
        assert "partial" not in result
    before = file.read_text()
    invoke("eval induction rope-tiny --lengths 1x,2x --trials 4")  # goes on
    assert json.loads(file.read_text())["cells"][0] == json.loads(before)["cells"][0]
    page = make_page([toy / "runs"])
    assert '<section id="induction"><h2>Induction</h2>' in page
    assert page.count("128 tokens: ") == 2 * 2
    compared = invoke("compare runs/induction-rope-tiny/induction.json runs/induction-bam-tiny/induction.json").output
    assert "induction: bam-tiny against the first, rope-tiny" in compared


def test_its_files_are_checked_by_the_types_of_its_result(toy: Path) -> None:
    invoke("eval induction bam-tiny --lengths 1x --trials 4 --json mine.json")
    assert "Induction" in make_page([toy / "runs"])  # where a note says where the results are
    whole = json.loads(Path("mine.json").read_text())
    for field, value, sentence in (
        ("cells", None, "mine.json is not a whole file of results: cells is None; a list is needed"),
        ("seed", -1, "mine.json is not a whole file of results: seed is -1; a whole number of at least 0 is needed"),
        ("model", "other", "mine.json holds another evaluation, with other model; choose another file"),
    ):
        Path("mine.json").write_text(json.dumps({**whole, field: value}))
        done = CliRunner().invoke(make_app(), ["eval", "induction", "bam-tiny", "--json", "mine.json"])
        assert isinstance(done.exception, UserError)
        assert str(done.exception) == sentence
    Path("mine.json").unlink()
    with pytest.raises(UserError, match=r"has no results; they were written to .*mine\.json, which has none either"):
        make_page([toy / "runs"])


@pytest.mark.parametrize(
    "command", ["--help", "--version", "eval passkey --help", "convergence --help", "train --help"]
)
def test_help_does_not_import_torch(command: str) -> None:
    script = "import sys\nfrom bayesattn.cli import main\ntry:\n    main()\nfinally:\n    print(sorted(sys.modules))\n"
    done = subprocess.run([sys.executable, "-c", script, *command.split()], capture_output=True, text=True)
    modules = done.stdout.splitlines()[-1]
    assert "'bayesattn.studies.passkey.run'" in modules
    for heavy in ("torch", "numpy", "transformers", "matplotlib", "jinja2"):
        assert f"'{heavy}'" not in modules
