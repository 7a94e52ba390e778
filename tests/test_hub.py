from __future__ import annotations

import socket

import pytest

from bayesattn import hub


def test_behind_a_proxy_it_is_the_proxy_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: asked.append(address) or socket.socket())
    assert hub.hub_answers()
    monkeypatch.setenv("https_proxy", "http://proxy.local:3128")
    assert hub.hub_answers()
    assert asked == [("huggingface.co", 443), ("proxy.local", 3128)]
