"""Imported by the process that CPU ranks are forked from, and by nothing else: importing it is what
it does.
"""

import gc
import importlib
import os
import sys

from mmtrain.runtime.child import die_with_parent
from mmtrain.runtime.stop import ignore_in_worker

# Ranks hold the pipe whose end this process waits for, so without this both would outlive a killed
# launcher.
die_with_parent()
# Slurm signals every process. Ranks, whose parent this is, would not outlive it; they answer for
# themselves.
ignore_in_worker()
# what imports print belongs in the log, and file descriptor 1 stays the console for rank 0
sys.stdout = sys.stderr

for _name in os.environ.get("MMTRAIN_PRELOAD", "").split():  # set by supervise.prepared
    importlib.import_module(_name)

gc.freeze()  # a collection in a rank would touch, and so copy, the memory of everything imported
