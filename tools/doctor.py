"""`mmtrain doctor`, from a checkout: python tools/doctor.py --help."""

import sys

from mmtrain.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
