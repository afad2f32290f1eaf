"""ZeRO 1 to 3 and offload by DeepSpeed under the engine contract."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.parallel import checkpoint, fsdp, state
from fmlab.parallel.checkpoint import Piece
from fmlab.parallel.checkpoint.pieces import whole_box
from fmlab.parallel.ddp.replicated import Replicated
from fmlab.parallel.engine import StepResult
from fmlab.parallel.engines import deepspeed_setup, refusals, torch_recompute
from fmlab.parallel.engines.torch_ddp import _leaves, _Loss
from fmlab.parallel.layout import Batch, Layout


class DeepSpeedEngine(Replicated):
    """Data parallelism with ZeRO by deepspeed.initialize: same model, optimizer, data and loss as elsewhere.

    DeepSpeed divides the sum of the ranks' gradients by their number and by the micro-batches; the loss is
    multiplied by the former beforehand, and the latter is switched off, so that the result is the plain sum.
    Weights, gradients and optimizer state are kept in fp32 whatever the model's type. The model cannot be
    given to another engine afterwards.

    DeepSpeed frees gradients in its update. `full_grads` shows those of the last step, so each step gathers
    them first, a message and a copy the size of the model; keep_gradients=False spares that.

    keep_gathered: in ZeRO-3, parameters of fewer elements stay whole on every rank (DeepSpeed's own default).
    """

    name = "deepspeed"

    def __init__(
        self, *args: Any, keep_gradients: bool = True, keep_gathered: int = 100_000, **kwargs: Any
    ) -> None:
        """Raises ValueError for what DeepSpeed cannot run, see fmlab.parallel.engines.refusals."""
        model, layout = args[0], args[1]
        refusals.check("deepspeed", layout, model)
        if fsdp.is_on_meta(model):
            raise ValueError(
                "engine 'deepspeed' starts from weights that are there, and this model is on the meta device"
            )
        super().__init__(*args, **kwargs)
        self.keep_gradients = keep_gradients
        self.search_unused = True
        self._used: set[str] = set()
        self._gradients: dict[str, Tensor] = {}
        self._ranks = self._scale = layout.data
        torch_recompute.apply(model, layout.recompute)
        deepspeed = deepspeed_setup.load()
        with deepspeed_setup.quiet(), deepspeed_setup.linear_meanwhile():
            self.ds, *_ = deepspeed.initialize(
                model=_Loss(self),  # type: ignore[arg-type]
                optimizer=self.optimizer,
                config=settings(layout, self.max_grad_norm, keep_gathered),
                dist_init_required=False,
            )
            self._linear = torch.nn.functional.linear  # its own, under ZeRO 3

    # region step
    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        self._check_step(micro_batches)
        counts = self._global_counts(micro_batches)
        with deepspeed_setup.quiet(), deepspeed_setup.linear_meanwhile(self._linear):
            sums = self._accumulate(micro_batches, counts)
            self.steps += 1
            zero = self.ds.optimizer
            # In fp32 its third stage would take NaN for a gradient like any other.
            skipped = self.layout.zero == 3 and bool(zero.has_overflow())
            if self.keep_gradients and not skipped:
                self._gradients = self._gather_gradients()
            if skipped:
                zero.zero_grad()
            else:
                self.ds.step()
                skipped = bool(zero.overflow)
        norm = math.nan if skipped else float(self.ds.get_global_grad_norm())
        self._clip_gradients(norm)
        *losses, total = sums.tolist()
        means = {term: loss / max(counts[term], 1) for term, loss in zip(self._terms, losses, strict=True)}
        return StepResult(losses[0], counts[self._terms[0]], norm, skipped, means, total)

    def _accumulate(self, micro_batches: Sequence[Batch], counts: Mapping[str, int]) -> Tensor:
        sums = self._zero_sums()
        self._used = set()
        batches = self._in_step(self._with_targets(micro_batches))
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            self.ds.set_gradient_accumulation_boundary(last)
            share, of_batch = self.ds(batch, counts)
            # undoes the division by the ranks; scale_wrt_gas=False that by the micro-batches
            self.ds.backward(share * self._scale, scale_wrt_gas=False)
            if not last:
                self.ds.step()  # counts the micro-batch
            sums += of_batch
        return self._sum_over_ranks(sums)

    # endregion

    def _in_step(self, batches: list[Batch]) -> list[Batch]:
        """As many micro-batches as the rank with the most: the passes communicate. Empty ones are added."""
        shapes = {name: (tuple(t.shape[1:]), t.dtype) for name, t in batches[0].items()} if batches else {}
        every: list[Any] = [None] * self._ranks
        torch.distributed.all_gather_object(every, (len(batches), shapes), group=self.group)
        known: dict[str, Any] = next((s for _, s in every if s), {})
        empty = {name: torch.empty((0, *shape), dtype=dtype) for name, (shape, dtype) in known.items()}
        if not known:
            raise ValueError("no rank has a target in this step; give at least one rank some")
        return batches + [empty] * (max(number for number, _ in every) - len(batches))

    def _touch_unused(self, share: Tensor) -> Tensor:
        """Add zero to the loss for each parameter that is not in its graph: ranks must reduce the same."""
        reached = _leaves(share)
        for name, parameter in self.ledger.trainable().items():
            if id(parameter) in reached:
                self._used.add(name)
            elif self.layout.zero < 3:
                share = share + parameter.flatten()[:0].sum()
        return share

    # region full
    def _gather_gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        trainable = self.ledger.trainable()
        used = torch.tensor([float(name in self._used) for name in trainable], device=self.backend.device)
        kept = zip(trainable.items(), self._sum_over_ranks(used).tolist(), strict=True)
        return {name: safe_get_full_grad(p).detach().clone() for (name, p), ranks in kept if ranks}

    def _clip_gradients(self, norm: float) -> None:
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            for gradient in self._gradients.values():
                gradient.mul_(self.max_grad_norm / norm)

    def full_params(self) -> dict[str, Tensor]:
        parameters = dict(self.ledger.parameters())
        if self.layout.zero < 3:
            return {name: p.detach() for name, p in parameters.items()}
        from deepspeed.runtime.zero import GatheredParameters

        with deepspeed_setup.quiet(), GatheredParameters(list(parameters.values())), torch.no_grad():
            return {name: p.detach().clone() for name, p in parameters.items()}

    def full_grads(self) -> dict[str, Tensor]:
        """Raises ValueError when the engine was told not to keep them."""
        if not self.keep_gradients:
            raise ValueError("this DeepSpeedEngine has keep_gradients=False: its gradients are gone")
        return dict(self._gradients)

    def full_optimizer_state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        found: dict[str, Tensor] = {}
        keys, steps = self._state_fields()
        self._link_states()
        for name, parameter in self.ledger.trainable().items():
            for key in keys:
                with deepspeed_setup.quiet():
                    found[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key).detach().clone()
            found |= {f"{name}/{key}": torch.as_tensor(value).clone() for key, value in steps.items()}
        return found

    # endregion

    def _state_fields(self) -> tuple[list[str], dict[str, Any]]:
        """What the optimizer keeps: names of tensors like a parameter, and the numbers beside them.

        DeepSpeed joins parameters in long rows, each with one state.
        """
        keys: list[str] = []
        numbers: dict[str, Any] = {}
        for row in self.optimizer.state.values():
            for key, value in row.items():
                if isinstance(value, Tensor) and value.dim():
                    keys += [key] * (key not in keys)
                elif value is not None:
                    numbers[key] = value
        return keys, numbers

    def _link_states(self) -> None:
        """Tell stages 1 and 2 where in these rows each parameter's state lies.

        DeepSpeed does so once, after the update of the first group, when parameters of other groups (those
        without weight decay) have no state yet.
        """
        zero = self.ds.optimizer
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    @torch.no_grad()
    def load(self, directory: str | Path) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        source = checkpoint.open_checkpoint(directory, self.ranks)
        parameters, shapes = dict(self.ledger.parameters()), self.ledger.entries
        buffers = state.buffers(self.model)
        expected = {name: torch.Size(entry.shape) for name, entry in shapes.items()}
        state.check(
            "weights",
            {name: shape for name, (shape, _) in source.weights.items()},
            expected | {name: buffer.shape for name, buffer in buffers.items()},
        )
        kinds = {**source.weights, **source.optimizer}
        whole = {key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in kinds.items()}
        source.fill({key: Piece(t, tuple(t.shape), whole_box(tuple(t.shape))) for key, t in whole.items()})
        for name, buffer in buffers.items():
            buffer.copy_(whole[name])
        self._fill(parameters, whole)
        keys = {key.rpartition("/")[2] for key in source.optimizer if whole[key].dim()}
        rows = [flat for group in self.optimizer.param_groups for flat in group["params"]]
        if self.layout.zero == 3:  # which takes them out of the groups between updates
            rows = self.ds.optimizer.fp32_partitioned_groups_flat
        for flat in rows:
            self.optimizer.state[flat] |= {key: torch.zeros_like(flat) for key in keys}
        self._link_states()
        for key in source.optimizer:
            name, _, field = key.rpartition("/")
            if whole[key].dim():
                safe_set_full_optimizer_state(parameters[name], whole[key], field)
            else:
                for row in self.optimizer.state.values():
                    row[field] = whole[key].clone()
        for name, parameter in self.ledger.trainable().items():
            safe_set_full_fp32_param(parameter, whole[name])

    def _fill(self, parameters: Mapping[str, nn.Parameter], whole: Mapping[str, Tensor]) -> None:
        if self.layout.zero < 3:
            for name, parameter in parameters.items():
                parameter.copy_(whole[name])
            return
        from deepspeed.runtime.zero import GatheredParameters

        with deepspeed_setup.quiet(), GatheredParameters(list(parameters.values()), modifier_rank=0):
            for name, parameter in parameters.items():
                parameter.copy_(whole[name])

    def close(self) -> None:
        super().close()
        self.ds.destroy()


def settings(layout: Layout, max_grad_norm: float | None, keep_gathered: int = 100_000) -> dict[str, Any]:
    """DeepSpeed's configuration for a layout."""
    zero: dict[str, Any] = {"stage": layout.zero, "stage3_param_persistence_threshold": keep_gathered}
    bucket = max(1, int(layout.bucket_mb * 2**20 / 4))  # DeepSpeed counts elements
    zero["reduce_bucket_size"] = zero["allgather_bucket_size"] = bucket
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if layout.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        # The engine cuts the batch: DeepSpeed only multiplies these.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if max_grad_norm is None else max_grad_norm,
        "zero_optimization": zero,
        # torch.optim's optimizers, whose C++ twins DeepSpeed would compile.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
