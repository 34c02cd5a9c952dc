"""`mmtrain doctor`, from a checkout: python tools/doctor.py --help."""

import sys

from mmtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
