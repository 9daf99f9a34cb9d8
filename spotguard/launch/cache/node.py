"""A node's cached folders, as its agent sees them: back before the script, kept while it trains."""

from __future__ import annotations

import math
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spotguard.errors import SpotguardError
from spotguard.events import env
from spotguard.events.untrusted import Refused, integer, parse_object
from spotguard.launch.cache.keeping import Interrupted, Keeping, Owner
from spotguard.launch.cache.restoring import BroughtBack, bring_back, newest
from spotguard.launch.cache.tidying import tidy
from spotguard.shared.cache_folders import COMPILED, on_this_node
from spotguard.shared.calm_threads import be_calm
from spotguard.shared.node_locks import LEFT, is_saving
from spotguard.shared.paths import home_folder, scratch_folder
from spotguard.shared.units import format_bytes, format_duration
from spotguard.storage.deadline import give_up_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

FIRST_ROUND_S: Final = 10.0
_BETWEEN_ROUNDS_S: Final = 20.0
_SHARE_OF_TIME: Final = 10
"""Between two rounds there is so often the time that the last one took."""
_LAST_ROUND_S: Final = 5.0
_LIST_S: Final = 120.0
"""For finding out what earlier attempts kept."""
_RESTORE_S: Final = 300.0
"""For bringing it back. Nodes that are ready first wait for the others, but not for ever."""
_LOOK_S: Final = 0.1
_TIDY_S: Final = 3600.0
_TOLD_S: Final = 5.0
"""How often a restore that takes long says how far it is."""
INDUCTOR: Final = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class Wish:
    """What is to be kept, as the controller told this node."""

    folders: tuple[tuple[str, Path], ...]
    """As in the setting, and where it is here."""
    most_bytes: int
    key: str

    @classmethod
    def of(cls, given: Mapping[str, str], workdir: Path) -> Wish | None:
        """Return it; None if nothing is to be kept, or nobody could prove what is restored."""
        key, raw = given.get(env.CACHE_KEY), given.get(env.CACHE)
        if not key or not raw or not given.get(env.RUN_ID) or not given.get(env.STORE):
            return None
        try:
            body = parse_object(raw, env.CACHE)
        except Refused:
            return None
        names = body.get("folders")
        most_bytes = integer(body, "most_bytes", low=0)
        if not isinstance(names, list) or not names or most_bytes is None:
            return None
        home = given.get("HOME") or str(home_folder())
        folders = tuple(
            (name, on_this_node(name, home=home, workdir=str(workdir)))
            for name in names
            if isinstance(name, str)
        )
        return cls(folders, most_bytes, key)

    def told_to_job(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which what `torch.compile` makes comes to lie in such a folder.

        A folder that the user has named stays theirs; then it is kept if `cache` names it.
        """
        compiled = dict(self.folders).get(COMPILED)
        return {} if compiled is None or given.get(INDUCTOR) else {INDUCTOR: str(compiled)}


class NodeCache:
    """Restores, and then keeps in a thread of its own. Made for one node, for all its attempts."""

    def __init__(
        self,
        wish: Wish,
        owner: Owner,
        open_store: Callable[[], ObjectStore],
        *,
        secrets: Iterable[str],
        clock: Clock,
        told: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        """`told` tells whether this node is to leave."""
        self._wish = wish
        self._owner = owner
        self._open_store = open_store
        self._secrets = tuple(secrets)
        self._clock = clock
        self._told = told
        self._saving: str | None = None
        """The file that a rank holds locked while it saves."""
        self._say = say
        self._over = threading.Event()
        self._give_up_at = math.inf
        self._keeping: Keeping | None = None
        self._knows_earlier = False
        """What earlier attempts kept could be listed; else a listing of ours would hide it."""
        self._are_closed = False
        """The job has left in order, so none of its files is half-written."""
        self._thread = threading.Thread(target=self._keep, name="spotguard-cache", daemon=True)
        self._said = ""
        self._tidied_at = -math.inf

    def restore(self) -> BroughtBack:
        """Bring back what earlier attempts kept; blocks. What fails is told, and left out."""
        began = self._clock.monotonic()
        restored = BroughtBack()
        said_at, late_at = began, began + _RESTORE_S

        def is_late() -> bool:
            return self._told() or self._clock.monotonic() >= late_at

        def progress(done: int, total: int) -> None:
            nonlocal said_at
            if self._clock.monotonic() - said_at >= _TOLD_S:
                said_at = self._clock.monotonic()
                self._say(f"cache: {format_bytes(done)} of {format_bytes(total)} are back")

        try:
            with give_up_after(_LIST_S):
                store = self._open_store()
                restored = self._earlier(store)
            bring_back(store, restored, self._wish.folders, stop=is_late, progress=progress)
            if self._clock.monotonic() >= late_at:
                restored.problems.append("the rest takes too long, and is left out on this node")
        except (SpotguardError, OSError) as problem:
            restored.problems.append(f"the cached folders could not be read: {problem}")
        took_s = self._clock.monotonic() - began
        if restored.files:
            self._say(
                f"cache: back after {format_duration(took_s)}: {restored.files} file(s) of attempt "
                f"{restored.attempt} ({format_bytes(restored.size_bytes)})"
            )
        for words in restored.problems[:3]:
            self._say(f"cache: {words}")
        if len(restored.problems) > 3:
            self._say(f"cache: {len(restored.problems)} files in all are not back")
        self._keeping = self._keeping_after(restored)
        return restored

    def start(self) -> dict[str, str]:
        """Begin to keep, in some seconds; returns at once what the job is to know."""
        try:
            saving = scratch_folder("spotguard-saving-") / "saving"
            saving.touch(0o600)
            self._saving = str(saving)
        except OSError as problem:  # no room on this node: the job may do without
            self._say(f"cache: nothing is kept: {problem}")
            return {}
        self._thread.start()
        return {env.SAVING: self._saving}

    def go_on(self, *, attempt: int, place: int, places: int) -> None:
        """Keep for another attempt from here on, which began in place; returns at once."""
        self._left.unlink(missing_ok=True)
        self._owner = replace(self._owner, attempt=attempt, place=place, places=places)
        if self._keeping is not None:
            self._keeping.begin_attempt(self._owner)

    def finish(self, *, goes_on: bool) -> None:
        """End; if the run goes on elsewhere, keep what is new, for some seconds at most."""
        self._are_closed = self._left.exists()
        self._give_up_at = self._clock.monotonic() + (_LAST_ROUND_S if goes_on else 0.0)
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_ROUND_S if goes_on else 0.0)
        if self._saving is not None:
            shutil.rmtree(Path(self._saving).parent, ignore_errors=True)

    @property
    def _left(self) -> Path:
        """There once the job has left in order."""
        return Path(f"{self._saving}{LEFT}")

    def _keeping_after(self, restored: BroughtBack) -> Keeping:
        return Keeping(
            self._wish.folders,
            self._owner,
            most_bytes=self._wish.most_bytes,
            secrets=self._secrets,
            clock=self._clock,
            wait=self._wait_for_way,
            had=restored.listing,
            later=restored.later,
        )

    def _keep(self) -> None:
        """Top of the thread: round after round, whatever goes wrong in one of them."""
        be_calm()
        pause_s = FIRST_ROUND_S
        while not self._over.wait(pause_s):
            began = self._clock.monotonic()
            self._try_round(final=False)
            pause_s = max(_BETWEEN_ROUNDS_S, _SHARE_OF_TIME * (self._clock.monotonic() - began))
        if self._clock.monotonic() < self._give_up_at:
            self._try_round(final=True)

    def _try_round(self, *, final: bool) -> None:
        try:
            with give_up_after(self._time_left_s()):
                store = self._open_store()
                keeping = self._keeping_of(store)
                keeping.round(store, final=final, closed=self._are_closed)
                self._tidy(store, final=final)
        except Interrupted:
            return
        except SpotguardError as problem:
            self._say_once(f"cache: not kept for now: {problem}")
        except OSError as problem:
            self._say_once(f"cache: a folder cannot be read: {problem}")
        else:
            self._say_once(keeping.left_out and f"cache: {keeping.left_out}")

    def _keeping_of(self, store: ObjectStore) -> Keeping:
        """Return what keeps; first find out what is kept already, if that has failed so far."""
        assert self._keeping is not None
        if not self._knows_earlier:
            found = self._earlier(store)
            found.later = found.listing
            self._keeping = self._keeping_after(found)
        return self._keeping

    def _earlier(self, store: ObjectStore) -> BroughtBack:
        """Find out what attempts before this one have kept; nothing of it is back yet."""
        owner = self._owner
        found = newest(
            store, before=owner.attempt, node=owner.node, key=owner.key, about=owner.about
        )
        self._knows_earlier = True
        return found

    def _tidy(self, store: ObjectStore, *, final: bool) -> None:
        now = self._clock.monotonic()
        if final or self._owner.place or now - self._tidied_at < _TIDY_S:
            return
        self._tidied_at = now
        owner = self._owner
        tidy(store, key=owner.key, about=owner.about, now=self._clock.now())

    def _time_left_s(self) -> float:
        left_s = self._give_up_at - self._clock.monotonic()
        return max(0.1, left_s) if math.isfinite(left_s) else 24 * 3600.0

    def _wait_for_way(self) -> None:
        """Block while a save is in flight or this node is about to be taken: those go first."""
        while not self._over.is_set():
            assert self._saving is not None
            if not is_saving(self._saving) and not self._told():
                return
            self._clock.sleep(_LOOK_S)
        if self._clock.monotonic() >= self._give_up_at:
            raise Interrupted

    def _say_once(self, words: Any) -> None:
        if words and words != self._said:
            self._said = words
            self._say(words)
