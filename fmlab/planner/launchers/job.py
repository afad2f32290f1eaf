"""What the ways of starting a run have in common."""

import re
from dataclasses import dataclass

from fmlab.chips import host as find_host
from fmlab.planner.plan import Plan
from fmlab.train import TrainConfig
from fmlab.train.config_file import config_text

CONFIG = "run.toml"  # what `fmlab train --config` reads
PORT = 29500  # torchrun's own choice; any free one of the first host will do


@dataclass(frozen=True)
class Job:
    """A run on hosts that each start as many ranks.

    chips_per_host: that the ranks of a host take; fewer than ranks where a chip is several devices.
    rows: of a micro-batch on a rank. image: of a container, "" where none is needed.
    program: the module that trains.
    """

    config: TrainConfig
    chip: str
    vendor: str
    hosts: int
    ranks_per_host: int
    chips_per_host: int
    whole_hosts: bool
    rows: int
    image: str = ""
    program: str = "fmlab.train"

    @property
    def command(self) -> str:
        """What a person types to run the program."""
        return "fmlab train" if self.program == "fmlab.train" else f"python -m {self.program}"

    @property
    def title(self) -> str:
        """What the run is, for a comment."""
        where = f"each of {self.hosts} hosts" if self.hosts > 1 else "one host"
        return f"{self.config.model}: {self.ranks_per_host} x {self.chip} in {where}"

    @property
    def name(self) -> str:
        """A name that a Kubernetes service may have: letters, digits and hyphens, first a letter."""
        return "train-" + re.sub("[^a-z0-9]+", "-", self.config.model.lower()).strip("-")[:40]

    @property
    def settings(self) -> str:
        """The config file."""
        return f"# {self.title}. Read by: {self.command} --config {CONFIG}\n{config_text(self.config)}"


def job_of(plan: Plan, config: TrainConfig, image: str = "", program: str = "fmlab.train") -> Job:
    """The job of a plan. Raises ValueError for ranks that do not fill whole hosts."""
    chip, ranks = plan.machine.chip, plan.chips
    devices = 1  # of a chip
    most = 1
    if plan.machine.host is not None:
        host = find_host(plan.machine.host)
        devices = host.devices_of_a_chip(chip)
        most = host.chips * devices
    per_host = min(ranks, most)
    if ranks % per_host:
        raise ValueError(
            f"{ranks} ranks do not fill hosts of {most} ({plan.machine.host}): plan a multiple of {most}, or "
            "another host"
        )
    return Job(
        config,
        chip.name,
        chip.vendor,
        ranks // per_host,
        per_host,
        -(-per_host // devices),
        per_host == most,
        plan.setup.rows,
        image,
        program,
    )
