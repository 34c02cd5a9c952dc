"""The memory of a process that it shares with no other; imports nothing but Python's own."""

import re
from pathlib import Path

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*$", re.M)
_PRIVATE = re.compile(r"^Private_(Clean|Dirty): +(\d+) kB$", re.M)


def private_bytes() -> int:
    """Return this process's private memory (Linux: /proc/self/smaps).

    Unchanged pages of libraries are left out: they are private only while no other process maps
    them.
    """
    content = Path("/proc/self/smaps").read_text()
    starts = [found.start() for found in _MAPPING.finditer(content)]
    total = 0
    for start, end in zip(starts, [*starts[1:], len(content)], strict=True):
        mapping = content[start:end]
        is_library = ".so" in mapping.partition("\n")[0]
        for kind, kilobytes in _PRIVATE.findall(mapping):
            if kind == "Dirty" or not is_library:
                total += 1024 * int(kilobytes)
    return total
