"""What a model is made of, as sizes alone: tables, layers, convolutions, heads.

A part is one block of the model's list, or `count` equal ones in a row. It knows how many parameters it has
in all and on one of several tensor-parallel ranks, and how many elements of matrices each position (and each
row) is multiplied by, which is half of its forward FLOPs. No tensor is made: everything is whole numbers.

`stream` names the positions that a part works on: the tokens of a text, the patches of an image, the pixels
of a level of a UNet. How many there are in a row, fmlab.planner.shapes.ModelShape says.

`on(tensor)` follows the models' own parallel plans: matrices, and their outputs' biases, are divided; norms
and biases that are added once are copied; a vocabulary is padded to an even division; key/value heads fewer
than the ranks are copied; experts are whole on every tensor rank, unless `split_experts`.
"""

from dataclasses import dataclass, fields
from typing import Literal

from fmlab.parallel.grid import divisors
from fmlab.parallel.values import whole

#: Parameters of a norm for each unit of its width: "layer" has a weight and a bias (Ba et al. 2016,
#: arXiv:1607.06450), "rms" a weight (Zhang and Sennrich 2019, arXiv:1910.07467).
NORMS = {"layer": 2, "layer without bias": 1, "rms": 1, "none": 0}
#: The largest size that is taken for a model's and not for a slip: no matrix has more rows.
MOST = 2**31


def check(part: object, least: dict[str, int]) -> None:
    """Raise ValueError unless the fields are whole numbers, at least so large, and of a size that can be."""
    for name, low in least.items():
        value = whole(getattr(part, name), f"{type(part).__name__}({name}={getattr(part, name)!r})", low)
        if value > MOST:
            raise ValueError(f"{type(part).__name__}({name}={value}): more than {MOST} cannot be meant")


def share(number: int, ranks: int, what: str) -> int:
    """A rank's part of what must divide evenly. Raises ValueError with the degrees that are legal."""
    if number % ranks:
        raise ValueError(f"tensor={ranks} cannot divide {number} {what}; legal are {divisors(number)}")
    return number // ranks


