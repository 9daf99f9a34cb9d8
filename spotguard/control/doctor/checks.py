"""`doctor`: one look at everything a run will need, before money is spent on finding out."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from spotguard.control.doctor.clouds import Clouds, look_at_clouds
from spotguard.control.doctor.orphan_report import Findings
from spotguard.control.doctor.orphans import find_leftovers
from spotguard.control.doctor.store import try_store
from spotguard.control.doctor.store_trial import MAX_SKEW_S, StoreTrial
from spotguard.errors import SpotguardError
from spotguard.shared.json_documents import document
from spotguard.shared.units import format_bytes, format_duration
from spotguard.spec.home_folder import default_store, keep_private, spotguard_home
from spotguard.storage import open_store, who_am_i

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spotguard.control.doctor.orphan_report import Leftover, ListedClusters
    from spotguard.control.doctor.orphans import Books
    from spotguard.control.doctor.store_trial import TriedStore
    from spotguard.control.drill.loader_trial import LoaderReport

SCHEMA: Final = 1
NEEDED_FREE_BYTES = 500_000_000
COMFORTABLE_FREE_BYTES = 5_000_000_000
MAX_CLOCK_SKEW_S = 2.0
_EARLIEST_SANE_AT = 1_735_689_600.0  # 2025: older than any machine that can run this version
_SLOWEST_IMPORT_S = 120.0
_EXTRAS = {
    "sky": "skypilot",
    "aws": "boto3",
    "gcp": "google-cloud-storage",
    "azure": "azure-storage-blob",
}
_TORCH = "import torch; print(torch.__version__, torch.cuda.device_count())"


class Status(str, Enum):
    """What a check found; each knows how it is shown."""

    mark: str
    colour: str

    OK = ("ok", "✓", "green")
    FAILED = ("failed", "✗", "red")
    NOTED = ("noted", "–", "yellow")  # noqa: RUF001 - a dash is what is meant
    """Worth knowing; nothing that is required."""

    def __new__(cls, value: str, mark: str, colour: str) -> Status:
        """Make a member that carries its mark and colour."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.mark = mark
        member.colour = colour
        return member


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding."""

    name: str
    status: Status
    detail: str
    """What was found, in a sentence."""
    hint: str = ""
    """The way out; empty if none is needed."""


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """All findings."""

    checks: tuple[Check, ...]
    store: StoreTrial | None = None
    """What was measured of the store; None if it could not be tried."""
    clusters: Findings = field(default_factory=Findings)
    """What SkyPilot's books have of spotguard's."""
    clouds: Clouds = field(default_factory=Clouds)
    """Where SkyPilot would start nodes."""
    loader: LoaderReport | None = None
    """What was measured of a script's loader; None unless a script was named."""

    @property
    def works(self) -> bool:
        """True when nothing that is required failed."""
        return all(check.status is not Status.FAILED for check in self.checks)

    @property
    def ok(self) -> bool:
        """True when all that is required works, and no cluster costs money for nobody."""
        return self.works and not self.clusters.orphans

    @property
    def verdict(self) -> str:
        """All of it in one sentence."""
        works, however = "all that is required works", "but"
        if not self.works:
            works, however = "something that is required does not work", "and"
        if not self.clusters.orphans:
            return works
        return f"{works}, {however} {self.clusters.words()}: spotguard doctor --end-orphans"

    def to_json(self) -> dict[str, Any]:
        """Return the object of `doctor --json`."""
        told = DoctorDocument(
            ok=self.ok,
            checks=self.checks,
            store=self.store.told() if self.store else None,
            clusters=self.clusters.told(),
            clouds=self.clouds,
            loader=self.loader,
        )
        return document(told)


