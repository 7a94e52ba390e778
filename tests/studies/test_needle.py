"""RULER's tasks, compared with those of lm-eval."""

from __future__ import annotations

import random
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bayesattn.cli import app
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.data.wordings import lexicon
from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.evaluation.trials import measure
from bayesattn.studies.needle import tasks as needle
from bayesattn.studies.needle.tasks import KINDS, Task, longest_prompt, score
from bayesattn.studies.results import read_results


@pytest.fixture(scope="module")
def reader() -> Reader:
    return load_reader("bam-tiny")


@pytest.mark.parametrize("length", [1200, 5000])
@pytest.mark.parametrize("name", KINDS)
def test_prompts_fill_the_length_and_hold_their_answers(reader: Reader, name: str, length: int) -> None:
    prompt = longest_prompt(name, 3, length, reader)
    text = reader.tokenizer.decode(prompt.ids)
    room = length - KINDS[name].answer_tokens
    # A unit more of haystack would not fit; the longest is a sentence of the text or a word that occurs thirty times.
    assert room - (300 if name == "common-words" else 420) < len(prompt.ids) <= room
    for answer in prompt.answers:
        assert answer in text
    assert len(prompt.answers) == {"multivalue": 4, "multiquery": 4, "variables": 5, "common-words": 10}.get(name, 1)
    assert prompt == longest_prompt(name, 3, length, reader)
    assert prompt != longest_prompt(name, 4, length, reader)


def test_scores_are_shares_of_the_answers_found() -> None:
    assert score("They are ABC and def.", ["abc", "DEF", "ghi", "jkl"]) == 0.5
    assert score("", ["abc"]) == 0


class Repeater(torch.nn.Module):
    """Answers every prompt with the same tokens."""

    device = torch.device("cpu")

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.ids = ids

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
        return torch.cat([ids, torch.tensor([self.ids[:max_new_tokens]]).expand(len(ids), -1)], 1)


class Anything(Reader):
    def bytes_needed(self, length: int) -> int:
        return length


def test_a_task_is_measured_like_any_other() -> None:
    tokenizer = load_tokenizer("tokenizer")
    prompt = Task("multiquery").prompts(Anything("", None, tokenizer, 128))(Random("0 multiquery 1500 0"), 1500, None)
    half = Anything("half", Repeater(tokenizer.encode(" ".join(prompt.answers[:2]))), tokenizer, 128)
    cell = measure(half, Task("multiquery"), 1500, 1)
    assert (cell.right, cell.accuracy, cell.trials) == (0.5, 0.5, 1)
    assert cell.to_dict()["outcomes"] == [[0.0, 0.5]]


def test_a_model_with_few_positions_has_room_for_prompt_and_answer(reader: Reader) -> None:
    class Few(Anything):
        most_positions = 400

    few = Few("few", Repeater(reader.ids(" 1234567")), reader.tokenizer, 128)
    assert measure(few, Task("single"), 400, 1).trials == 1


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(UserError, match="there is no task 'niah'; there are single, single-text"):
        Task("niah")


def test_a_length_without_room_for_the_task_is_refused(reader: Reader) -> None:
    with pytest.raises(UserError, match=r"the task multikey needs at least \d+ tokens; 200 are given"):
        longest_prompt("multikey", 0, 200, reader)


def test_common_words_end_where_the_words_do(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    few = lexicon()[:3000]  # which is quicker
    monkeypatch.setattr(needle, "lexicon", lambda: few)
    with pytest.raises(UserError, match="common-words has words for at most about") as refused:
        longest_prompt("common-words", 0, 400_000, reader)
    most = int(re.findall(r"[\d,]+", str(refused.value))[0].replace(",", ""))
    assert (
        0.97 * most
        < len(longest_prompt("common-words", 1, most, reader).ids) + KINDS["common-words"].answer_tokens
        <= most
    )


class Characters:
    """A tokenizer of some characters; others are lost."""

    bos_token_id = None

    def __init__(self, lost: str = "", lower: bool = False) -> None:
        self.lost, self.lower = lost, lower

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(c) for c in (text.lower() if self.lower else text) if not re.match(self.lost or "$.", c)]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize("name", KINDS)
def test_a_tokenizer_that_loses_answers_is_refused(name: str) -> None:
    lost = {"variables": "[A-Z]", "common-words": "[a-z]"}.get(name, r"\d")
    sentence = "the tokenizer of lossy cannot represent '.*'; one that keeps its words is needed"
    with pytest.raises(UserError, match=sentence):
        Task(name).prompts(Reader("lossy", None, Characters(lost), 128))
    Task(name).prompts(Reader("lower", None, Characters(lower=True), 128))  # case does not matter


