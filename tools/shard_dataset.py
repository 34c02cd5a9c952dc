"""`mmtrain shard`, from a checkout: python tools/shard_dataset.py --help."""

import sys

from mmtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["shard", *sys.argv[1:]]))
