"""What a launch that came to nothing met with, and whether a wait can mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import LauncherFailure
from spotguard.launch.skypilot import sdk as sdk_module
from spotguard.launch.skypilot.refusals import read_refusal
from spotguard.launch.skypilot.sdk import ClusterPhase, LaunchFacts, SkySdk

if TYPE_CHECKING:
    from collections.abc import Callable

GENERIC = "Failed to acquire resources in all zones in us-east-1 for {AWS(m6i.large)}."


def aws(code: str, sentence: str, asked: str = "RunInstances") -> str:
    """Return what SkyPilot's log says where AWS refuses."""
    return (
        "W 11-23 create_instances: Attempt failed with An error occurred "
        f"({code}) when calling the {asked} operation (reached max retries: 0): {sentence}\n"
        "I 11-23 AWS handler error: Failed to launch instances. Max attempts exceeded.\n"
    )


WAITS = {
    "InsufficientInstanceCapacity": aws("InsufficientInstanceCapacity", "We currently do not"),
    "ZONE_RESOURCE_POOL_EXHAUSTED": "ZONE_RESOURCE_POOL_EXHAUSTED: The zone does not have enough",
    "SkuNotAvailable": "(SkuNotAvailable) The requested size is currently not available",
    "RequestLimitExceeded": aws("RequestLimitExceeded", "Request limit exceeded."),
    "insufficient resources": "Insufficient resources on the cluster: cpu",
}
RACES = {
    "InvalidPermission.Duplicate": "AuthorizeSecurityGroupIngress",
    "InvalidGroup.Duplicate": "CreateSecurityGroup",
    "InvalidKeyPair.Duplicate": "ImportKeyPair",
    "EntityAlreadyExists": "CreateInstanceProfile",
}
"""What one of two launches is told that make the same thing in a fresh region, and by which call.
"""
LASTS = {
    "UnauthorizedOperation": aws("UnauthorizedOperation", "You are not authorized to perform"),
    "VcpuLimitExceeded": aws("VcpuLimitExceeded", "You have requested more vCPU capacity"),
    "MaxSpotInstanceCountExceeded": aws("MaxSpotInstanceCountExceeded", "Max spot instance count"),
    "InvalidAMIID.NotFound": aws("InvalidAMIID.NotFound", "The image id does not exist"),
    "InvalidSubnetID.NotFound": aws("InvalidSubnetID.NotFound", "The subnet ID does not exist"),
    "SomethingNew": aws("SomethingNew", "AWS may invent codes"),
    "AccessDenied": "Failed to fetch IAM instance profile\nError code: AccessDenied",
    "No VPC": "SKYPILOT_ERROR_NO_NODES_LAUNCHED: No VPC with name 'mine' is found in us-east-1.",
    "Found no quota": "Found no quota for p3.2xlarge spot instances in region us-east-1 in AWS.",
    "QUOTA_EXCEEDED": "QUOTA_EXCEEDED: Quota 'CPUS' exceeded. Limit: 24.0 in region us-west1.",
    "IAM_PERMISSION_DENIED": "IAM_PERMISSION_DENIED: Policy update access denied.",
    "AuthorizationFailed": "(AuthorizationFailed) The client has no authorization",
    "ErrImagePull": "pod is pending: ErrImagePull",
}


@pytest.mark.parametrize("name", WAITS)
def test_missing_capacity_is_waited_for_with_the_clouds_own_word(name: str) -> None:
    """Also where something else went wrong beside it, in another zone or while tidying up."""
    refusal = read_refusal([], WAITS[name])
    assert not refusal.lasting
    assert name.lower() in refusal.words.lower()
    assert not read_refusal([], LASTS["UnauthorizedOperation"] + WAITS[name]).lasting


@pytest.mark.parametrize("name", LASTS)
def test_what_no_wait_will_mend_is_told_apart(name: str) -> None:
    """A right, an image, a quota or a network: the cause stands in the words."""
    refusal = read_refusal([], LASTS[name])
    assert refusal.lasting
    assert name in refusal.words


FULL = {
    "VcpuLimitExceeded": LASTS["VcpuLimitExceeded"],
    "MaxSpotInstanceCountExceeded": LASTS["MaxSpotInstanceCountExceeded"],
    "InstanceLimitExceeded": aws("InstanceLimitExceeded", "Your quota allows for 0 more running"),
    "QUOTA_EXCEEDED": LASTS["QUOTA_EXCEEDED"],
    "quotaExceeded": "Got return code 'quotaExceeded' in us-central1-a: Quota 'SSD' exceeded",
    "QuotaExceeded": "(QuotaExceeded) Operation could not be completed",
    "exceeding approved": "results in exceeding approved Total Regional Cores quota",
    "exceeded quota": "pods is forbidden: exceeded quota: gpus, requested: 1, used: 8, limited: 8",
}