def test_eval_needle_writes_what_it_prints_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    command = ["eval", "needle", "bam-tiny", "--lengths", "340", "--trials", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--task", "single", "--json", str(file)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert "bam-tiny: single, mean share of answers found" in done.output
    kept = read_results(file, "needle")
    (cell,) = kept["cells"]
    assert (kept["model"], cell["task"], cell["length"], cell["trials"]) == ("bam-tiny", "single", 340, 2)
    assert not (tmp_path / "needle.json").exists()
    more = [*command[:4], "340,380", *command[5:], "--task", "single,multikey-needles", "--json", str(file)]
    done = CliRunner().invoke(app, more, env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    cells = read_results(file, "needle")["cells"]
    assert [(c["task"], c["length"]) for c in cells] == [
        (task, length) for task in ("single", "multikey-needles") for length in (340, 380)
    ]
    assert cells[0] == cell
    assert (tmp_path / "needle.png").stat().st_size > 10_000


def shape(text: str) -> str:
    """A prompt without what is drawn at random."""
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "UUID", text)
    text = re.sub(r"\b[A-Za-z]+(-[A-Za-z]+)+\b", "KEY", text)
    text = re.sub(r"\b[A-Z]{5}\b", "NAME", text)
    text = re.sub(r"\b(?!VAR\b)[A-Z]{3}\b", "ABC", text)
    return re.sub(r"\d+", "N", text)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("single", "niah_single_1"), ("multikey-needles", "niah_multikey_2"), ("multikey-uuids", "niah_multikey_3")],
)
def test_needles_are_worded_and_judged_as_in_lm_eval(reader: Reader, name: str, theirs: str) -> None:
    niah = pytest.importorskip("lm_eval.tasks.ruler.prepare_niah")
    template = pytest.importorskip("lm_eval.tasks.ruler.niah_utils").TEMPLATE
    kind = KINDS[name]
    random.seed(0)  # theirs are drawn from the module's own
    (example,) = niah.generate_samples(
        niah.get_haystack(type_haystack=kind.haystack), TOKENIZER=reader.tokenizer, max_seq_length=2000,
        type_haystack=kind.haystack, type_needle_k=kind.key_kind, type_needle_v=kind.value_kind, template=template,
        num_samples=1,
    )  # fmt: skip
    ours = needle._needles(Random(0), 40, kind)
    line = {shape(line) for line in example["input"].splitlines()}
    assert {shape(line) for line in ours.text.splitlines()} == line
    assert shape(ours.prefix) == shape(example["gen_prefix"])


def test_variables_and_their_solved_example_are_worded_as_in_lm_eval(
    reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = pytest.importorskip("lm_eval.tasks.ruler.vt_utils")
    random.seed(0)
    make = theirs.sys_vartrack_w_noise_random
    (example,) = make(reader.tokenizer, num_samples=1, max_seq_length=500, incremental=5)
    (document,) = make(reader.tokenizer, num_samples=1, max_seq_length=2000, icl_example=example)
    capsys.readouterr()  # what it prints
    ours = needle._maker("variables", 2000, reader)(Random(0), 30)

    def parts(text: str) -> list[str]:
        """The solved example and the question, without their assignments, which may stand anywhere."""
        assignment = r"VAR \w+ = (VAR \w+ |\d+)"
        example, question = text.split("\n\n\n\n")
        assert len(re.findall(assignment, example)) == len(re.findall(assignment, question)) == 5
        return [" ".join(shape(re.sub(assignment, "", part)).split()) for part in (example, question)]

    (our_example, our_question), (their_example, their_question) = parts(ours.text), parts(document["input"])
    assert our_example == their_example
    assert "they are: ABC ABC ABC ABC ABC" in our_example
    filler = needle.FILLER
    assert re.sub(f"({filler} )+", "", our_question) == re.sub(f"({filler} )+", "", their_question)
    assert shape(ours.prefix) == shape(document["gen_prefix"])
    assert len(ours.answers) == len(document["outputs"])


def test_common_words_are_worded_as_in_lm_eval() -> None:
    theirs = pytest.importorskip("lm_eval.tasks.ruler.cwe_utils")
    _, text, answers = theirs.generate_input_output(30, 2000)
    ours = needle._common_words(Random(0), 20, 6, 1)

    def frame(prompt: str) -> list[str]:
        return [line for line in prompt.splitlines() if not line.startswith("1.")]

    assert frame(f"{ours.text} {ours.prefix}") == frame(text)
    assert len(ours.answers) == len(answers)
    assert len(re.findall(r"\d+\. ", ours.text)) == len(re.findall(r"\d+\. ", text))


def test_answers_are_judged_as_in_lm_eval() -> None:
    theirs = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    for text, answers in (("It is 12 and AB", ["12", "ab", "cd"]), ("nothing", ["x"]), ("x", ["x"])):
        expected = theirs.string_match_all([text], [answers])
        assert score(text, answers) == pytest.approx(expected / (100 if expected > 1 else 1), abs=5e-3)
