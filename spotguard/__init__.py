"""Train on spot machines as if they never died.

The command line is `spotguard`; a training script needs only `import spotguard.runtime`. This
module stays light on purpose: the runtime imports it inside every job.
"""

from spotguard.errors import SpotguardError
from spotguard.shared.version import __version__

__all__ = ["__version__", "SpotguardError"]
