"""Runs from Python: what the command line does, without its words.

The command line is built on these modules alone, so a program can do what a person can. Nothing is
printed and nobody is asked. A run goes on when the program ends: its controller is a process of its
own. Errors are those of `spotguard.errors`.

The most used names are here. Each module below has the rest of one thing: `run` and `documents`,
`launching`, `sweeps`, `settings`, `doctor` with the drill, `checkpoints`, `market`, `team`,
`simulation`, `controllers`, `pages`, `alerts`; `states` has what a run can be, and `words` how all
of it is told.
"""

from __future__ import annotations

from spotguard.api.launching import plan, start, up
from spotguard.api.run import Run, runs, runs_of
from spotguard.api.sweeps import Sweep, start_sweep, sweep

__all__ = ["plan", "Run", "runs", "runs_of", "start", "start_sweep", "Sweep", "sweep", "up"]
