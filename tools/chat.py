"""`mmtrain chat`, from a checkout: python tools/chat.py --help."""

from mmtrain.__main__ import door

if __name__ == "__main__":
    door("chat")
