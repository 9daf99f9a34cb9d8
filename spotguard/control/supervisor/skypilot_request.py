"""What the user asked for, in SkyPilot's words: places, machines, the task of an attempt."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotguard.control.journal.record import Allotment, AttemptRecord, Limits, RunRecord
from spotguard.control.supervisor.attempt_limits import allot
from spotguard.control.supervisor.policy import policy_for
from spotguard.control.supervisor.request import cluster_name, launch_request
from spotguard.errors import SpecError, UsageError
from spotguard.events.states import Market
from spotguard.launch.base import Survey
from spotguard.launch.skypilot.existence import Missing, look_up
from spotguard.launch.skypilot.import_sky import check_task
from spotguard.launch.skypilot.prices import Place, rank, survey
from spotguard.launch.taskyaml import (
    TAKEN,
    Machine,
    secrets_hidden,
    seen_from_workdir,
    task_yaml,
)
from spotguard.launch.wheel import build_wheel
from spotguard.launch.workdir.requirements_file import (
    check_no_login,
    holds_login,
    plain_requirements,
)
from spotguard.policy.plan.job import planned_markets
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.infra import LOCAL, gpu_alternatives
from spotguard.spec.model.own_template import is_own_template, read_own_template
from spotguard.spec.script import read_script
from spotguard.spec.setting_layers import script_needs
from spotguard.spec.templates import BASE, load_template, merged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.launch.base import LaunchRequest, Offer, Unchecked
    from spotguard.spec.model import JobSpec
    from spotguard.spec.setting_layers import Needs


def find_offers(spec: JobSpec) -> Survey:
    """Return where SkyPilot can have the job's nodes, and for how much. Takes some seconds.

    Raises:
        MissingExtra: SkyPilot is not installed.
    """
    elsewhere, machine = spec.on_demand_infra, machine_for(spec)
    found = [
        survey(
            _places(spec.infra),
            replace(machine, gpus=gpus),
            market=spec.market,
            on_demand_places=_places(elsewhere) if elsewhere else (),
        )
        for gpus in gpu_alternatives(spec.gpus) or (None,)
    ]
    offers = [
        _repriced(spec, replace(offer, gpus=gpus))
        for gpus, each in zip(gpu_alternatives(spec.gpus) or (None,), found, strict=True)
        for offer in each.offers
    ]
    if len(found) == 1:
        return replace(found[0], offers=tuple(offers))
    skipped = [
        replace(place, why=f"{gpus}: {place.why}")
        for gpus, each in zip(gpu_alternatives(spec.gpus), found, strict=True)
        for place in each.skipped
    ]
    return Survey(
        offers=tuple(sorted(offers, key=rank)),
        skipped=tuple(skipped),
        sources=found[0].sources,
    )


def check_places(spec: JobSpec) -> tuple[Unchecked, ...]:
    """Return the places of which nobody could say whether there are such. Takes some seconds.

    Raises:
        SpecError: there is no such region, zone, context, cluster or partition.
    """
    unchecked: list[Unchecked] = []
    for field, infra in (("infra", spec.infra), ("on_demand_infra", spec.on_demand_infra)):
        for verdict in look_up(_places(infra) if infra else ()):
            if isinstance(verdict, Missing):
                raise SpecError(field, verdict.words(), hint=verdict.way_out())
            unchecked.append(verdict)
    return tuple(unchecked)


def check_folders(spec: JobSpec) -> None:
    """Let pass a job whose script and requirements are copied to the nodes with its workdir.

    Raises:
        SpecError: one of them is not in that folder.
    """
    for setting, path in (("script", spec.script), ("node.requirements", spec.node.requirements)):
        if path is not None:
            seen_from_workdir(setting, path, spec.workdir)


def machine_for(spec: JobSpec) -> Machine:
    """Return what a node of the job must be; what the user leaves open is the template's.

    Raises:
        SpecError: the script cannot be read, or what it says of its needs makes no sense.
    """
    node = spec.node
    script = read_script(Path(spec.script))
    needs = script_needs(script.path, script.source)
    cpus = node.cpus
    if cpus is None and not spec.gpus and node.instance_type is None:
        cpus = template_for(spec)["resources"].get("cpus")
    return Machine(
        gpus=next(iter(gpu_alternatives(spec.gpus)), None),
        instance_type=node.instance_type,
        cpus=cpus,
        memory=node.memory,
        disk_gb=node.disk_gb,
        image=node.image,
        setup=node.setup,
        file_mounts=node.file_mounts,
        volumes=node.volumes,
        requirements=_requirements(spec, needs),
        requirements_file=node.requirements,
        python=needs.python,
    )


def _requirements(spec: JobSpec, needs: Needs) -> tuple[str, ...]:
    """Return what nodes install, a line each as pip reads it, of a script's own block.

    Raises:
        SpecError: an address holds a login, or a folder of the user's is not copied to nodes.
    """
    top = Path(spec.workdir)
    if spec.node.requirements is not None:
        check_no_login("node.requirements", Path(spec.node.requirements))
        found = plain_requirements(Path(spec.node.requirements))
        for file in found.files:
            seen_from_workdir("node.requirements", os.path.normpath(file), spec.workdir)
        for folder in found.folders:
            _check_project("node.requirements", top / folder, spec.workdir)
        return ()
    for line in (*needs.dependencies, *([needs.index] if needs.index else [])):
        if holds_login(line):
            raise SpecError(
                "script",
                "its block has an address that holds a login",
                hint="take it out: let pip read it from a variable, as in "
                "https://${TOKEN}@HOST, and give that by --env TOKEN=...",
            )
    lines = [f"--index-url {needs.index}"] if needs.index else []
    for text in needs.folders:
        option, path = ("-e ", text[3:]) if text.startswith("-e ") else ("", text)
        bare, bracket, extras = path.partition("[")
        place = Path(os.path.normpath(Path(spec.script).parent / bare))
        seen = _check_project("script", place, spec.workdir)
        lines.append(f"{option}./{seen}{bracket}{extras}")
    return (*lines, *needs.dependencies)


def _check_project(setting: str, place: Path, workdir: str) -> str:
    """Return a project of the user's as seen from the workdir, if nodes have it there."""
    seen = seen_from_workdir(setting, os.path.normpath(place), workdir)
    if not place.exists():
        raise SpecError(setting, f"it installs ./{seen}, and there is none in {workdir}")
    return seen


