"""The learning rate as a function of the optimizer step, and of nothing else.

Ranks and micro-batches do not appear: a schedule that counts them ends too early.
"""

import math


def warmup_cosine(step: int, total_steps: int, warmup_steps: int, peak: float, minimum: float = 0.0) -> float:
    """Learning rate of step `step` (from 0): linear rise to `peak`, then half a cosine down to `minimum`.

    Step warmup_steps - 1 has exactly `peak`, step total_steps - 1 and all later ones exactly `minimum`.
    Raises ValueError when the warm-up leaves no step for the descent.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup must be at least 0 and less than the {total_steps} steps, got {warmup_steps} steps"
        )
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step >= total_steps - 1:
        return minimum
    progress = (step - warmup_steps + 1) / (total_steps - warmup_steps)
    return minimum + (peak - minimum) * 0.5 * (1 + math.cos(math.pi * progress))
