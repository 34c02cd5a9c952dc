"""`mmtrain record`, from a checkout: python tools/record_shape.py --help."""

import sys

from mmtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["record", *sys.argv[1:]]))
