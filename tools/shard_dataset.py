"""`mmtrain shard`, from a checkout: python tools/shard_dataset.py --help."""

from mmtrain.__main__ import run_as_script

if __name__ == "__main__":
    run_as_script("shard")