def check_template(spec: JobSpec) -> None:
    """Let pass a template of the user's own that says nothing wrong; local nodes take none of it.

    Raises:
        SpecError: it cannot be read, or says what is not its to say.
    """
    if is_own_template(spec.template):
        read_own_template(spec.template, taken=TAKEN)


def template_for(spec: JobSpec) -> dict[str, Any]:
    """Return the template that the user chose, else that of the first place; both, if it is own.

    Raises:
        SpecError: the user's own says what is not its to say.
    """
    if is_own_template(spec.template):
        own = read_own_template(spec.template, taken=TAKEN)
        return merged(load_template(_places(spec.infra)[0].infra), own)
    name = spec.template if spec.template != BASE else _places(spec.infra)[0].infra
    return load_template(name)


def task_for(spec: JobSpec, request: LaunchRequest, offers: Sequence[Offer] = ()) -> dict[str, Any]:
    """Return the SkyPilot task of an attempt; makes the wheel that it names if need be.

    Args:
        spec: the job.
        request: the attempt.
        offers: the places to try, in this order; the request's own unless given.

    Raises:
        SpecError: something cannot be carried to the nodes; names the setting.
    """
    wheel = _wheel(spotguard_home() / "wheels")
    return task_yaml(request, machine_for(spec), template_for(spec), offers=offers, wheel=wheel)


def _wheel(folder: Path) -> Path:
    """Return the wheel of the spotguard that this process is, whatever was installed since."""
    path = _wheels.get(folder)
    if path is None or not path.exists():
        path = _wheels[folder] = build_wheel(folder)
    os.utime(path)  # it is wanted: no other process deletes it
    return path


_wheels: dict[Path, Path] = {}


def preview(spec: JobSpec, offers: Sequence[Offer]) -> dict[str, Any]:
    """Return the task of a first attempt on the most nodes, as it may be shown: no secrets.

    Raises:
        UsageError: the job runs on this machine, without SkyPilot.
        SpecError: no place has such nodes, or something cannot be carried to them.
    """
    if spec.infra == LOCAL:
        raise UsageError(
            "a job on this machine has no SkyPilot task",
            hint="say where it shall run: --infra aws",
        )
    wanted = planned_markets(spec)[0]
    chosen = [offer for offer in offers if offer.market is wanted]
    if not chosen:
        raise SpecError("infra", f"given {spec.infra!r}, where no such node is offered")
    request = _first_request(spec, chosen[0])
    task = task_for(spec, request, chosen)
    if is_own_template(spec.template):
        check_task(task)
    return secrets_hidden(task)


def _first_request(spec: JobSpec, offer: Offer) -> LaunchRequest:
    now = time.time()
    run_id = f"{spec.name}-preview"
    limits = Limits(
        budget_usd=spec.budget_usd,
        deadline_at=None if spec.deadline_s is None else now + spec.deadline_s,
        nodes_min=spec.nodes.min,
        nodes_max=spec.nodes.max,
    )
    record = RunRecord(
        run_id=run_id,
        name=spec.name,
        created_at=now,
        store_root=spec.store,
        spec={},
        limits=limits,
    )
    nodes, price = spec.nodes.max, offer.price_usd_per_h
    allotted = allot(record, nodes=nodes, price_usd_per_h=price, now=now, policy=policy_for(spec))
    attempt = AttemptRecord(
        number=1,
        cluster=cluster_name(run_id, 1),
        nodes=nodes,
        offer=offer,
        intended_at=now,
        allotment=allotted if isinstance(allotted, Allotment) else Allotment(),
    )
    return launch_request(record, attempt, spec, now=now)


def _places(infra: str) -> tuple[Place, ...]:
    return tuple(map(Place.parse, infra.split(",")))


def _repriced(spec: JobSpec, offer: Offer) -> Offer:
    """Return the offer at the prices that the user gave, if any."""
    on_demand = spec.on_demand_usd_per_h or offer.on_demand_usd_per_h
    if offer.market is Market.ON_DEMAND:
        price = spec.on_demand_usd_per_h or offer.price_usd_per_h
        return replace(offer, price_usd_per_h=price, on_demand_usd_per_h=price)
    price = spec.price_usd_per_h or offer.price_usd_per_h
    return replace(offer, price_usd_per_h=price, on_demand_usd_per_h=on_demand)
