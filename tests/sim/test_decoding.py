"""Programs that writing text takes on a chip with a static-shape compiler."""

import torch

from fmlab.models import GPT
from fmlab.sim import simulate
from fmlab.train.decode import evaluating, open_stream

PROMPTS = [[5, 6, 7], [9, 3, 8, 2, 11]]
SMALL = dict(vocab_size=61, max_positions=32, num_layers=2, hidden_size=32, num_heads=4)


def test_two_programs_write_any_number_of_tokens() -> None:
    """A graph is new when its operators or shapes are: counted as the simulated compiler counts them."""
    model = GPT.from_preset("gpt2-tiny", **SMALL)
    (chip,) = simulate("trn2", first=7)
    model = model.to("sim:7")

    def compiled(static_shapes: bool) -> list[int]:
        chip.reset()
        with evaluating(model):
            stream = open_stream(model, PROMPTS, 6, static_shapes)
            stream.start().cpu()  # a host read ends a graph
            counted = [chip.totals.compiles]
            for _ in range(6):
                stream.step(torch.tensor([1, 2])).cpu()
                counted.append(chip.totals.compiles)
        return counted

    assert compiled(False) == [1, 2, 3, 4, 5, 6, 7]
    assert compiled(True) == [1, 2, 2, 2, 2, 2, 2]
