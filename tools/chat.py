"""`mmtrain chat`, from a checkout: python tools/chat.py --help."""

import sys

from mmtrain.commands.chat import main

if __name__ == "__main__":
    sys.exit(main())
