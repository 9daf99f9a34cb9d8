from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from spotguard.errors import SpecError
from spotguard.spec.nodes import NodeRange
from spotguard.spec.setting import sanitized_name

if TYPE_CHECKING:
    from tests.spec.conftest import Resolve

NONSENSE: list[object] = [float("nan"), float("inf"), -1, 0, True, [1], {"a": 1}, " ", "x", "-3"]


@pytest.mark.parametrize(
    "key",
    [
        "budget",
        "deadline",
        "price",
        "on_demand_price",
        "heartbeat",
        "nodes",
        "nproc_per_node",
        "save_every",
        "local.mtbf",
        "local.speed_up",
    ],
)
@pytest.mark.parametrize("raw", NONSENSE, ids=repr)
def test_nonsense_is_refused_by_name(resolve_job: Resolve, key: str, raw: object) -> None:
    """Not a number, infinite, negative, zero, of another type: named, repeated, and corrected."""
    with pytest.raises(SpecError) as caught:
        resolve_job({key: raw})
    message = str(caught.value)
    assert message.startswith(f"{key}: given ")
    assert "(flag " in message
    assert "; allowed: " in message
    assert caught.value.exit_code == 2
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "raw", "said"),
    [
        ("budget", "-5", "given '-5' (flag --budget); allowed: an amount of USD above 0"),
        ("budget", "1,50", "given '1,50' (flag --budget); allowed: an amount of USD above 0, deci"),
        ("budget", "0,918", "decimals after a point"),
        ("budget", "1.200,50", "decimals after a point"),
        ("budget", "12,34,567", "decimals after a point"),
        ("price", "0,918", "decimals after a point"),
        ("max_price", "1,2", "decimals after a point"),
        ("on_demand_price", "3,06", "decimals after a point"),
        ("team.budget", "19,99 / month", "decimals after a point"),
        ("notify_on", "burn-rate 1,50", "allowed: a list of"),
        ("nodes", "4:1", "given '4:1'"),
        ("nodes", "0:2", "given '0:2'"),
        ("nodes", "1:", "given '1:'"),
        ("nodes", "1:2:3", "given '1:2:3'"),
        ("nodes", 10**12, "a count from 1 to 1024"),
        ("nodes", 1.5, "given 1.5"),
        ("keep_last", 1, "allowed: a whole number from 2"),
        ("keep_last", 2.5, "given 2.5"),
        ("seed", -1, "allowed: a whole number from 0"),
        ("seed", 2**63, "given 9223372036854775808"),
        ("budget", 10**400, "; allowed: "),
        ("deadline", 10**400, "; allowed: "),
        ("infra", "mars", "allowed: local, or clouds such as aws, aws/us-east-1 or gcp,aws"),
        ("name", "My Run", "allowed: 1 to 40 of a-z"),
        ("name", "a" * 41, "allowed: 1 to 40 of a-z"),
        ("name", "-a", "allowed: 1 to 40 of a-z"),
        ("store", 3, "allowed: a folder or a URL"),
        ("store", "a\0b", "allowed: a folder or a URL"),
        ("allow_unknown_price", "maybe", "allowed: true or false"),
        ("save_every", "0 steps", "a count such as"),
        ("save_every", "10 stpes", "a count such as"),
        ("save_every", "0.1ms", "a count such as"),
        ("local.interrupt", 3, "allowed: interruptions"),
        ("local.interrupt", ["", "a"], "allowed: interruptions"),
        ("name", "x" * 500, "..."),
    ],
)
def test_the_message_says_what_was_given_and_what_is_allowed(
    resolve_job: Resolve, key: str, raw: object, said: str
) -> None:
    """Every wrong value gets one sentence: the field, what was given, what is allowed."""
    with pytest.raises(SpecError) as caught:
        resolve_job({key: raw})
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("key", "typo", "meant"),
    [
        ("template", "kuberntes", "kubernetes"),
        ("template", "AWS", "aws"),
        ("market", "sport", "spot"),
        ("local.metadata", "asure", "azure"),
    ],
)
def test_a_mistyped_word_gets_the_nearest(
    resolve_job: Resolve, key: str, typo: str, meant: str
) -> None:
    """Where only some words are allowed, the hint names the one that was meant."""
    with pytest.raises(SpecError) as caught:
        resolve_job({key: typo})
    assert caught.value.hint == f"did you mean {meant!r}?"