def _sizes(part: object) -> dict[str, int]:
    """Every field that is a whole number, each at least 0."""
    return {field.name: 0 for field in fields(part) if field.type is int}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Embedding:
    """Tables that are looked up by token, position and type, and the matrix that a patch is multiplied by.

    shared: the token table is that of an earlier embedding (T5's decoder), whose parameters count there.
    patch: numbers of a patch (channels x height x width). class_token: one position is a vector of its own.
    """

    stream: str
    width: int
    tokens: int = 0
    positions: int = 0
    types: int = 0
    patch: int = 0
    norm: str = "none"
    shared: bool = False
    class_token: bool = False
    row_matrices: int = 0
    starts: bool = False
    count: int = 1

    def __post_init__(self) -> None:
        check(self, _sizes(self) | dict(width=1))

    @property
    def parameters(self) -> int:
        return self.on(1)

    @property
    def tables(self) -> int:
        """Elements of the tables; a shared one counts where it belongs."""
        return self.width * ((0 if self.shared else self.tokens) + self.positions + self.types)

    @property
    def matrices(self) -> int:
        return self.patch * self.width

    def on(self, tensor: int = 1) -> int:
        """Parameters of a tensor rank."""
        tokens = 0 if self.shared else -(-self.tokens // tensor) * self.width
        vectors = self.positions + self.types + NORMS[self.norm] + self.class_token
        return tokens + self.width * vectors + self.matrices + self.row_matrices


@dataclass(frozen=True)
class LayerGroup:
    """`count` equal transformer layers.

    kind: "decoder" (a position sees those before it) or "encoder" (it sees all).
    width: of the stream. heads x head_width need not be it (T5). kv_heads: key/value heads (grouped-query
        attention). window: how many positions a token sees at most; 0 for all.
    ffn: inner width of the feed-forward network, or of one expert. gated: it multiplies two branches.
    cross_stream, cross_width: what the layer also looks at (T5's decoder, a UNet's text).
    experts, experts_per_token: of a mixture; shared_ffn: inner width of the experts that see every token.
    norms: how many there are, if not one in front of each half (and of the look at the other stream).
    qk_norm: queries and keys are normed head by head. rotary: they are turned by their positions.
    score_bias: scores get a bias by position (T5), which a fused kernel does not take.
    activation_kept: what goes into the activation function is kept too (not ReLU's, nor a recomputed gate's).
    buckets: rows of a table of relative positions with a column for each head (T5's first layers).
    other_matrices, row_matrices: elements of further matrices, for each position and for each row.
    others: further parameters. starts: whether a pipeline may begin a stage here.
    """

    count: int
    kind: Literal["decoder", "encoder"]
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    gated: bool = False
    stream: str = "tokens"
    cross_width: int = 0
    cross_stream: str = ""
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0
    window: int = 0
    norm: str = "layer"
    norms: int = -1
    qkv_bias: bool = True
    output_bias: bool = True
    ffn_bias: bool = True
    qk_norm: bool = False
    rotary: bool = False
    score_bias: bool = False
    activation_kept: bool = True
    buckets: int = 0
    other_matrices: int = 0
    row_matrices: int = 0
    others: int = 0
    starts: bool = True

    def __post_init__(self) -> None:
        if self.norms == -1:
            object.__setattr__(self, "norms", 3 if self.cross_width else 2)
        ones = ("count", "width", "heads", "kv_heads", "head_width", "ffn")
        check(self, _sizes(self) | dict.fromkeys(ones, 1))
        if self.kind not in ("decoder", "encoder"):
            raise ValueError(f"LayerGroup(kind={self.kind!r}): legal are decoder, encoder")
        if self.norm not in NORMS:
            raise ValueError(f"LayerGroup(norm={self.norm!r}): legal are {', '.join(NORMS)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                f"legal are {divisors(self.heads)}"
            )
        if bool(self.experts) != bool(self.experts_per_token) or self.experts_per_token > self.experts:
            raise ValueError(
                f"experts={self.experts} with experts_per_token={self.experts_per_token}: a token goes to "
                "1 to all of the experts; give 0 and 0 for a layer without"
            )

    @property
    def causal(self) -> bool:
        return self.kind == "decoder"

    @property
    def query_width(self) -> int:
        """Of all query heads together."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_width

    @property
    def branches(self) -> int:
        """Matrices of a feed-forward network."""
        return 3 if self.gated else 2

    # ---- matrices ------------------------------------------------------------------------------------------

    @property
    def attention_matrices(self) -> int:
        """Elements of the matrices of queries, keys, values and output; of the look elsewhere, those that
        this stream's positions meet."""
        own = self.width * (self.query_width + 2 * self.kv_width) + self.query_width * self.width
        return own + (2 * self.width * self.query_width if self.cross_width else 0)

    @property
    def memory_matrices(self) -> int:
        """Elements of the matrices that make keys and values of the other stream's positions."""
        return self.cross_width * 2 * self.kv_width

    @property
    def expert_matrices(self) -> int:
        """Elements of one expert; of a layer without experts, of its feed-forward network."""
        return self.branches * self.width * self.ffn

    @property
    def active_ffn(self) -> int:
        """Inner units that a position passes through, of all its experts together."""
        return max(self.experts_per_token, 1) * self.ffn + self.shared_ffn

    @property
    def router(self) -> int:
        """Elements of the router's matrix."""
        return self.width * self.experts

    @property
    def matrices(self) -> int:
        """Elements of the matrices that a position of a layer is multiplied by: active ones only."""
        ffn = self.branches * self.width * self.active_ffn
        return self.attention_matrices + ffn + self.router + self.other_matrices

    # ---- parameters ----------------------------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        return self.count * self.on(1)

    def on(self, tensor: int = 1, expert: int = 1, split_experts: bool = False) -> int:
        """Parameters of one layer on a rank of `tensor` that divide matrices, `expert` that divide experts.

        split_experts: the tensor ranks divide each expert too (Megatron's default; not in fmlab.parallel).
        Raises ValueError for what cannot be divided.
        """
        return self.dense_on(tensor) + self.experts_on(tensor if split_experts else 1, expert)

    def dense_on(self, tensor: int = 1) -> int:
        """Parameters of one layer on a tensor rank, its routed experts left out."""
        query = share(self.heads, tensor, "heads") * self.head_width
        kv = self.kv_heads_on(tensor) * self.head_width
        found = self.width * (query + 2 * kv) + query * self.width
        found += self.qkv_bias * (query + 2 * kv) + self.output_bias * self.width
        if self.cross_width:
            found += 2 * self.width * query + self.cross_width * 2 * kv
            found += self.qkv_bias * (query + 2 * kv) + self.output_bias * self.width
        always = self.shared_ffn if self.experts else self.ffn
        if always:
            found += self._ffn_on(always, tensor)
        found += self.router + NORMS[self.norm] * self.norms * self.width + self.qk_norm * 2 * self.head_width
        found += self.buckets * self.heads // tensor
        return found + self.other_matrices + self.row_matrices + self.others

    def experts_on(self, tensor: int = 1, expert: int = 1) -> int:
        """Parameters of one layer's routed experts on a rank."""
        if not self.experts:
            return 0
        if self.experts % expert:
            raise ValueError(
                f"expert={expert} does not divide {self.experts} experts; legal are {divisors(self.experts)}"
            )
        return self.experts // expert * self._ffn_on(self.ffn, tensor)

    def kv_heads_on(self, tensor: int) -> int:
        """Key/value heads of a tensor rank: a copy of one where there are fewer than ranks."""
        if tensor > self.kv_heads and tensor % self.kv_heads == 0:
            return 1
        return share(self.kv_heads, tensor, "key/value heads")

    def _ffn_on(self, ffn: int, tensor: int) -> int:
        inner = share(ffn, tensor, "hidden units")
        biases = self.ffn_bias * ((self.branches - 1) * inner + self.width)
        return self.branches * self.width * inner + biases


@dataclass(frozen=True)
class Residual:
    """A residual block of convolutions (DDPM's UNet): two of 3x3, the time's matrix, a 1x1 past them.

    leaves: whether what its layer makes is a skip, for the way up. takes: channels of its input that are one.
    """

    stream: str
    inputs: int
    outputs: int
    time_width: int
    starts: bool = True
    count: int = 1
    leaves: bool = False
    takes: int = 0

    def __post_init__(self) -> None:
        check(self, _sizes(self) | dict(inputs=1, outputs=1))

    @property
    def width(self) -> int:
        return self.outputs

    @property
    def shortcut(self) -> int:
        return 0 if self.inputs == self.outputs else self.inputs * self.outputs

    @property
    def matrices(self) -> int:
        return 9 * self.outputs * (self.inputs + self.outputs) + self.shortcut

    @property
    def row_matrices(self) -> int:
        return self.time_width * self.outputs

    @property
    def parameters(self) -> int:
        return self.on(1)

    def on(self, tensor: int = 1) -> int:
        """Parameters of a tensor rank: the middle of the block is divided."""
        middle, time = share(self.outputs, tensor, "channels"), self.time_width + (self.time_width > 0)
        past = self.shortcut + self.outputs if self.shortcut else 0
        both = 9 * middle * (self.inputs + self.outputs) + middle + self.outputs  # convolutions of 3x3
        return both + 2 * (self.inputs + middle) + time * middle + past  # norms, the time, a 1x1


@dataclass(frozen=True)
class Convolution:
    """One convolution: a UNet's first and last, and those that halve or double the picture.

    stride: pixels of its input, along a side, for each of its output. leaves: whether it makes a skip.
    others: further parameters (the time embedding, a norm); row_matrices: elements of matrices for each row.
    """

    stream: str
    inputs: int
    outputs: int
    kernel: int = 3
    stride: int = 1
    others: int = 0
    row_matrices: int = 0
    starts: bool = False
    count: int = 1
    leaves: bool = False

    def __post_init__(self) -> None:
        check(self, _sizes(self) | dict(inputs=1, outputs=1, kernel=1, stride=1))

    @property
    def width(self) -> int:
        return self.outputs

    @property
    def matrices(self) -> int:
        return self.kernel**2 * self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        return self.on(1)

    def on(self, tensor: int = 1) -> int:
        """Parameters of a tensor rank: all."""
        return self.matrices + self.outputs + self.row_matrices + self.others


@dataclass(frozen=True)
class Head:
    """What stands behind the last layer of a stream.

    outputs: rows of the output matrix (the vocabulary); tied: it is the token table, and counts there.
    dense: elements of matrices before it. reads: the share of the positions that are read (masked language
        models: those with a label); per_row: one position of a row instead. others: biases and the like.
    """

    stream: str
    width: int
    outputs: int = 0
    tied: bool = False
    dense: int = 0
    norm: str = "none"
    reads: float = 1.0
    per_row: bool = False
    others: int = 0
    row_matrices: int = 0
    output_bias: bool = False
    starts: bool = False
    count: int = 1

    def __post_init__(self) -> None:
        check(self, _sizes(self) | dict(width=1))
        if not 0 < self.reads <= 1:
            raise ValueError(
                f"Head(reads={self.reads!r}): give a share of the positions, above 0 and up to 1"
            )

    @property
    def matrices(self) -> int:
        """Elements of matrices for each position that is read."""
        return self.dense + self.outputs * self.width

    @property
    def parameters(self) -> int:
        return self.on(1)

    def on(self, tensor: int = 1, own_table: bool = False) -> int:
        """Parameters of a tensor rank. own_table: a tied matrix counts too, for it is not on this stage."""
        rows = self.outputs if self.per_row else -(-self.outputs // tensor)
        matrix = 0 if self.tied and not own_table else rows * self.width
        bias = rows if self.output_bias else 0
        return matrix + bias + self.dense + NORMS[self.norm] * self.width + self.others + self.row_matrices


Part = Embedding | LayerGroup | Residual | Convolution | Head
