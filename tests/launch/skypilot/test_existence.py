"""What SkyPilot says of places, and what becomes of one that is absent, broken or silent.

Its own words for each place that is not there are proved in test_taskyaml_skypilot.py.
"""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from spotguard.errors import LauncherFailure, MissingExtra
from spotguard.launch.base import Unchecked, Unreachable
from spotguard.launch.skypilot import existence
from spotguard.launch.skypilot.ask_in_subprocess import ask
from spotguard.launch.skypilot.existence import Missing, look_up
from spotguard.launch.skypilot.prices import Place
from tests.launch.fake_package import plant_sky

if TYPE_CHECKING:
    from pathlib import Path


def looked_up(monkeypatch: pytest.MonkeyPatch, place: str, **said: str) -> list[Any]:
    """Return what is found of a place if SkyPilot's API server says this."""
    monkeypatch.setattr(existence, "ask", lambda question, *about: {place: said})
    return list(look_up([Place.parse(place)]))


@pytest.mark.parametrize(
    "words",
    [
        "Failed to get partitions for cluster lab: ssh: connect to host lab port 22: timed out",
        "Kubernetes support does not support setting zone.",
    ],
)
def test_other_words_prove_nothing(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """A login node that does not answer has all of its partitions, for all that is known."""
    found = looked_up(monkeypatch, "slurm/lab/spot", refusal=words)
    assert found == [Unchecked(place="slurm/lab/spot", why=words)]


@pytest.mark.parametrize(
    ("place", "refusal", "part"),
    [
        (
            "kubernetes/ctx",
            "Context ctx not found in kubeconfig. Kubernetes only supports context names as "
            "regions. Available contexts: []",
            "context",
        ),
        (
            "slurm/lab/spot",
            "Cluster lab not found in Slurm config. Slurm only supports cluster names as regions. "
            "Available clusters: []",
            "cluster",
        ),
    ],
)
def test_without_any_credentials_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: str, refusal: str, part: str
) -> None:
    """Who plans on a machine that was never set up may know better than SkyPilot there."""
    (found,) = looked_up(monkeypatch, place, refusal=refusal)
    assert found == Unchecked(place=place, why=f"SkyPilot knows no {part} at all on this machine")


def catalogue(zones: tuple[str, ...]) -> Any:
    """Return a SkyPilot whose catalogue of AWS has one region with these zones."""

    def validate(region: str, zone: str | None, clouds: str) -> None:
        if zone is not None and zone not in zones:
            raise ValueError(f"Invalid zone {zone!r} for region {region!r}")

    region = SimpleNamespace(name="us-east-1", zones=[SimpleNamespace(name=z) for z in zones])
    catalog = SimpleNamespace(
        validate_region_zone=validate,
        get_default_instance_type=lambda **_: "m6i.large",
        get_region_zones_for_instance_type=lambda *_, **__: [region],
    )
    return lambda: SimpleNamespace(catalog=catalog)


def test_an_aws_that_does_not_tell_of_its_zones_says_nothing_of_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever asks for prices meets the same, and tells of it."""

    def validate(*_: object, **__: object) -> None:
        raise ClientError({"Error": {"Code": "RequestLimitExceeded"}}, "DescribeRegions")

    catalog = SimpleNamespace(validate_region_zone=validate)
    monkeypatch.setattr(existence, "load_sky", lambda: SimpleNamespace(catalog=catalog))
    assert list(look_up([Place.parse("aws/us-east-1")])) == []


@pytest.mark.parametrize(
    ("zones", "is_missing"), [(("us-east-1a", "us-east-1b"), True), (("use1-az1",), False)]
)
def test_zones_of_aws_without_credentials_are_not_judged(
    monkeypatch: pytest.MonkeyPatch, zones: tuple[str, ...], is_missing: bool
) -> None:
    """SkyPilot then has numbers for zones, and which name is whose differs between accounts."""
    monkeypatch.setattr(existence, "load_sky", catalogue(zones))
    (found,) = look_up([Place.parse("aws/us-east-1/us-east-1z")])
    assert isinstance(found, Missing) is is_missing
    assert list(look_up([Place.parse(f"aws/us-east-1/{zones[0]}")])) == []


def test_many_that_are_there_are_counted() -> None:
    """The sentence stays one."""
    there = tuple(f"p{n}" for n in range(40))
    missing = Missing(place="slurm/a/b", part="partition", name="b", above="slurm/a", there=there)
    assert missing.words().endswith("p10, p11 and 28 more")
    bare = Missing(place="gcp/x", part="region", name="x", above="gcp", there=())
    assert bare.words().endswith("there is none with a name like it")
    assert bare.way_out() == "leave it to SkyPilot: gcp"


# ---------------------------------------------------------------- a process of its own


def test_the_api_server_is_asked_for_what_it_would_refuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A task at each place is validated, as before a launch; nothing is launched."""
    plant_sky(monkeypatch, tmp_path, there=["slurm/lab/spot"])
    answers = ask("refusals", "slurm/lab/spot", "slurm/lab/sport")
    assert answers["slurm/lab/spot"] == {"refusal": ""}
    assert "Partition 'sport' not found in cluster 'lab'" in answers["slurm/lab/sport"]["refusal"]


def test_an_api_server_that_is_away_is_said_for_each_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one sentence."""
    plant_sky(monkeypatch, tmp_path, there=[], away=True)
    answers = ask("refusals", "slurm/lab/spot")
    assert answers == {
        "slurm/lab/spot": {"problem": "SkyPilot does not answer: Could not connect to SkyPilot"}
    }


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("raise ImportError('no pandas')", MissingExtra, "SkyPilot is not installed"),
        ("raise RuntimeError('half an install')", LauncherFailure, "half an install"),
        ("import os; os._exit(7)", LauncherFailure, "exit code 7"),
        ("import os; os.abort()", LauncherFailure, "SkyPilot is broken"),
    ],
)
def test_a_skypilot_that_cannot_be_imported_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    source: str,
    kind: type[Exception],
    words: str,
) -> None:
    """Whatever it does to its own process."""
    plant_sky(monkeypatch, tmp_path, source=source)
    with pytest.raises(kind, match=words):
        ask("refusals", "slurm/lab/spot")


def test_a_silent_skypilot_is_waited_for_so_long_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And its process is gone then."""
    plant_sky(monkeypatch, tmp_path, source="import time; time.sleep(3600)")
    children: list[Any] = []
    popen = subprocess.Popen

    def noted(*words: Any, **how: Any) -> Any:
        children.append(popen(*words, **how))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with pytest.raises(Unreachable, match=r"SkyPilot has not answered within 0\.5 s"):
        ask("refusals", "slurm/lab/spot", patience_s=0.5)
    assert children[0].returncode is not None