@pytest.mark.parametrize("name", FULL)
def test_a_quota_that_is_full_is_told_from_one_that_is_missing(name: str) -> None:
    """It may be so for a moment only; also where a right is missing in another place."""
    for said in (FULL[name], LASTS["UnauthorizedOperation"] + "\n" + FULL[name]):
        refusal = read_refusal([], said)
        assert (refusal.quota_full, refusal.lasting, refusal.nodes_ran) == (True, True, False)
        assert name in refusal.words


@pytest.mark.parametrize("name", sorted(LASTS.keys() - FULL.keys()))
def test_what_is_no_full_quota_is_not_waited_for(name: str) -> None:
    """A quota of zero, which SkyPilot looks up, is not freed by anybody."""
    assert not read_refusal([], LASTS[name]).quota_full
    assert not read_refusal([], aws("LimitExceeded", "Too many", "CreateRole")).quota_full


def test_without_a_word_that_is_understood_it_is_waited_for() -> None:
    """SkyPilot called it a lack of resources."""
    refusal = read_refusal([RuntimeError(GENERIC)], GENERIC)
    assert (refusal.words, refusal.lasting) == ("", False)


RAN = {
    "tags": aws("RequestLimitExceeded", "Request limit exceeded.", "CreateTags"),
    "look": aws("InternalError", "An internal error has occurred.", "DescribeInstances"),
    "EC2 fails after it": aws("InternalError", "An internal error has occurred.", "RunInstances"),
    "EC2 is away": aws("Unavailable", "The service is unavailable.", "RunInstances"),
    "Slurm: died": "Instances are up.\nFailed to acquire resources in spot for {Slurm(cpus=1+)}.",
    "no SSH": "└── Instances are up.\nTimed out waiting for SSH",
    "second zone": WAITS["InsufficientInstanceCapacity"] + "└── Instance is up.\nRay failed",
    "nobody says": GENERIC,
    "cancelled": "Request was cancelled",
}
NEVER = {
    "no VPC": aws("UnauthorizedOperation", "No.", "DescribeVpcs"),
    "no role": aws("AccessDenied", "No.", "GetInstanceProfile"),
    "throttled at once": WAITS["RequestLimitExceeded"],
    "Slurm, no more said": "Failed to acquire resources in spot for {Slurm(cpus=1+)}.",
    "Kubernetes": "Failed to acquire resources in all zones in kind for {Kubernetes(2CPU--4GB)}.",
    "Slurm's queue": "TimeoutError: Job 7 did not get nodes allocated within 60 seconds",
    **WAITS,
    **LASTS,
}


@pytest.mark.parametrize("name", RAN)
def test_nodes_count_as_run_unless_it_is_proven_that_none_did(name: str) -> None:
    """EC2 bills what SkyPilot gives up after RunInstances: the budget has to know of it."""
    assert read_refusal([], RAN[name]).nodes_ran


@pytest.mark.parametrize("name", NEVER)
def test_a_cloud_that_gave_no_node_is_not_paid(name: str) -> None:
    """Else a long search for capacity would eat the budget that it never spent."""
    assert not read_refusal([], NEVER[name]).nodes_ran


def test_a_busy_cloud_is_told_from_a_full_one() -> None:
    """Both are waited for; the words differ."""
    assert read_refusal([], WAITS["RequestLimitExceeded"]).busy
    assert not read_refusal([], WAITS["InsufficientInstanceCapacity"]).busy
    assert not read_refusal([], LASTS["VcpuLimitExceeded"]).busy


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_call_that_skypilot_leaves_the_program_for_is_named(quote: str) -> None:
    """It tells the code first, and the whole in a form of Python's, of any message."""
    why = f"{quote}User: arn:aws:iam::1:user/me is not authorized: ec2:DescribeRouteTables{quote}"
    said = (
        "C 11-29 07:06:51.153 PID=1 utils.py:83] Failed to fetch available subnets from AWS.\n"
        "C 11-29 07:06:51.153 PID=1 utils.py:83] Error code: UnauthorizedOperation\n"
        "E 11-29 07:06:51.153 PID=1 utils.py:85] Boto3 error: {'response': {'Error': {'Code': "
        f"'UnauthorizedOperation', 'Message': {why}}}, 'ResponseMetadata': {{'RetryAttempts': 0}}}}"
        ", 'operation_name': 'DescribeRouteTables'} <built-in function exec>"
    )
    refusal = read_refusal([SystemExit(1)], said)
    assert (refusal.lasting, refusal.nodes_ran) == (True, False)
    assert refusal.words.startswith("UnauthorizedOperation (DescribeRouteTables): User: arn:aws")


