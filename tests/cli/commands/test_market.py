from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from moto import mock_aws

from spotguard.api import market as api_market
from spotguard.control.journal.market_log import market_path, note_market, read_market
from spotguard.control.status import market
from spotguard.control.status.market import refreshed
from spotguard.errors import UsageError
from spotguard.launch.aws_prices import PricePoint
from spotguard.policy.market.sightings import Sighting

if TYPE_CHECKING:
    from tests.cli.conftest import Cli

PLACE = "aws/us-east-1/us-east-1a/c3.large"


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be somebody to AWS, and to nobody else."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")


def test_an_empty_market_says_so(cli: Cli) -> None:
    """Nothing seen is told as that, with where it would be kept and what is recorded."""
    said = cli("market", "show")
    assert said.code == 0
    assert "nothing was seen of spot nodes yet" in said.out
    assert "H100, V100" in said.out


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--days", ("market", "refresh")),
        ("--price", ("controller", "serve", "s3://b/job-1")),
        ("--probe-memory", ("plan", "job.py", "--probe")),
    ],
)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_an_option_is_a_finite_number(
    cli: Cli, option: str, words: tuple[str, ...], number: str
) -> None:
    """Without an end it is in an open range, and `nan` in any of older versions of typer."""
    said = cli(*words, option, number)
    assert said.code == 2
    assert f"Invalid value for '{option}'" in said.err


@pytest.mark.parametrize("days", [float("nan"), 1e12, 0.0, -1.0, 90.5])
def test_a_program_asks_for_no_more_days_than_there_are(days: float) -> None:
    """AWS remembers 90; the sentence says so before anybody is asked."""
    with pytest.raises(UsageError, match=r"days: given .* up to 90"):
        api_market.refresh(["us-east-1"], ["c3.large"], days=days)


def test_what_was_seen_is_told_by_place(cli: Cli) -> None:
    """A row per place: the newest word of it, counts, how long nodes lived, the newest price."""
    now = time.time()
    saw = {"place": PLACE, "accelerator": "V100", "nodes": 2, "run": "job-1"}
    note_market(
        market_path(),
        [
            Sighting(at=now - 7200, kind="granted", usd_per_h=0.9, **saw),  # type: ignore[arg-type]
            Sighting(at=now - 3600, kind="lost", age_s=3600.0, usd_per_h=0.9, **saw),  # type: ignore[arg-type]
            Sighting(at=now - 60, kind="price", place=PLACE, usd_per_h=0.8),
        ],
    )
    told = cli("market", "show").out
    assert "no 2, 1 h 00 min ago" in told
    assert "$0.80" in told
    [place] = json.loads(cli("market", "show", "--json").out)["places"]
    assert (place["granted"], place["lost"], place["has_nodes"]) == (1, 1, False)
    assert place["mean_life_s"] == 3600.0


def test_the_newest_price_is_kept_and_an_old_one_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A price that has risen since is told at once; a line from the future hides nothing."""
    told = [(0.0, 1.0), (1.0, 2.0), (7.0, 3.0), (13.5, 4.0), (14.0, 9.0), (99.0, 5.0)]
    where = {"region": "us-east-1", "zone": "us-east-1a", "instance_type": "c3.large"}
    points = [PricePoint(at=1e9 + 3600 * h, usd_per_h=usd, **where) for h, usd in told]
    monkeypatch.setattr(market, "spot_prices", lambda region, kinds, *, days, now: points)
    now = 1e9 + 20 * 3600
    future = Sighting(at=2e9, kind="price", place=PLACE, usd_per_h=7.0)
    more = {"regions": (), "instance_types": (), "days": 7.0, "now": now}
    made = refreshed([future], **more)  # type: ignore[arg-type]
    assert [(each.at - 1e9) / 3600 for each in made] == [1.0, 7.0, 14.0]
    assert made[-1].usd_per_h == 9.0
    assert refreshed(made, **more) == []  # type: ignore[arg-type]


@pytest.mark.e2e
@mock_aws
@pytest.mark.usefixtures("credentials")
def test_prices_are_fetched_once_for_the_places_that_runs_asked(cli: Cli) -> None:
    """Of all zones of the region and type; asked again at once, nothing is new."""
    note_market(market_path(), [Sighting(at=1.0, kind="refused", place=PLACE, accelerator="V100")])
    first = cli("market", "refresh")
    assert first.code == 0, first.err
    prices = [each for each in read_market(market_path()) if each.kind == "price"]
    assert {each.place.split("/")[1] for each in prices} == {"us-east-1"}
    assert {each.place.split("/")[3] for each in prices} == {"c3.large"}
    assert PLACE in {each.place for each in prices}
    assert all(each.accelerator == "V100" and (each.usd_per_h or 0) > 0 for each in prices)
    assert "0 new prices" in cli("market", "refresh").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no run of this machine has asked AWS"),
        (("--region", "us-east-1"), "belong together"),
        (("--instance-type", "p3.2xlarge"), "belong together"),
        (("--days", "91"), "--days"),
    ],
)
def test_what_cannot_be_fetched_is_refused(
    cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    """Code 2 and one sentence, and nothing is asked of anybody."""
    said = cli("market", "refresh", *arguments)
    assert said.code == 2
    assert words in said.err


def test_without_credentials_it_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code 3, with the way out."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    said = cli("market", "refresh", "--region", "us-east-1", "--instance-type", "p3.2xlarge")
    assert said.code == 3
    assert "credentials" in said.err
