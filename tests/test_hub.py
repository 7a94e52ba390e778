from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoConfig, AutoTokenizer

from bayesattn import hub
from bayesattn.data import tokenizer
from bayesattn.errors import UserError
from bayesattn.models import loading
from tests.bad_inputs.rows import check_refused

Addresses = list[tuple[str, int]]


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> Addresses:
    """Addresses that are tried; all of them answer."""
    for name in ("http", "https", "all", "no"):
        for variable in (f"{name}_proxy", f"{name}_proxy".upper()):
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    tried: Addresses = []
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: tried.append(address) or socket.socket())
    return tried


def test_behind_a_proxy_the_proxy_is_tried(addresses: Addresses, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.hub_answers()
    monkeypatch.setenv("https_proxy", "http://proxy.local:3128")
    assert hub.hub_answers()
    monkeypatch.setenv("https_proxy", "proxy.local")
    assert hub.hub_answers()
    assert addresses == [("huggingface.co", 443), ("proxy.local", 3128), ("proxy.local", 80)]


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("http://mirror.local", ("mirror.local", 80)),
        ("https://mirror.local", ("mirror.local", 443)),
        ("http://mirror.local:8080/hf", ("mirror.local", 8080)),
    ],
)
def test_the_port_is_that_of_the_endpoint(
    endpoint: str, address: tuple[str, int], addresses: Addresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert hub.hub_answers()
    assert addresses == [address]


def test_offline_nothing_is_tried(addresses: Addresses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub.hub_answers()
    assert addresses == []


@pytest.mark.parametrize("endpoint", ["http://[bad", "https://mirror.local:port"])
def test_an_endpoint_that_cannot_be_read_does_not_answer(
    endpoint: str, addresses: Addresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert not hub.hub_answers()


def test_a_hub_that_refuses_connections_does_not_answer(addresses: Addresses, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: object, timeout: float) -> socket.socket:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert not hub.hub_answers()


@pytest.mark.parametrize(
    ("auto", "load"), [(AutoConfig, loading.load_config), (AutoTokenizer, tokenizer.load_tokenizer)]
)
def test_local_files_come_first_and_the_hub_is_asked_only_without_them(
    auto: type, load: Callable[[str], object], addresses: Addresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2Config, PreTrainedConfig

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", lambda name, **_: ({}, {}))
    cached = {"there/local"}
    asked: list[bool] = []

    def from_pretrained(name: str, *, local_files_only: bool = False, **_: object) -> object:
        asked.append(local_files_only)
        if name not in cached:
            raise OSError("it is not in the cache")
        return GPT2Config()

    monkeypatch.setattr(auto, "from_pretrained", from_pretrained)
    assert load("there/local")
    assert (asked, addresses) == ([True], [])
    with pytest.raises(UserError):
        load("not/there")
    assert (asked, addresses) == ([True, True, False], [("huggingface.co", 443)])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="the hub cannot be reached"):
        load("not/there")
    assert (asked, addresses) == ([True, True, False, True], [("huggingface.co", 443)])


def test_sizes_that_no_model_has_are_refused_in_the_cache_of_the_hub_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--some--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("1" * 40)
    config = model / "snapshots" / ("1" * 40) / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"model_type": "gpt2"}')
    assert loading.load_config("some/model")[0].model_type == "gpt2"
    for sizes in ('"vocab_size": 1000000000000', '"text_config": {"vocab_size": 1000000000000}'):
        config.write_text(f'{{"model_type": "gpt2", {sizes}}}')
        check_refused(
            lambda: loading.load_config("some/model"), "some/model is not a model: vocab_size in its config.json is"
        )
