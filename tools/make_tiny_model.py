"""`mmtrain tiny`, from a checkout: python tools/make_tiny_model.py --help."""

import sys

from mmtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["tiny", *sys.argv[1:]]))
