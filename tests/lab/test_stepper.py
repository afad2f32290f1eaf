"""The stepper draws every network and algorithm, and says the numbers of the schedule."""

import pytest

pytest.importorskip("matplotlib")

from fmlab.collectives import prove
from fmlab.lab.stepper import ALGORITHMS, choice_table, draw_links, scenes, stepper_panel


def test_each_scene_runs_each_algorithm() -> None:
    for scene in scenes().values():
        assert set(scene.topology.nodes) == set(scene.places)
        for algorithm in ALGORITHMS:
            prove(scene.plan(algorithm))


def test_the_panel_says_which_link_is_busiest_and_what_is_fastest() -> None:
    panel = stepper_panel()
    assert "step 1 of 30 uses 20 of 64 links" in panel.summary
    assert "fastest for this payload: torus" in panel.summary
    panel.set(payload="64 KB")
    assert "fastest for this payload: one_shot" in panel.summary
    panel.set(algorithm="torus")
    assert "step 1 of 12 uses 64 of 64 links" in panel.summary
    panel.set(network="2 hosts x 4 chips", algorithm="ring", payload="256 MB", step=14)
    assert "step 14 of 14" in panel.summary
    assert "network" in panel.summary  # one link between the hosts decides
    assert "fastest for this payload: hierarchical" in panel.summary
    panel.set(network="8 H100, NVSwitch", algorithm="halving_doubling")
    assert "step 6 of 6" in panel.summary  # there are no more
    with pytest.raises(ValueError, match=r"step = 14; legal are: \(1, 2, 3, 4, 5, 6\)"):
        panel.set(step=14)


def test_the_slider_of_steps_has_as_many_as_the_algorithm_takes() -> None:
    _, network, algorithm, _, step, _, line = stepper_panel().widget().children

    def reaches(last: int) -> bool:
        return [value for _, value in step.options] == list(range(1, last + 1))

    assert reaches(30)  # 16 chips, ring: 2 x 15
    step.value = 30
    assert "step 30 of 30" in line.value
    algorithm.value = "halving_doubling"  # 2 log2 16
    assert reaches(8)
    assert step.value == 8, "what is gone gives way"
    assert "step 8 of 8" in line.value
    network.value = "8 H100, NVSwitch"
    assert reaches(6)
    assert "step 6 of 6" in line.value
    step.value = 3
    algorithm.value = "ring"
    assert reaches(14)
    assert step.value == 3, "what is still there stays"
    assert "step 3 of 14" in line.value


def test_a_link_that_is_half_as_busy_is_drawn_thinner() -> None:
    from fmlab.lab.figures import figure

    _, ax = figure(x="", y="")
    scene = scenes()["ring of 8, 50 GB/s"]
    draw_links(ax, scene, {(0, 1): 100.0, (1, 2): 50.0})
    widths = [patch.get_linewidth() for patch in ax.patches]
    assert widths[0] > widths[1]
    assert choice_table(scene, {"1 GB": 1e9})["fastest"] == ["bidirectional_ring"]
