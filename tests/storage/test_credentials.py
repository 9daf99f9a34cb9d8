"""`who_am_i`: where the credentials come from and whose they are, and no secret in the answer."""

from __future__ import annotations

import base64
import json
import os
import traceback
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import StoreError
from spotguard.storage import who_am_i
from spotguard.storage.credentials import Identity
from tests.storage.harness.scripted_server import Reply, scripted_server

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.harness.servers import Server

SECRET = "planted/secret+key"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture
def of_aws(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let STS, and STS alone, be moto's: the bucket counts as one of S3 itself."""
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto.endpoint)


def test_a_folder_needs_no_login(tmp_path: Path) -> None:
    """Nor does what is no store at all; opening it says so."""
    assert who_am_i(str(tmp_path)) is None
    assert who_am_i("s4://bucket") is None


@pytest.mark.usefixtures("of_aws")
def test_keys_of_the_environment_are_named_and_sts_says_whose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variable, and the user or role behind it; asking needs no right."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAPLANTED")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    found = who_am_i("s3://bucket/runs")
    assert found is not None
    assert found.source == "AWS_ACCESS_KEY_ID"
    assert str(found.who).startswith("arn:aws:sts::")
    assert SECRET not in str(found)
    assert "AKIAPLANTED" not in repr(found)


@pytest.mark.usefixtures("of_aws")
def test_a_profile_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who has several logins sees which one is used."""
    (tmp_path / "credentials").write_text(
        f"[work]\naws_access_key_id = AKIA\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    found = who_am_i("s3://bucket")
    assert found is not None
    assert found.source == "the profile work in ~/.aws/credentials"


@pytest.mark.parametrize("where", ["url", "variable"])
def test_another_server_is_not_asked_for_amazons_word(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whose a key of MinIO's is, STS does not know."""
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "minio")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:9")
    if where == "variable":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    query = "?endpoint=http://127.0.0.1:9" if where == "url" else ""
    assert who_am_i(f"s3://bucket{query}") == Identity(source="AWS_ACCESS_KEY_ID")


def test_an_sts_that_does_not_answer_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store itself may answer all the same."""
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:9")
    assert who_am_i("s3://bucket") == Identity(source="AWS_ACCESS_KEY_ID")


@pytest.mark.parametrize(
    ("profile", "said"), [("", "no usable credentials"), ("nobody", "settings for s3://bucket/")]
)
def test_without_credentials_for_s3_the_way_to_some_is_told(
    monkeypatch: pytest.MonkeyPatch, profile: str, said: str
) -> None:
    """Also when the profile does not exist."""
    pytest.importorskip("boto3")
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(StoreError, match=said) as caught:
        who_am_i("s3://bucket")
    assert caught.value.hint


def test_a_role_that_is_not_given_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Why, in our words: what botocore lets through would look like a bug of ours."""
    pytest.importorskip("boto3")
    (tmp_path / "config").write_text(
        "[profile train]\nrole_arn = arn:aws:iam::1:role/train\nsource_profile = base\n"
        "region = eu-north-1\n[profile base]\n"
        f"aws_access_key_id = AKIA\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "train")
    said = b"<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>"
    with scripted_server(lambda _: Reply(403, {"content-type": "text/xml"}, said)) as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.endpoint)
        with pytest.raises(StoreError, match="could not be fetched") as caught:
            who_am_i("s3://bucket")
    assert "the role trusts it" in caught.value.hint


def test_a_program_that_gives_no_credentials_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And what it said is not."""
    pytest.importorskip("boto3")
    (tmp_path / "config").write_text(f"[default]\ncredential_process = echo {SECRET}\n")
    with pytest.raises(StoreError, match="cannot be used") as caught:
        who_am_i("s3://bucket")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_without_credentials_for_google_the_way_to_some_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A key file that is none is not quoted."""
    pytest.importorskip("google.auth")
    key = tmp_path / "key.json"
    key.write_text(json.dumps({"type": "nothing", "private_key": SECRET}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    with pytest.raises(StoreError, match="no usable credentials for gs://bucket") as caught:
        who_am_i("gs://bucket")
    assert "gcloud auth application-default login" in caught.value.hint
    assert SECRET not in str(caught.value)


def test_googles_credentials_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable; an emulator asks for none."""
    pytest.importorskip("google.auth")
    key = tmp_path / "key.json"
    user = {"type": "authorized_user", "client_id": "c", "client_secret": SECRET}
    key.write_text(json.dumps({**user, "refresh_token": SECRET}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    assert who_am_i("gs://bucket") == Identity(source="GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    assert "asks for none" in str(who_am_i("gs://bucket"))


def test_a_connection_string_is_named_without_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The account is told, which the URL may leave out."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=runs;AccountKey={SECRET}")
    assert str(who_am_i("az://container")) == (
        "account runs, by AZURE_STORAGE_CONNECTION_STRING (the account's key)"
    )


def test_an_azure_key_goes_before_a_sas(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the store itself chooses; of a SAS the rights and the end are told, not the signature."""
    sas = f"?sv=2022&sp=rwdl&se=2026-12-01T00:00Z&sig={SECRET}"
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", sas)
    said = str(who_am_i("az://container@runs"))
    assert said.endswith("by AZURE_STORAGE_SAS_TOKEN (a SAS for rwdl until 2026-12-01T00:00Z)")
    monkeypatch.setenv("AZURE_STORAGE_KEY", SECRET)
    said = str(who_am_i("az://container@runs"))
    assert said == "account runs, by AZURE_STORAGE_KEY (the account's key)"


@pytest.mark.parametrize(
    ("claims", "who"),
    [
        ({"appid": "app", "oid": "object"}, "app"),
        ({"upn": "me@example.org", "appid": "az"}, "me@example.org"),
        ({"sub": "x"}, None),
        ([], None),
    ],
)
def test_a_token_says_who_it_was_given_to(claims: object, who: str | None) -> None:
    """Only its claims are read; its signature is for the server."""
    from spotguard.storage.azure.credentials import named_in

    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    assert named_in(f"head.{body}.{SECRET}") == who


@pytest.mark.parametrize("token", ["", "a.b", "a.!!!.c", "a.e30"])
def test_a_token_that_is_none_names_nobody(token: str) -> None:
    """An opaque token is as good as any."""
    from spotguard.storage.azure.credentials import named_in

    assert named_in(token) is None
