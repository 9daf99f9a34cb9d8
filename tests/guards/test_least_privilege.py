"""`infra/iam`: runs need the rights that the policies grant, neither more nor less."""

from __future__ import annotations

import contextlib
import json
import urllib.request
import uuid
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from spotguard.checkpoint.lineage import latest_valid
from spotguard.checkpoint.manifest import check_shards_intact
from spotguard.checkpoint.retention import Retention
from spotguard.control.checkpoints import commands as checkpoints
from spotguard.control.checkpoints.archive import archive, plan_archive
from spotguard.control.checkpoints.find import OpenedRun, find_checkpoint
from spotguard.control.doctor.store import try_store
from spotguard.errors import StoreError
from spotguard.storage import PrefixedStore, open_store
from spotguard.storage.s3.bucket import S3Bucket
from tests.checkpoint.crashes.savings import claim, save
from tests.storage.harness.servers import CannotRun, moto_server

boto3 = pytest.importorskip("boto3")
botocore = pytest.importorskip("botocore")

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.storage.harness.servers import Server

IAM = Path(__file__).parents[2] / "infra" / "iam"
BUCKET, PREFIX = "bucket", "team/runs"
POLICY = json.loads(
    (IAM / "aws-policy.json").read_text().replace("BUCKET", BUCKET).replace("PREFIX", PREFIX)
)
RIGHTS_OF = {
    "PutObject": {"s3:PutObject"},
    "CreateMultipartUpload": {"s3:PutObject"},
    "UploadPart": {"s3:PutObject"},
    "CompleteMultipartUpload": {"s3:PutObject"},
    "CopyObject": {"s3:PutObject", "s3:GetObject"},
    "UploadPartCopy": {"s3:PutObject", "s3:GetObject"},
    "GetObject": {"s3:GetObject"},
    "HeadObject": {"s3:GetObject"},
    "DeleteObject": {"s3:DeleteObject"},
    "ListObjectsV2": {"s3:ListBucket"},
    "ListMultipartUploads": {"s3:ListBucketMultipartUploads"},
    "AbortMultipartUpload": {"s3:AbortMultipartUpload"},
}
"""What S3 asks for each call (docs.aws.amazon.com/AmazonS3/latest/userguide,
"Required permissions for Amazon S3 API operations")."""


def granted(policy: Any = POLICY) -> set[str]:
    """Return every action that a policy allows."""
    actions: set[str] = set()
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow"
        given = statement["Action"]
        actions.update([given] if isinstance(given, str) else given)
    return actions


def life_of_a_run() -> None:
    """Do with a store all that spotguard ever does; raise what it refuses."""
    url = f"s3://{BUCKET}/{PREFIX}/{uuid.uuid4().hex}"
    store = PrefixedStore(open_store(url), "job-1")
    store.warm()
    claim(store, 1)
    for step in (10, 20, 30, 40, 50):
        save(store, step, created_at=0.0)
    store.put("large", bytes(9_000_000))
    store.copy("large", "another")
    run = OpenedRun(run_id="a-run", store=store, at_rest=True)
    checkpoints.pin(store, find_checkpoint(store, "10"))
    checkpoints.list_checkpoints(run)
    manifest, skipped = latest_valid(store, verify=check_shards_intact)
    assert manifest is not None
    assert skipped == []
    assert checkpoints.prune(run, Retention(keep_last=3)).checkpoints
    assert archive(store, plan_archive(run, older_than_s=0))
    S3Bucket(url).begin("job-1/broken-off", writer="dead")
    assert open_store(url).clean_up(older_than_s=-60) == 1


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """S3 and IAM by moto, with the bucket."""
    try:
        with moto_server() as running:
            admin(running, "s3").create_bucket(Bucket=BUCKET)
            yield running
    except CannotRun as why:
        pytest.skip(str(why))


def admin(server: Server, service: str) -> Any:
    """Return a client that may do everything, while nobody is asked for rights."""
    return boto3.client(
        service,
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id="admin",
        aws_secret_access_key="admin",
    )


def ask_for_rights(server: Server, after: int | None) -> None:
    """Let moto demand rights after so many calls more; None is never."""
    count = "inf" if after is None else str(after)
    request = urllib.request.Request(
        f"{server.endpoint}/moto-api/reset-auth",
        data=count.encode(),
        headers={"Content-Type": "text/plain"},
    )
    urllib.request.urlopen(request).close()


