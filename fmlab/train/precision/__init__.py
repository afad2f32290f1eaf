"""Number formats and training in few bits.

formats.py     formats as data: fp32 to fp4, int8, int4; codes and their numbers
rounding.py    to any format: nearest, toward zero, by chance; TF32 products
bits.py        a number as its bits
sums.py        long sums in few bits; Kahan's summation
mx.py          Microscaling formats: 32 numbers share a power of two
scaling.py     before 8 bits: current, delayed, in blocks
products.py    linear layers whose products see rounded factors (emulated)
loss_scale.py  dynamic loss scaling for fp16
optim.py       AdamW for 16-bit weights: nearest, stochastic, Kahan, master weights
numbers.py     the ways to train, by name (TrainConfig.numbers)
engine.py      the step that runs them on one device
quantised.py   int8 and int4 weights for inference
"""

from fmlab.train.precision.bits import Bits, bits_of
from fmlab.train.precision.engine import FewBits
from fmlab.train.precision.formats import FORMATS, Format, decode, encode, number_format
from fmlab.train.precision.layers import layer_matrices
from fmlab.train.precision.loss_scale import LossScaler
from fmlab.train.precision.mx import MX_FORMATS, MXFormat, mx_format, mx_round, mx_scales
from fmlab.train.precision.numbers import NUMBERS, Numbers, numbers_called
from fmlab.train.precision.optim import UPDATES, RoundedAdamW, rounded_adamw
from fmlab.train.precision.products import Products, RoundedLinear, restore_products, round_products
from fmlab.train.precision.quantised import (
    Quantised,
    QuantisedLinear,
    model_bytes,
    quantise,
    quantise_weights,
)
from fmlab.train.precision.rounding import MODES, round_to, tf32_matmul
from fmlab.train.precision.scaling import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    NoScaling,
    Scaling,
    scale_for,
)
from fmlab.train.precision.sums import WAYS, kahan_add, running_sum

__all__ = [
    "FORMATS",
    "MODES",
    "MX_FORMATS",
    "NUMBERS",
    "UPDATES",
    "WAYS",
    "Bits",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "FewBits",
    "Format",
    "LossScaler",
    "MXFormat",
    "MXScaling",
    "NoScaling",
    "Numbers",
    "Products",
    "Quantised",
    "QuantisedLinear",
    "RoundedAdamW",
    "RoundedLinear",
    "Scaling",
    "bits_of",
    "decode",
    "encode",
    "kahan_add",
    "layer_matrices",
    "model_bytes",
    "mx_format",
    "mx_round",
    "mx_scales",
    "number_format",
    "numbers_called",
    "quantise",
    "quantise_weights",
    "restore_products",
    "round_products",
    "round_to",
    "rounded_adamw",
    "running_sum",
    "scale_for",
    "tf32_matmul",
]