@pytest.mark.parametrize(
    ("key", "raw", "field", "value"),
    [
        ("budget", "$1,200.50", "budget_usd", 1200.5),
        ("budget", "$ 1,234,567", "budget_usd", 1234567.0),
        ("budget", 200, "budget_usd", 200.0),
        ("budget", "200", "budget_usd", 200.0),
        ("deadline", "1h30m", "deadline_s", 5400.0),
        ("deadline", 90, "deadline_s", 90.0),
        ("nodes", "2", "nodes", NodeRange(2, 2)),
        ("nodes", 3, "nodes", NodeRange(3, 3)),
        ("nodes", "1:4", "nodes", NodeRange(1, 4)),
        ("save_every", "30", "save_every", "30s"),
        ("save_every", "1.5m", "save_every", "90s"),
        ("save_every", "1 step", "save_every", "1 steps"),
        ("save_every", "100STEPS", "save_every", "100 steps"),
        ("save_every", "AUTO", "save_every", "auto"),
        ("save_every", "12d", "save_every", "1036800s"),
        ("market", "on-demand", "market", "on_demand"),
        ("allow_unknown_price", "yes", "allow_unknown_price", True),
        ("allow_unknown_price", "0", "allow_unknown_price", False),
        ("name", "gpt-2", "name", "gpt-2"),
    ],
)
def test_each_spelling_becomes_one_value(
    resolve_job: Resolve, key: str, raw: object, field: str, value: object
) -> None:
    """However it is written, a setting has one canonical value."""
    assert getattr(resolve_job({key: raw}).spec, field) == value


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ("1A = 'secret1'", "'1A' is no name for a variable"),
        ("A = true", "the value of A is not a text"),
        ("A = ['secret1']", "the value of A is not a text"),
        ('A = "secret1\\u0000"', "the value of A holds a zero byte"),
        ("SPOTGUARD_RUN_ID = 'secret1'", "SPOTGUARD_RUN_ID is set by spotguard itself"),
    ],
)
def test_wrong_variables_are_named_without_their_value(
    resolve_job: Resolve, variables: str, said: str
) -> None:
    """A message about a variable of the job's never repeats its value."""
    with pytest.raises(SpecError) as caught:
        resolve_job(project=f"[env]\n{variables}")
    assert said in str(caught.value)
    assert "secret1" not in f"{caught.value}{caught.value.hint}{caught.value.__cause__}"


def test_whole_numbers_are_fine_as_variables(resolve_job: Resolve) -> None:
    """`OMP_NUM_THREADS = 1` in TOML means the text 1."""
    assert resolve_job(project="[env]\nOMP_NUM_THREADS = 1").spec.env == {"OMP_NUM_THREADS": "1"}


def test_a_spec_cannot_change(resolve_job: Resolve) -> None:
    """What was checked stays as it was checked."""
    with pytest.raises(ValidationError):
        resolve_job().spec.budget_usd = 3.0


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("Train_GPT", "train-gpt"),
        ("_", "job"),
        ("训练", "job"),
        ("a" * 50, "a" * 40),
        ("x--y", "x-y"),
    ],
)
def test_any_script_has_a_name(stem: str, name: str) -> None:
    """The default name fits into a run id, a folder and a cluster name."""
    assert sanitized_name(stem) == name


def test_a_range_says_itself() -> None:
    """A range reads as it is written."""
    assert [str(NodeRange(2, 2)), str(NodeRange(1, 4))] == ["2", "1:4"]
