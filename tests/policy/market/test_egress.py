"""What it costs to bring a checkpoint from its store to nodes elsewhere."""

from __future__ import annotations

import pytest

from spotguard.policy.market.egress import egress_usd, store_place

HUNDRED_GB = 100e9


@pytest.mark.parametrize(
    ("store", "infra", "region", "usd"),
    [
        ("s3://b/p?region=us-east-1", "aws", "us-east-1", 0.0),
        ("s3://b/p?region=us-east-1", "aws", "us-east-2", 1.0),
        ("s3://b/p?region=us-east-1", "aws", "eu-west-1", 2.0),
        ("s3://b/p?region=ap-south-1", "aws", "us-east-1", 8.6),
        ("s3://b/p?region=us-east-1", "gcp", "us-central1", 9.0),
        ("s3://b/p?region=us-east-1", "lambda", "us-east-1", 9.0),
        ("s3://b/p", "aws", "us-west-2", 0.0),
        ("gs://b/p", "gcp", "europe-west3", 0.0),
        ("gs://b/p", "aws", "us-east-1", 12.0),
        ("az://a/b", "gcp", "us-east4", 8.75),
        ("s3://b/p?endpoint=https://x.r2.cloudflarestorage.com", "aws", "us-east-1", 0.0),
        ("s3://b/p?region=us-east-1", "slurm", None, 0.0),
        ("/data/runs", "aws", "us-east-1", 0.0),
    ],
)
def test_egress_is_priced_by_the_stores_cloud(
    store: str, infra: str, region: str | None, usd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between regions at its own price, to any other cloud at that of the internet."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    told = egress_usd(store_place(store), infra, region, HUNDRED_GB)
    assert told == pytest.approx(usd)


def test_a_bucket_is_where_the_variables_of_its_cloud_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its client is, where its URL names no region."""
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    store = store_place("s3://b/p")
    assert store is not None
    assert store.region == "eu-west-1"
    assert egress_usd(store, "aws", "us-east-1", HUNDRED_GB) == pytest.approx(2.0)
