"""Whether the Hugging Face hub can be reached."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

# Seconds to wait before it is taken to be out of reach.
PATIENCE = 3.0


def hub_answers() -> bool:
    """Asked once, quickly; the libraries that load from it would go on trying for half a minute."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((host.hostname or "", host.port or 443), timeout=PATIENCE).close()
    except OSError:
        return False
    return True
