"""A cloud made of this machine's processes: the whole job, without an account or a bill."""

from spotguard.launch.local.launcher import LocalLauncher
from spotguard.launch.local.options import LocalOptions
from spotguard.launch.local.stray_processes import StrayProcess, find_strays, sweep

__all__ = ["find_strays", "LocalLauncher", "LocalOptions", "StrayProcess", "sweep"]
