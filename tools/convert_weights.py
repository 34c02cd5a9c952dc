"""`mmtrain convert`, from a checkout: python tools/convert_weights.py --help."""

import sys

from mmtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
