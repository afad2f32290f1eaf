"""Chips, hosts and the links between them as data: every figure with its unit, convention and source.

    chip("h100").peak_flops("bf16")          FLOPs a second, dense; a dtype without a figure raises
    chip("trn2").roofline("bf16").ridge      FLOPs a byte where computing becomes the limit
    chip("h100").figures()["memory"]         80 GiB (per chip, printed as GB; source)
    host("p4d.24xlarge").topology()          8 chips on a switch
    cluster("p4d.24xlarge", 128)             1,024 chips, and the way from any to any other
    chips(), hosts()                         all names

Figures are as published unless their convention says how they were converted. Nothing here is guessed: what
no source gives is absent, and what needs it raises ValueError.
"""

from fmlab.chips.catalogue import chip, chips
from fmlab.chips.chip import Chip, dtype_name
from fmlab.chips.figures import Figure
from fmlab.chips.host import Host, Price, cluster, host, hosts
from fmlab.chips.roofline import Roofline
from fmlab.chips.topology import Link, Topology, fat_tree, mesh, ring, switch, torus

__all__ = [
    "Chip",
    "Figure",
    "Host",
    "Link",
    "Price",
    "Roofline",
    "Topology",
    "chip",
    "chips",
    "cluster",
    "dtype_name",
    "fat_tree",
    "host",
    "hosts",
    "mesh",
    "ring",
    "switch",
    "torus",
]