@pytest.mark.parametrize("code", RACES)
def test_what_another_launch_made_in_the_same_moment_is_asked_again(code: str) -> None:
    """Two runs begin in a fresh region: both see no security group, and both make one."""
    refusal = read_refusal([], aws(code, "It is there already.", RACES[code]))
    assert (refusal.busy, refusal.lasting, refusal.nodes_ran) == (True, False, False)
    assert code in refusal.words


BUSY = {
    "not seen yet": aws("InvalidInstanceID.NotFound", "The instance ID", "CreateTags"),
    "half made": aws("InvalidParameterValue", "Value (x) for parameter iamInstanceProfile.arn is"),
    "no answer of AWS's own": aws("503", "Service Unavailable"),
    "unavailable": aws("Unavailable", "The server is overloaded", "DescribeVpcs"),
    "GCP's rate": "Got return code 'rateLimitExceeded' in us-central1-a: Quota exceeded for query",
    "a network not done": "SKYPILOT_ERROR_NO_NODES_LAUNCHED: All candidate subnets are pending in",
    "a registry's rate": "pod is pending: ErrImagePull: toomanyrequests: pull rate limit",
}


@pytest.mark.parametrize("name", BUSY)
def test_what_a_moment_mends_does_not_end_a_run(name: str) -> None:
    """It was called lasting once: a missing quota, or a code that was not known."""
    refusal = read_refusal([], BUSY[name])
    assert (refusal.busy, refusal.lasting) == (True, False)


NOISE = "Retrying after: Failed to establish a new connection: 403 Forbidden, permission denied"
IN_THE_SET_UP = {
    "SSH": "Failed to SSH to 10.0.0.7 after timeout 600s, with Permission denied (publickey)",
    "packages": f"Failed to run setup commands on an instance. (exit code 1). Error: {NOISE}",
    "ray": f"Failed to start ray on the worker node (exit code 1).\n===== stdout\n{NOISE}",
    "skylet": f"Failed to start skylet on the head node (exit code 255).\n{NOISE}",
    "head": "Could not find any head instance. To fix: refresh status with: sky status -r",
}


@pytest.mark.parametrize("name", IN_THE_SET_UP)
def test_a_node_that_is_lost_in_its_set_up_is_no_refusal(name: str) -> None:
    """Whatever it printed before: its words are not the cloud's. It ran, and was paid."""
    error = RuntimeError(IN_THE_SET_UP[name])
    said = f"Instance is up.\n{LASTS['UnauthorizedOperation']}\nE 11-23 12:00:00.000 PID=7 p.py:9] "
    refusal = read_refusal([error], f"{said}Failed to set up SkyPilot runtime on cluster.\n{NOISE}")
    assert (refusal.broke_off, refusal.lasting, refusal.nodes_ran) == (True, False, True)
    assert refusal.words == IN_THE_SET_UP[name].partition("\n")[0]


def test_what_a_node_printed_is_left_out_with_the_word_before_it() -> None:
    """SkyPilot's sentence ends in `Error: `, and pages follow."""
    told = read_refusal([RuntimeError(f"Failed to start ray on the node. Error: \n{NOISE}")], "")
    assert told.words == "Failed to start ray on the node."


def test_harmless_lines_are_not_the_reason() -> None:
    """SkyPilot could not ask for a quota and went on; Kubernetes tells its reason twice."""
    quota = 'Proceeding assuming quotas are available. Error: Could not connect to the endpoint "x"'
    assert read_refusal([], f"{quota}\n{GENERIC}").words == ""
    said = "W 11-23 12:00:00.000 PID=7 instance.py:2628] Reason: Forbidden\nexceeded quota: gpus"
    refusal = read_refusal([], said)
    assert (refusal.words, refusal.lasting) == ("exceeded quota: gpus", True)


def test_a_cloud_out_of_reach_proves_nothing_of_nodes() -> None:
    """The line may have gone after nodes were asked for."""
    assert read_refusal([], "<urlopen error: Failed to establish a new connection>").nodes_ran


def test_words_are_short_and_hold_no_encoded_message() -> None:
    """AWS adds kilobytes of base64 to a refused right."""
    said = aws("UnauthorizedOperation", "No. Encoded authorization failure message: " + "A" * 4000)
    assert read_refusal([], said).words == "UnauthorizedOperation (RunInstances): No."
    assert len(read_refusal([], aws("Other", "x" * 4000)).words) <= 400


