"""Python imports this at its start where its folder is in PYTHONPATH: SIGUSR2 then raises INJECTED
in the process.
"""

import os
import signal


def _raise(*_: object) -> None:
    import torch

    raise {"ValueError": ValueError, "OutOfMemoryError": torch.OutOfMemoryError}[
        os.environ["INJECTED"]
    ]("injected")


if os.environ.get("INJECTED"):
    signal.signal(signal.SIGUSR2, _raise)
