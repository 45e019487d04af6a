"""The loops of well-known training scripts, in our own words, small and on made-up data.

Each module has its model and data, and its loop twice: `with_ddp`, as people write it for DistributedDataParallel, and
`with_lopsided`. Both return the losses they saw. The first runs in one process, as one device would; the second in
three processes that are planned for as unequal devices. `run.py` compares the losses and counts the lines that differ.

Two things are not as in the originals. Data comes in a fixed order, so that both loops see the same. And noise is drawn
by the loop for the whole batch where a model would draw it inside: on pieces a model draws other numbers.
"""

from pathlib import Path

CLUSTER = Path(__file__).with_name("three.toml")
"""What `with_lopsided` plans for. A script that measures its devices, or is started by a plan, leaves it out."""
