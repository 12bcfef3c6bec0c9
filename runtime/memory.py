"""The resident memory of this process. This module does not import JAX, whose memory would be measured too."""

import contextlib
import re
import resource
import sys
from pathlib import Path


def resident() -> int:
    """Returns the resident memory of this process in bytes; on systems other than Linux, its peak."""
    with contextlib.suppress(OSError):
        return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()
    return peak_resident()


def peak_resident() -> int:
    """Returns the peak resident memory of this process in bytes.

    On Linux, the peak is read from /proc, because ru_maxrss includes the peak of the process that started this process.
    """
    with contextlib.suppress(OSError):
        if peak := re.search(r'VmHWM:\s+(\d+) kB', Path('/proc/self/status').read_text()):
            return int(peak[1]) * 1024
    # macOS counts in bytes, other systems in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)
