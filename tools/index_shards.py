"""`mmtrain index`, from a checkout: python tools/index_shards.py --help."""

import sys

from mmtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["index", *sys.argv[1:]]))