@dataclass(frozen=True, kw_only=True)
class DoctorDocument:
    """What `doctor --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    ok: bool
    """Whether all that is required works, and no cluster costs money for nobody."""
    checks: tuple[Check, ...]
    store: TriedStore | None
    """What was measured of the store; None if it could not be tried."""
    clusters: ListedClusters
    """What SkyPilot's books have of spotguard's."""
    clouds: Clouds
    """Where SkyPilot would start nodes."""
    loader: LoaderReport | None = None
    """What was measured of a script's loader; then nothing else is looked at."""


def examine(
    store: str | None = None,
    tell: Callable[[str], None] = lambda doing: None,
    books: Books | None = None,
    infra: Sequence[str] = (),
) -> DoctorReport:
    """Return what works here and what does not; leaves nothing behind but spotguard's home.

    Args:
        store: the store to try; the default store of this machine unless given.
        tell: is told what is done now, before anything that can take seconds.
        books: SkyPilot's, to look for clusters that nobody wants.
        infra: where jobs shall run: these clouds must be enabled at SkyPilot.
    """
    home = spotguard_home()
    tell("importing torch")
    checks = [check_python(), check_torch(), check_home(home), check_clock()]
    store = store or str(default_store(home))
    keep_private(store)
    found, trial = check_store(store, tell)
    tell("looking at this machine's runs")
    checks += [*found, check_disk(home), *check_extras(), *check_runs()]
    tell("asking SkyPilot which clouds are enabled")
    clouds = look_at_clouds(infra)
    checks += check_clouds(clouds)
    clusters = Findings()
    if books is not None:
        tell("asking SkyPilot for clusters that nobody wants")
        silent = Findings(asked=True, problem=clouds.problem)
        clusters = silent if clouds.problem else find_leftovers(books)
    checks += check_clusters(clusters)
    return DoctorReport(checks=tuple(checks), store=trial, clusters=clusters, clouds=clouds)


def check_python() -> Check:
    """Find whether this Python is one that spotguard supports."""
    supported = sys.version_info >= (3, 10)
    return Check(
        name="python",
        status=Status.OK if supported else Status.FAILED,
        detail=f"{platform.python_version()} ({sys.executable})",
        hint="" if supported else "spotguard needs Python 3.10 or newer",
    )


def check_torch(code: str = _TORCH) -> Check:
    """Find whether torch can be imported, in a process of its own: half an install crashes."""
    try:
        said = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_SLOWEST_IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        waited = format_duration(_SLOWEST_IMPORT_S)
        return Check(
            name="torch", status=Status.FAILED, detail=f"importing it took more than {waited}"
        )
    if said.returncode != 0:
        last = (said.stderr.strip().splitlines() or [f"exit code {said.returncode}"])[-1]
        return Check(
            name="torch",
            status=Status.FAILED,
            detail=f"cannot be imported: {last}",
            hint="pip install torch",
        )
    version, gpus = said.stdout.split()
    found = "no GPU, training on CPU" if gpus == "0" else f"{gpus} GPU(s)"
    return Check(name="torch", status=Status.OK, detail=f"{version}, {found}")


def check_home(home: Path) -> Check:
    """Find whether spotguard can write its own folder."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"spotguard")
    except OSError as problem:
        return Check(
            name="home",
            status=Status.FAILED,
            detail=f"{home} cannot be written: {problem.strerror}",
            hint="fix its permissions, or set SPOTGUARD_HOME to another folder",
        )
    return Check(name="home", status=Status.OK, detail=f"{home} can be written")


def check_clock(
    now: Callable[[], float] = time.time, file_clock: Callable[[], float] | None = None
) -> Check:
    """Find whether this machine's clock is sane, and agrees with that of its file system."""
    at = now()
    if at < _EARLIEST_SANE_AT:
        return Check(
            name="clock",
            status=Status.FAILED,
            detail=f"it shows {time.strftime('%Y-%m-%d', time.gmtime(at))}, which is in the past",
            hint="set the clock: budgets, deadlines and notices depend on it",
        )
    try:
        skew_s = abs((file_clock or _written_at)() - at)
    except OSError as problem:
        return Check(
            name="temporary folder",
            status=Status.FAILED,
            detail=f"no file can be written there: {problem.strerror or problem}",
            hint="free some space, or set TMPDIR to a folder that you can write",
        )
    if skew_s > MAX_CLOCK_SKEW_S:
        return Check(
            name="clock",
            status=Status.NOTED,
            detail=f"it differs from the file system's by {format_duration(skew_s)}",
            hint="synchronise the clocks (NTP)",
        )
    return Check(name="clock", status=Status.OK, detail="sane, and agrees with the file system's")