@contextlib.contextmanager
def somebody_with(server: Server, policy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Become a user who may do what the policy allows. moto knows no conditions: none are asked."""
    ask_for_rights(server, None)
    iam, name = admin(server, "iam"), f"node-{uuid.uuid4().hex}"
    iam.create_user(UserName=name)
    statements = [
        {key: value for key, value in statement.items() if key != "Condition"}
        for statement in policy["Statement"]
    ]
    document = json.dumps({**policy, "Statement": statements})
    iam.put_user_policy(UserName=name, PolicyName="runs", PolicyDocument=document)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    ask_for_rights(server, 0)
    try:
        yield
    finally:
        ask_for_rights(server, None)


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Yield the parameters of every S3 call that is made meanwhile, by the call's name."""
    calls: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def note(params: dict[str, Any], model: Any, **_: Any) -> None:
        calls[model.name].append(params)

    def listen(session: Any) -> None:
        session.register("provide-client-params.s3", note)

    botocore.register_initializer(listen)
    try:
        yield calls
    finally:
        botocore.unregister_initializer(listen)


def test_a_runs_life_uses_all_that_the_policy_grants_and_nothing_else(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under exactly this policy everything works, below the prefix; no right is there in vain."""
    with somebody_with(server, POLICY, monkeypatch), recorded() as calls:
        trial = try_store(f"s3://{BUCKET}/{PREFIX}", speed_bytes=9_000_000)
        life_of_a_run()
    assert set(trial.rights.values()) == {True}
    assert set(calls) <= set(RIGHTS_OF)
    assert set().union(*(RIGHTS_OF[name] for name in calls)) == granted()
    for name, asked in calls.items():
        below = "Prefix" if name.startswith("List") else "Key"
        assert all(params[below].startswith(f"{PREFIX}/") for params in asked), name
        assert all(params["Bucket"] == BUCKET for params in asked)


@pytest.mark.parametrize("missing", sorted(granted()))
def test_each_right_that_is_granted_is_needed(
    server: Server, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Without it the life of a run ends with a sentence that names it."""
    poorer = without(POLICY, missing)
    with somebody_with(server, poorer, monkeypatch), pytest.raises(StoreError) as caught:
        life_of_a_run()
    assert missing in caught.value.message
    assert f"allow {missing} on arn:aws:s3:::{BUCKET}" in caught.value.hint


def test_the_policy_ends_at_its_prefix(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor finds every right missing beside it, in words that say which.

    But reading: moto lets a list name any prefix, and a list without the object proves it absent.
    Where the list is refused, too, as S3 does it, a denied read stays one: see test_denied_read.
    """
    with somebody_with(server, POLICY, monkeypatch):
        trial = try_store(f"s3://{BUCKET}/team/others")
    assert [right for right, works in trial.rights.items() if not works] == [
        "write",
        "delete",
    ]


def without(policy: Any, missing: str) -> Any:
    """Return the policy without one action."""
    statements = []
    for statement in policy["Statement"]:
        given: Sequence[str] = statement["Action"]
        actions = [given] if isinstance(given, str) else given
        left = [action for action in actions if action != missing]
        if left:
            statements.append({**statement, "Action": left})
    return {**policy, "Statement": statements}


def test_lists_are_limited_to_the_prefix() -> None:
    """moto does not look at conditions, so it is looked at here."""
    (lists,) = [each for each in POLICY["Statement"] if each["Action"] == "s3:ListBucket"]
    assert lists["Condition"] == {"StringLike": {"s3:prefix": f"{PREFIX}/*"}}
    assert lists["Resource"] == f"arn:aws:s3:::{BUCKET}"


def test_aws_takes_the_lifecycle_rules_and_they_delete_nothing(server: Server) -> None:
    """All they do is to free what broken-off writes left."""
    rules = json.loads((IAM / "aws-lifecycle.json").read_text().replace("PREFIX", PREFIX))
    s3 = admin(server, "s3")
    s3.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=rules)
    (kept,) = s3.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    assert kept["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 2}
    assert set(kept) <= {"ID", "Status", "Filter", "AbortIncompleteMultipartUpload"}


def test_gcp_rules_delete_nothing_but_parts() -> None:
    """What is deleted lies below the name that stores keep for themselves."""
    for rule in json.loads((IAM / "gcp-lifecycle.json").read_text())["rule"]:
        below = rule["condition"]["matchesPrefix"]
        assert rule["condition"]["age"] == 2
        if rule["action"]["type"] == "Delete":
            assert below == ["PREFIX/.spotguard/parts/"]
        else:
            assert rule["action"]["type"] == "AbortIncompleteMultipartUpload"


def test_the_other_clouds_roles_are_as_small() -> None:
    """Objects only: no right on buckets, containers, keys or access lists."""
    gcp = yaml.safe_load((IAM / "gcp-role.yaml").read_text())["includedPermissions"]
    assert sorted(gcp) == [
        f"storage.objects.{verb}" for verb in ("create", "delete", "get", "list")
    ]
    azure = json.loads((IAM / "azure-role.json").read_text())
    blobs = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
    assert azure["DataActions"] == [f"{blobs}/{verb}" for verb in ("read", "write", "delete")]
    assert azure["Actions"] == []


def test_the_readme_names_every_file() -> None:
    """Nobody has to guess what a file is for."""
    text = (IAM / "README.md").read_text()
    for path in IAM.iterdir():
        assert path.name == "README.md" or path.name in text
