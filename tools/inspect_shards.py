"""`mmtrain inspect`, from a checkout: python tools/inspect_shards.py --help."""

import sys

from mmtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["inspect", *sys.argv[1:]]))
