"""`mmtrain shard`, from a checkout: python tools/shard_dataset.py --help."""

import sys

from mmtrain.commands.shard import main

if __name__ == "__main__":
    sys.exit(main())