def _written_at() -> float:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
        file.flush()
        return Path(file.name).stat().st_mtime


def check_store(
    url: str, tell: Callable[[str], None] = lambda doing: None
) -> tuple[list[Check], StoreTrial | None]:
    """Find who we are to a store, what we may do there, how fast it is, and what its clock says."""
    try:
        url = open_store(url).url  # which takes none with a login in it, before it is told
        tell(f"looking for the credentials of {url}")
        identity = who_am_i(url)
        trial = try_store(url, tell=tell)
    except SpotguardError as problem:
        failed = Check(
            name="store", status=Status.FAILED, detail=problem.message, hint=problem.hint
        )
        return [failed], None
    checks = list(_missing_rights(trial)) or [_all_rights(trial)]
    if identity is not None:
        checks.insert(0, Check(name="store login", status=Status.OK, detail=str(identity)))
    return [*checks, *_measured(trial)], trial


def _all_rights(trial: StoreTrial) -> Check:
    can = "writes, reads, lists, deletes, refuses to overwrite"
    return Check(name="store", status=Status.OK, detail=f"{trial.url}: {can}")


def _missing_rights(trial: StoreTrial) -> Iterator[Check]:
    for same in trial.reasons():
        rights = ", ".join(finding.right for finding in same)
        yield Check(
            name="store",
            status=Status.FAILED,
            detail=f"{trial.url}: {rights}: {same[0].detail}",
            hint=same[0].hint,
        )


def _measured(trial: StoreTrial) -> Iterator[Check]:
    if trial.latency_s is not None:
        yield _speed(trial, trial.latency_s)
    if trial.clock_skew_s is not None:
        yield _store_clock(trial.clock_skew_s)


def _speed(trial: StoreTrial, latency_s: float) -> Check:
    latency = f"{1000 * latency_s:.1f} ms for a small write"
    if trial.write_bytes_per_s is None or trial.read_bytes_per_s is None:
        return Check(name="store speed", status=Status.NOTED, detail=latency, hint=trial.no_speed)
    rates = (
        f"writes {format_bytes(trial.write_bytes_per_s)}/s, "
        f"reads {format_bytes(trial.read_bytes_per_s)}/s"
    )
    return Check(name="store speed", status=Status.OK, detail=f"{latency}, {rates}")


def _store_clock(skew_s: float) -> Check:
    if abs(skew_s) <= MAX_SKEW_S:
        return Check(name="store clock", status=Status.OK, detail="agrees with this machine's")
    side = "behind" if skew_s > 0 else "ahead of"
    return Check(
        name="store clock",
        status=Status.NOTED,
        detail=f"this machine's is {format_duration(abs(skew_s))} {side} the store's",
        hint="set it (timedatectl set-ntp true): budgets, deadlines and signatures depend on it",
    )


def check_disk(folder: Path, free_bytes: int | None = None) -> Check:
    """Find whether there is room for runs, their logs and checkpoints."""
    if free_bytes is None:
        existing = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
        free_bytes = shutil.disk_usage(existing).free
    detail = f"{format_bytes(free_bytes)} free at {folder}"
    if free_bytes < NEEDED_FREE_BYTES:
        return Check(name="disk", status=Status.FAILED, detail=detail, hint="free some space")
    if free_bytes < COMFORTABLE_FREE_BYTES:
        hint = "little for checkpoints: each takes about three times the model's weights"
        return Check(name="disk", status=Status.NOTED, detail=detail, hint=hint)
    return Check(name="disk", status=Status.OK, detail=detail)


