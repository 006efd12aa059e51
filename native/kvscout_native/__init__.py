"""The native half of kvscout; importing it fails with `ImportError` where the extension is not built."""

from kvscout_native._core import *  # noqa: F403
from kvscout_native._core import __version__  # noqa: F401
from kvscout_native.sources import warn_if_stale

warn_if_stale()
