"""`mmtrain plot`, from a checkout: python tools/plot_schedule.py --help."""

from mmtrain.__main__ import door

if __name__ == "__main__":
    door("plot")
