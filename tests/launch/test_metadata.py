"""A node finds out whose metadata service it has, by that service's own handshake."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import pytest

from spotguard.launch.local import imds
from spotguard.launch.metadata import NONE, detect
from spotguard.shared.net import free_port
from spotguard.testing import FakeMetadata


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_each_cloud_is_known_by_its_own_handshake(cloud: str) -> None:
    """What one cloud's service answers is never taken for another's."""
    with FakeMetadata(cloud) as service:
        assert detect(urlsplit(service.url).netloc) == cloud


def test_azure_is_known_although_its_events_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for scheduled events first may wait for two minutes until they are enabled."""
    really = imds.answer_azure

    def answer(request: imds.Request, facts: imds.NodeFacts) -> imds.Reply:
        if "scheduledevents" in request.path:
            time.sleep(3.0)
        return really(request, facts)

    monkeypatch.setitem(imds.PROTOCOLS, "azure", answer)
    with FakeMetadata("azure") as service:
        assert detect(urlsplit(service.url).netloc) == "azure"


def test_where_nothing_listens_there_is_no_cloud() -> None:
    """A machine outside of clouds gets `none` at once, and the job relies on SIGTERM."""
    assert detect(f"127.0.0.1:{free_port()}") == NONE
