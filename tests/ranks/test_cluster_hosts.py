"""Interactive ranks on hosts with networks of their own: a cable that is pulled, and put back."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fmlab._ranks import token
from fmlab._ranks.channel import LINK_DOWN
from fmlab._ranks.pulse import AGENT_SILENT
from tests.hosts.namespaces import Hosts, refusal
from tests.ranks.cluster import REPO, within

pytestmark = pytest.mark.multirank

HEAD = """
import sys, time
import torch.distributed as dist
from fmlab import RankError, Ranks
from fmlab.ranks import ClusterTransport
ranks = Ranks(4, transport=ClusterTransport(sys.argv[1], token_file=sys.argv[2]))
print("ranks on", *ranks.hosts, flush=True)
try:
    ranks.run(lambda: (time.sleep(60), dist.barrier()), timeout=None)
except RankError as error:
    print(error, flush=True)
sys.stdin.readline()
print("again", ranks.run(dist.get_rank), flush=True)
"""


def test_a_host_whose_cable_is_pulled_is_named_and_joins_again(tmp_path: Path) -> None:
    if why := refusal():
        pytest.skip(why)
    secret, script = tmp_path / "token", tmp_path / "head.py"
    token.make(secret)
    script.write_text(HEAD)
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    with Hosts(3) as hosts:
        at = f"{hosts[0].address}:29400"
        join = [
            sys.executable,
            "-m",
            "fmlab.cli",
            "ranks",
            "join",
            at,
            "--slots",
            "2",
            "--token-file",
            secret,
        ]
        said = [tmp_path / f"{host.name}.txt" for host in hosts]
        for host, file in list(zip(hosts, said, strict=True))[1:]:
            with open(file, "w") as out:
                host.start([*join, "--wait", "100"], env=env, stdout=out, stderr=out)
        assert within(120, lambda: all("is ready" in file.read_text() for file in said[1:]))
        with open(said[0], "w") as out:
            pipes = {"stdin": subprocess.PIPE, "stdout": out, "stderr": out}
            head = hosts[0].start([sys.executable, script, at, secret], env=env, **pipes)
        assert within(60, lambda: "ranks on host-1 host-1 host-2 host-2" in said[0].read_text())
        time.sleep(1)
        hosts[2].unplug()
        start = time.monotonic()
        words = "ranks 2-3 (host host-2): died: host host-2 is gone:"
        assert within(AGENT_SILENT + 10, lambda: words in said[0].read_text()), said[0].read_text()
        assert time.monotonic() - start > 2  # noticed by silence, since no word came of its end
        assert within(LINK_DOWN + 10, lambda: "its ranks were ended" in said[2].read_text())
        hosts[2].plug()
        assert head.stdin is not None
        head.stdin.write("\n")
        head.stdin.close()
        assert within(60, lambda: "again [0, 1, 2, 3]" in said[0].read_text()), said[0].read_text()
        assert head.wait(20) == 0
