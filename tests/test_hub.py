from __future__ import annotations

import socket

import pytest

from bayesattn import hub


def test_behind_a_proxy_the_proxy_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    addresses: list[tuple[str, int]] = []
    monkeypatch.setattr(
        socket, "create_connection", lambda address, timeout: addresses.append(address) or socket.socket()
    )
    assert hub.hub_answers()
    monkeypatch.setenv("https_proxy", "http://proxy.local:3128")
    assert hub.hub_answers()
    assert addresses == [("huggingface.co", 443), ("proxy.local", 3128)]


def test_a_hub_that_refuses_connections_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: object, timeout: float) -> socket.socket:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert not hub.hub_answers()