def check_extras() -> Iterator[Check]:
    """Tell which optional parts are installed; none is required for local runs."""
    for extra, package in _EXTRAS.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Check(
                name=f"extra {extra}",
                status=Status.NOTED,
                detail="not installed; not needed for local runs",
                hint=f"pip install 'spotguard[{extra}]'",
            )
        else:
            yield Check(name=f"extra {extra}", status=Status.OK, detail=f"{package} {version}")


def check_clouds(found: Clouds) -> Iterator[Check]:
    """Tell which clouds SkyPilot has enabled; one that a job names and that is not one fails."""
    if not found.asked:
        return
    if found.problem:
        # One that is silent may only be busy; one that is absent or broken starts nothing.
        required = bool(found.named) and not found.is_silent
        status = Status.FAILED if required else Status.NOTED
        yield Check(name="clouds", status=status, detail=found.problem, hint=found.hint)
        return
    some = ", ".join(found.enabled)
    yield Check(
        name="clouds",
        status=Status.OK if some else Status.NOTED,
        detail=f"enabled at SkyPilot: {some or 'none'}",
        hint="" if some else "enable one: sky check",
    )
    for cloud, reason in found.disabled.items():
        yield Check(
            name=f"cloud {cloud}",
            status=Status.FAILED,
            detail=f"is named, and SkyPilot has not enabled it: {reason}",
            hint=found.way_out(cloud),
        )


def check_clusters(found: Findings) -> list[Check]:
    """Tell of clusters that cost money and that no living controller looks after."""
    if not found.asked:
        return []
    if found.problem:
        hint = "clusters that nobody wants would not be found; try: sky status --refresh"
        return [Check(name="clusters", status=Status.NOTED, detail=found.problem, hint=hint)]
    if not found.leftovers:
        detail = f"{found.wanted} of spotguard's at SkyPilot, none that nobody wants"
        return [Check(name="clusters", status=Status.OK, detail=detail)]
    return [_leftover(each) for each in found.leftovers]


def _leftover(leftover: Leftover) -> Check:
    ways = f"end it: {leftover.end_with}"
    if leftover.keep_with:
        ways += f"; go on with its run: {leftover.keep_with}"
    name = "orphan" if leftover.is_orphan else "cluster"
    return Check(name=name, status=Status.NOTED, detail=leftover.words(), hint=ways)


def check_runs() -> list[Check]:
    """Find runs without a controller, and processes of clusters that are gone."""
    from spotguard.control.api import list_runs, view

    checks: list[Check] = []
    known = list_runs()
    for run_id in (summary.run_id for summary in known):
        try:
            picture = view(run_id)
        except SpotguardError as problem:
            noted = Check(
                name="run",
                status=Status.NOTED,
                detail=problem.message,
                hint=problem.hint,
            )
            checks.append(noted)
        else:
            if not picture.state.settled and not picture.controller_alive:
                checks.append(_orphan(run_id))
        checks += _strays(run_id)
    healthy = f"{len(known)} known, none without a controller, no stray processes"
    return checks or [Check(name="runs", status=Status.OK, detail=healthy)]


def _orphan(run_id: str) -> Check:
    return Check(
        name="run",
        status=Status.NOTED,
        detail=f"{run_id} goes on, but its controller is gone",
        hint=f"this restarts it: spotguard status {run_id}",
    )


def _strays(run_id: str) -> list[Check]:
    from spotguard.control.run_folder import runs_folder
    from spotguard.launch.local.stray_processes import find_strays

    return [
        Check(
            name="process",
            status=Status.NOTED,
            detail=f"{stray.pid} outlived its cluster {stray.cluster}: {stray.command}",
            hint=f"it costs nothing but this machine's time; end it: kill {stray.pid}",
        )
        for stray in find_strays(runs_folder() / run_id)
    ]
