"""Folders of models that are damaged: settings, weights that are not finite or not there, and tokenizers."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bayesattn.compute import cards
from bayesattn.data.text import documents
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError
from bayesattn.evaluation import passkey
from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.evaluation.trials import measure
from bayesattn.models.loading import load_model
from bayesattn.models.shipped import resolve
from bayesattn.studies.convergence.layers import load
from bayesattn.studies.harness import run as harness
from bayesattn.studies.heads import measure as heads
from bayesattn.studies.passkey import dense
from bayesattn.studies.perplexity import measure as perplexity
from bayesattn.studies.results import write_results
from tests.bad_inputs.rows import Row, check_command_refused, check_refused

HUGE = 10**400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve("bam-tiny"), tmp_path / "mine"))


FILES = [
    Row("empty", b"", "is not JSON"),
    Row("bytes", b"\xff\xfe", "is not JSON"),
    Row("deep", b"[" * 100_000, "is not JSON"),
    Row("deep setting", b'{"model_type": "bam", "prior_init": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
    Row("number", b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
    Row("list", b"[]", ""),
    Row("null", b"null", ""),
    Row("text", b'"bam"', ""),
    Row("no settings", b"{}", ""),
]


@pytest.mark.parametrize("row", FILES, ids=lambda row: row.name)
def test_a_file_that_is_no_configuration_is_refused(row: Row, folder: Path, tried: Callable[[str, int], None]) -> None:
    file = folder / "config.json"
    file.write_bytes(row.given)  # type: ignore[arg-type]
    for read in (lambda: load_model(folder), lambda: load_reader(str(folder)), lambda: cards.find(str(file))):
        check_refused(read, row.says)
        tried("bad inputs", 1)


SETTINGS = [
    *(Row("hidden_size", value, "hidden_size") for value in ("many", 0, -1, 1.5, True, [], {}, HUGE, float("nan"))),
    *(Row("num_hidden_layers", value, "num_hidden_layers") for value in ("3", 0, -1, 10**9, HUGE)),
    *(Row("num_attention_heads", value, "") for value in ("4", 0, -1, 3, HUGE)),
    *(Row("num_key_value_heads", value, "") for value in ("4", 0, -1, 3, HUGE)),
    *(Row("vocab_size", value, "vocab_size") for value in ("many", 0, -1, HUGE)),
    *(Row("head_dim", value, "") for value in ("many", 0, -1, HUGE)),
    *(Row("intermediate_size", value, "") for value in ("many", 0, -1, HUGE)),
    *(Row("training_length", value, "training_length") for value in ("many", 0, -1, HUGE)),
    *(Row("position", value, "") for value in ("odd", 3, [], None)),
    *(Row("model_type", value, "") for value in ("odd", 3, [], "")),
    *(Row("prior_epsilon", value, "") for value in ("odd", -1, float("nan"), HUGE)),
]


@pytest.mark.parametrize("row", SETTINGS, ids=str)
def test_a_wrong_setting_is_refused(row: Row, folder: Path, tried: Callable[[str, int], None]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {row.name: row.given}))
    check_refused(lambda: load_reader(str(folder)), row.says)
    tried("bad inputs", 1)


SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 100, "model_type": "llama"}
CARDS = [
    *(Row(name, value, name) for name in SIZES if name != "model_type" for value in (0, -1, "2", [], 1.5, HUGE, None)),
    *(Row("num_key_value_heads", value, "num_key_value_heads") for value in (0, "2", HUGE)),
    *(Row("head_dim", value, "head_dim") for value in (0, "2", HUGE)),
    *(Row("intermediate_size", value, "intermediate_size") for value in (0, "2", HUGE)),
    Row("text_config", {"hidden_size": "64"}, "hidden_size"),
    Row("text_config", {"num_attention_heads": 0}, "num_attention_heads"),
    Row("num_attention_heads", 65, "head_size of"),
]


@pytest.mark.parametrize("row", CARDS, ids=str)
def test_costs_are_not_counted_for_sizes_that_no_model_has(
    row: Row, tmp_path: Path, tried: Callable[[str, int], None]
) -> None:
    (tmp_path / "c.json").write_text(json.dumps(SIZES | {row.name: row.given}))
    check_refused(lambda: cards.find(str(tmp_path / "c.json")), row.says)
    tried("bad inputs", 1)


def test_the_sizes_of_a_model_for_text_and_images_are_those_of_its_text_part(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"model_type": "mix", "hidden_size": 8, "text_config": SIZES}))
    assert cards.find(str(tmp_path / "c.json")).hidden == 64


TOKENIZERS = [
    Row("tokenizer.json", text, "no tokenizer that can be loaded")
    for text in ("", "[" * 100_000, "{}", "3", '{"model": {"type": "BPE"}}')
]


@pytest.mark.parametrize("row", TOKENIZERS, ids=str)
def test_a_damaged_tokenizer_is_refused(row: Row, folder: Path, tried: Callable[[str, int], None]) -> None:
    (folder / row.name).write_text(str(row.given))
    check_refused(lambda: load_reader(str(folder)), row.says)
    check_refused(lambda: load(str(folder)), row.says)
    tried("bad inputs", 2)


LINES = [
    Row("deep", "[" * 100_000, "is not JSON"),
    Row("number", '{"text": 3}', "is 3; a text is needed"),
    Row("long", json.dumps({"text": ["x" * 5000]}), "a text is needed"),
    Row("half a character", '{"text": "\\ud800"}', "has half of a character"),
    Row("huge", '{"text": ' + "9" * 5000 + "}", "is not JSON"),
    Row("list", "[1]", "is not JSON"),
    Row("empty", "{}", "is not JSON"),
]


@pytest.mark.parametrize("row", LINES, ids=lambda row: row.name)
def test_a_line_that_is_no_document_is_refused(row: Row, tmp_path: Path, tried: Callable[[str, int], None]) -> None:
    (tmp_path / "d.jsonl").write_text(f'{{"text": "good"}}\n{row.given}\n')
    check_refused(lambda: list(documents(str(tmp_path / "d.jsonl"))), row.says)
    tried("bad inputs", 1)


def damaged(folder: Path, value: float, name: str = "model.layers.1.mlp.down_proj.weight") -> Path:
    weights = load_file(folder / "model.safetensors")
    key = name if name in weights else next(key for key in weights if "layers.1" in key)
    weights[key].view(-1)[3] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(value: float, folder: Path, tried: Callable[[str, int], None]) -> None:
    damaged(folder, value)
    for read in (lambda: load_reader(str(folder)), lambda: load(str(folder)), lambda: load_model(folder)):
        check_refused(read, "are not finite, those of model.layers.1")
        tried("bad inputs", 1)


COMMANDS = [
    "eval passkey mine --lengths 1x --trials 1 --json out.json",
    "eval passkey mine --lengths 1x --trials 1 --teacher-forced --json out.json",
    "eval needle mine --task single --lengths 512 --trials 1 --json out.json",
    "eval perplexity mine --lengths 0,1x --windows 2 --json out.json",
    "eval perplexity mine --lengths 4x --windows 2 --by position --json out.json",
    "inspect mine --tokens 64 --json out.json",
    "advise mine --length 128 --json out.json",
    "convergence model mine --tokens 64 --replicates 8 --json out.json",
]


def overflowing(folder: Path) -> None:
    """Make all weights finite and so large that no product of them is."""
    weights = load_file(folder / "model.safetensors")
    for key, tensor in weights.items():
        if "norm" in key or "mlp" in key or "v_proj" in key or "o_proj" in key:
            tensor.fill_(3e38)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.slow  # it starts lm-eval, which also prints to the terminal
def test_logits_that_are_not_finite_end_tasks_of_lm_eval(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    overflowing(folder)
    with pytest.raises(UserError, match=r"mine gives .* that are not finite"):
        harness.measure(load_reader(str(folder)), ["niah_single_1"], length=512, limit=1)


@pytest.mark.parametrize("command", COMMANDS)
def test_logits_that_are_not_finite_end_every_measurement_and_touch_no_file(
    command: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tried: Callable[[str, int], None],
) -> None:
    overflowing(folder)
    check_command_refused(command.split(), "mine gives", folder.parent, monkeypatch, capsys)
    tried("bad inputs", 1)


def test_an_excluded_token_is_no_error() -> None:
    reader = load_reader("bam-tiny")
    ids, head = torch.zeros(1, 8, dtype=torch.long), reader.model.lm_head
    excluding = head.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, torch.arange(1000), -torch.inf))
    assert reader.last_logits(ids, 1).isneginf().sum() == 1000
    excluding.remove()
    head.register_forward_hook(lambda _, __, logits: torch.full_like(logits, -torch.inf))
    with pytest.raises(UserError, match="bam-tiny gives logits that are not finite"):
        reader.last_logits(ids, 1)


def test_a_model_that_is_measured_stays_as_it_was(folder: Path) -> None:
    reader = load_reader(str(folder))
    ids = torch.zeros(1, 8, dtype=torch.long)
    before = reader.last_logits(ids, 1)
    pickle.dumps(reader.model)
    twin = copy.deepcopy(reader.model)
    with torch.no_grad():
        for weights in twin.parameters():
            weights.zero_()
    assert torch.equal(reader.last_logits(ids, 1), before)
    assert not twin(ids).logits.any()  # it computes with its own weights
    overflowing(folder)
    broken = load_reader(str(folder))
    with pytest.raises(UserError, match="gives"):
        broken.last_logits(ids, 1)
    assert all("forward" not in vars(part) and not part._forward_hooks for part in broken.model.modules())


@pytest.mark.parametrize("call", ["last_logits", "generate", "token losses", "posteriors", "cache", "dense"])
def test_a_reader_made_by_hand_is_checked_too(call: str, folder: Path) -> None:
    overflowing(folder)
    reader = Reader("mine", load_model(folder), load_tokenizer("tokenizer"), 128)
    ids = np.arange(128, dtype=np.int32)
    calls: dict[str, Callable[[], object]] = {
        "last_logits": lambda: reader.last_logits(torch.zeros(1, 8, dtype=torch.long), 1),
        "generate": lambda: measure(reader, passkey.Task(), 128, 1),
        "token losses": lambda: perplexity.by_position(reader, [ids], 128, parts=2),
        "posteriors": lambda: heads.posteriors(reader, ids, 64),
        "cache": lambda: heads.cache_sizes(reader, ids, [128], 64),
        "dense": lambda: dense.compare(reader, passkey.Task(), 128),
    }
    check_refused(calls[call], "mine gives")


def test_a_study_of_layers_does_not_start_with_missing_weights(folder: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    file = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "layers.2" not in k}, file, {"format": "pt"})
    check_refused(lambda: load(str(folder)), "of the model's weights, model.layers.2")
    sizes = {"vocab_size": 1024, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, intermediate_size=16)).save_pretrained(tmp_path / "bert")
    file = tmp_path / "bert" / "model.safetensors"
    whole = load_file(file)
    save_file({k: v for k, v in whole.items() if "pooler" not in k}, file, {"format": "pt"})
    assert load(str(tmp_path / "bert"), "tokenizer")  # the pooler comes after all layers
    save_file({k: v for k, v in whole.items() if "query" not in k}, file, {"format": "pt"})
    check_refused(lambda: load(str(tmp_path / "bert"), "tokenizer"), "of the model's weights, encoder.layer.0")


def test_heads_without_a_scale_are_null_in_json_and_the_report_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bayesattn import BamConfig, BamForCausalLM
    from bayesattn.report.page import make_page
    from bayesattn.studies.results import read_results

    flat = BamForCausalLM(BamConfig.preset("tiny", prior_init="zeros")).eval()  # β = 0 has no scale
    reader = Reader("flat", flat, load_tokenizer("tokenizer"), 128)
    rows = heads.heads(reader, (64, 128))
    posteriors = heads.posteriors(reader, reader.stream("bundled"), 64)
    cache = heads.cache_sizes(reader, reader.stream("bundled"), [128], 64)
    content = {"model": "flat", "lengths": [64, 128], "heads": [row.to_dict() for row in rows]}
    content |= {"posteriors": [row.to_dict() for row in posteriors], "cache": [row.to_dict() for row in cache]}
    write_results(tmp_path / "inspect.json", "inspect", content)
    text = (tmp_path / "inspect.json").read_text()
    json.loads(text, parse_constant=pytest.fail)
    assert None in read_results(tmp_path / "inspect.json", "inspect")["heads"][0]["parameters"].values()
    assert "<td" in make_page([tmp_path / "inspect.json"])
