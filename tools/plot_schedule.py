"""`mmtrain plot`, from a checkout: python tools/plot_schedule.py --help."""

import sys

from mmtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["plot", *sys.argv[1:]]))
