"""`mmtrain record`, from a checkout: python tools/record_shape.py --help."""

import sys

from mmtrain.commands.record import main

if __name__ == "__main__":
    sys.exit(main())
