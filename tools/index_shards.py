"""`mmtrain index`, from a checkout: python tools/index_shards.py --help."""

import sys

from mmtrain.commands.index import main

if __name__ == "__main__":
    sys.exit(main())
