"""`mmtrain chat`, from a checkout: python tools/chat.py --help."""

import sys

from mmtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["chat", *sys.argv[1:]]))