HISTORIES: dict[str, tuple[Callable[[Any], Exception], bool]] = {
    "unsupported": (lambda errors: errors.ProvisionUnsupportedError("no such shape"), True),
    "credentials": (lambda errors: errors.InvalidCloudCredentials("expired"), True),
    "identity": (lambda errors: errors.CloudUserIdentityError("who are you"), True),
    "kubernetes away": (lambda errors: errors.KubeAPIUnreachableError("no answer"), False),
    "capacity": (lambda errors: errors.ResourcesUnavailableError(GENERIC), False),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_the_history_of_skypilots_error_is_read(name: str) -> None:
    """With SkyPilot's own errors, as they come over the wire."""
    exceptions = pytest.importorskip("sky").exceptions
    make, lasting = HISTORIES[name]
    raised = exceptions.ResourcesUnavailableError(GENERIC, failover_history=[make(exceptions)])
    wired = exceptions.deserialize_exception(exceptions.serialize_exception(raised))
    assert read_refusal(wired.failover_history, str(wired)).lasting is lasting


LOGS: dict[str, tuple[str, str, LaunchFacts]] = {
    "capacity": (
        "ResourcesUnavailableError",
        WAITS["InsufficientInstanceCapacity"],
        LaunchFacts(
            phase=ClusterPhase.NO_CAPACITY,
            problem="InsufficientInstanceCapacity (RunInstances): We currently do not",
        ),
    ),
    "quota": (
        "ResourcesUnavailableError",
        "\x1b[33m" + LASTS["VcpuLimitExceeded"] + "\x1b[0m",
        LaunchFacts(
            phase=ClusterPhase.NO_CAPACITY,
            problem="VcpuLimitExceeded (RunInstances): You have requested more vCPU capacity",
            lasting=True,
            quota_full=True,
        ),
    ),
    "no log": (
        "ResourcesUnavailableError",
        "",
        LaunchFacts(phase=ClusterPhase.NO_CAPACITY, problem=GENERIC, nodes_ran=True),
    ),
    "exit": (
        "SystemExit",
        LASTS["AccessDenied"],
        LaunchFacts(phase=ClusterPhase.FAILED, problem="AccessDenied", lasting=True),
    ),
    "exit, but for a moment": (
        "SystemExit",
        "Failed to fetch IAM instance profile\nError code: Throttling",
        LaunchFacts(
            phase=ClusterPhase.NO_CAPACITY, problem="Throttling", busy=True, nodes_ran=True
        ),
    ),
    "exit, at a full quota": (
        "SystemExit",
        "QUOTA_EXCEEDED: Quota 'CPUS' exceeded.",
        LaunchFacts(
            phase=ClusterPhase.NO_CAPACITY,
            problem="QUOTA_EXCEEDED: Quota 'CPUS' exceeded.",
            lasting=True,
            quota_full=True,
        ),
    ),
    "died in its set-up": (
        "ClusterSetUpError",
        "Instance is up.\nFailed to SSH to 10.0.0.7 after timeout 600s",
        LaunchFacts(
            phase=ClusterPhase.FAILED,
            problem="Failed to SSH to 10.0.0.7 after timeout 600s",
            nodes_ran=True,
            broke_off=True,
        ),
    ),
    "cancelled": (
        "RequestCancelled",
        "",
        LaunchFacts(
            phase=ClusterPhase.FAILED,
            problem=f"SkyPilot: {GENERIC}",
            nodes_ran=True,
            broke_off=True,
        ),
    ),
    "could not look after its refusal": (
        "ClusterStatusFetchingError",
        "",
        LaunchFacts(
            phase=ClusterPhase.FAILED,
            problem=f"SkyPilot does not answer: {GENERIC}",
            nodes_ran=True,
            broke_off=True,
        ),
    ),
    "server stopped": (
        "RequestInterruptedError",
        "",
        LaunchFacts(
            phase=ClusterPhase.FAILED,
            problem="SkyPilot's server was stopped meanwhile",
            nodes_ran=True,
            broke_off=True,
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOGS)
def test_the_log_of_the_request_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS's reason is nowhere else. A request may end in an exit, which must not become ours."""
    sky = pytest.importorskip("sky")
    raised, printed, facts = LOGS[name]
    error = SystemExit(1) if raised == "SystemExit" else getattr(sky.exceptions, raised)(GENERIC)

    def get(request_id: str) -> None:
        raise error

    def stream(request_id: str, *, follow: bool, output_stream: Any) -> None:
        assert not follow
        if not printed:
            raise RuntimeError("the log was tidied away")
        output_stream.write(printed)

    monkeypatch.setattr(sky, "get", get)
    monkeypatch.setattr(sky, "stream_and_get", stream)
    assert SkySdk()._why_failed("request") == facts


def test_an_exit_of_the_servers_is_an_error_here() -> None:
    """It would end the thread that looks, or the controller, without a word."""
    pytest.importorskip("sky")
    with pytest.raises(LauncherFailure), sdk_module._translated():
        raise SystemExit(1)
