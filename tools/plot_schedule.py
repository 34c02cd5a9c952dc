"""`mmtrain plot`, from a checkout: python tools/plot_schedule.py --help."""

import sys

from mmtrain.commands.plot import main

if __name__ == "__main__":
    sys.exit(main())
