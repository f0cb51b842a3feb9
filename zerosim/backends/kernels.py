"""The contract between zerosim and an array library: about fifty kernels, and nothing else.

The caller allocates the outputs before it calls a kernel (all bytes come from
`device.alloc`). So a backend never decides a shape, and a shape-only backend has nothing to do. Outputs come
last and may have another dtype than the inputs. A kernel computes in the compute dtype (fp32 for
half types) and rounds ONCE, when it stores the result. Outputs never alias inputs unless the text says
"in place". A kernel returns None, and its control flow never depends on the data.

Shape legend: B batch, T tokens, D model, H heads, V vocabulary, N group size; M rows = B*T.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

from zerosim.backends.forms import PLAIN, SCORES, Buckets, Choice, LogitForm, Rope, Scores
from zerosim.dtypes import DType
from zerosim.placement.formats import DYNAMIC8

T = TypeVar("T")
Array = Any
"""A backend's own array: has shape, size, nbytes, reshape, basic slicing (views), transpose."""

QUANT_BLOCK = DYNAMIC8.block
"""Elements of a tensor that share one scale, where states are quantised."""

Splits = tuple[Sequence[int], Sequence[int]]
"""The splits of an all_to_all: the elements sent to each member of the group, and those received from each."""

GpuBytes = tuple[int, str, int]
"""A GPU: its number, its name, and the bytes in use on it by all processes together."""


class Heads(NamedTuple):
    """The heads of an attention: H query heads share K heads of keys and values, H/K neighbours each.

    Under tensor parallelism a rank has some of the model's heads. The model has `whole` query heads (0: these are all),
    and this rank's begin at `first`. Only dropout and ALiBi depend on that. `form`: the scores before the softmax.
    `value`: the columns of a head of values; 0: as many as of queries and keys.
    """

    queries: int
    keys: int
    first: int = 0
    whole: int = 0
    form: Scores = SCORES
    value: int = 0

    @property
    def sharing(self) -> int:
        """Query heads per key-value head, H/K."""
        return self.queries // self.keys

    @property
    def packed(self) -> int:
        """Heads side by side in q|k|v, H + 2K."""
        return self.queries + 2 * self.keys

    def width(self, columns: int) -> int:
        """Return the columns of a head of queries in q|k|v of so many."""
        if self.value:
            return (columns - self.keys * self.value) // (self.queries + self.keys)
        return columns // self.packed

    def cuts(self, columns: int, *, q_alone: bool = False) -> tuple[int, int]:
        """Return the columns of all queries in q|k|v of so many, or in q alone, and those of all keys."""
        width = columns // self.queries if q_alone else self.width(columns)
        return self.queries * width, self.keys * width

    def number(self, sequence: int, head: int) -> int:
        """Return the number of query head `head` of a sequence, counted over all sequences of the whole batch."""
        return sequence * (self.whole or self.queries) + self.first + head


class Window(NamedTuple):
    """The words of a random stream that an array uses: runs of `run` words, `stride` apart, starting at `first`."""

    first: int
    run: int
    stride: int


class Dropout(NamedTuple):
    """A dropout whose mask is recomputed, not saved: the key of its random numbers, and the probability to drop a
    value."""

    key: tuple[int, int]
    chance: float


class Probs(NamedTuple):
    """Eager attention's probabilities (B, H, T, T) before and after dropout.

    probs     the softmax BEFORE dropout, 0 above the diagonal
    mask      dropout's mask, uint8 of the same shape: probabilities become probs * mask / keep. None: no dropout
    dropped   probs * mask before the division, if it is saved
    """

    probs: Array
    mask: Array | None = None
    keep: float = 1.0
    dropped: Array | None = None


class Beside(NamedTuple):
    """What attention has beside q|k|v; in backward, their gradients.

    kv    (B, S, 2K d): keys and values of another sequence, of S tokens; q|k|v is q alone then
    bias  (H, T, S): added to the scores of every sequence
    sinks  (H): the score of one more key of each head, whose value is 0
    """

    kv: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None


ALONE = Beside()


class Tile(NamedTuple):
    """Queries `rows` and keys `keys` of an attention, by their places, and the positions of the first of each."""

    rows: slice
    keys: slice
    query: int
    key: int


class Met(NamedTuple):
    """Where the queries and the keys of an attention lie in a row of `tokens`: the positions of each, in their order.
    Dropout's mask is that of (B, H, tokens, tokens). At `starts` documents begin, and no query reads another's keys."""

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    tokens: int
    starts: Sequence[int] = ()

    def met(self) -> Iterator[tuple[int, range, int, range]]:
        """Yield each run of queries with each run of keys of its document: the places of both, and their positions."""
        for here, queries in _placed(self.queries):
            for there, keys in _placed(self.keys):  # only documents that both have cost time
                first = bisect_right(self.starts, max(queries.start, keys.start))
                last = bisect_right(self.starts, min(queries.stop, keys.stop) - 1)
                for number in range(first, last + 1):
                    start = self.starts[number - 1] if number else 0
                    stop = self.starts[number] if number < len(self.starts) else self.tokens
                    some, read = (range(max(run.start, start), min(run.stop, stop)) for run in (queries, keys))
                    yield here + some.start - queries.start, some, there + read.start - keys.start, read

    def tiles(self, form: Scores, most: int) -> Iterator[Tile]:
        """Yield at most `most` queries of a run at a time, with those keys of a run that some of them read."""
        for here, queries, there, keys in self.met():
            for start in range(0, len(queries), most):
                some = queries[start : start + most]
                if read := form.read(some, keys, self.tokens):
                    rows, columns = here + start, there + read.start - keys.start
                    of_queries, of_keys = slice(rows, rows + len(some)), slice(columns, columns + len(read))
                    yield Tile(of_queries, of_keys, some.start, read.start)

    @lru_cache(maxsize=4096)  # noqa: B019 - a value; the layers of a model ask the same
    def pairs(self, form: Scores) -> int:
        """Return how many scores of a head are read."""
        window = form.reach(self.tokens)
        return sum(
            _up_to(queries, keys, 0) - (_up_to(queries, keys, window) if window else 0)
            if form.causal
            else len(queries) * len(keys)
            for _, queries, _, keys in self.met()
        )

    def counted(self, form: Scores) -> int:
        """Return how many count as work: those that are read but, of a causal kernel without a window, twice as many
        without the diagonal. Those of all ranks together are then T², as those of one kernel over all (`Scores`)."""
        if not form.causal or form.reach(self.tokens):
            return self.pairs(form)
        own = (range(max(q.start, k.start), min(q.stop, k.stop)) for q in self.queries for k in self.keys)
        return 2 * self.pairs(form) - sum(map(len, own))


def _up_to(queries: range, keys: range, behind: int) -> int:
    """Return the sum over queries of how many keys lie at least `behind` positions before them."""

    def from_on(first: int) -> int:
        return _triangle(queries.stop - behind - first) - _triangle(queries.start - behind - first)

    return from_on(keys.start) - from_on(keys.stop)


def _triangle(rows: int) -> int:
    return rows * (rows + 1) // 2 if rows > 0 else 0


def _placed(runs: tuple[range, ...]) -> Iterator[tuple[int, range]]:
    """Yield runs of positions, each with the place where it begins if they lie end to end."""
    return zip(accumulate(map(len, runs), initial=0), runs, strict=False)


class Coded(NamedTuple):
    """A state in 8 bits: uint8 codes (n) of blocks of QUANT_BLOCK elements, the last block perhaps shorter, and each
    block's largest magnitude (blocks), fp32. See numpy/quantize.py."""

    codes: Array
    absmax: Array

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.absmax.nbytes)


class AdamStep(NamedTuple):
    """The numbers of one step of Adam, steps counted from 1; `decoupled` makes it AdamW."""

    grad_scale: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int

    @property
    def step_size(self) -> float:
        """The learning rate, corrected for a first average that starts at 0."""
        return self.lr / (1.0 - self.beta1**self.step)

    @property
    def correction(self) -> float:
        """The divisor for the root of the second average, which starts at 0 too."""
        return math.sqrt(1.0 - self.beta2**self.step)


class Rule(NamedTuple):
    """One step of an elementwise rule: run(xp, param, grad * grad_scale, now, *states). See optim/elementwise.py."""

    run: Callable[..., None]
    now: object
    grad_scale: float


class Storing(NamedTuple):
    """The rounding of weights that have no fp32 master: see optim/rounding.py.

    kind           nearest, stochastic or kahan
    key, first     the stream of 16-bit numbers for stochastic rounding, and the first element's position in it
    compensation   kahan's, in bf16
    lost           (2), fp64: counters of the updates that left a weight unchanged, and its last state
    """

    kind: str
    key: tuple[int, int]
    first: int
    compensation: Array | None
    lost: Array

    def within(self, here: slice) -> Storing:
        """Return the rounding of some of these weights."""
        kept = self.compensation
        return self._replace(first=self.first + here.start, compensation=None if kept is None else kept[here])


class Native(NamedTuple):
    """A collective that a library performs (MPI, NCCL), from each `inputs[i]` to `outputs[i]`.

    `op` and `root` are the call's; `reduction` is sum, avg or max; `number` is the group's. Arrays are flat and
    contiguous. Only an all_to_all has `splits`.
    """

    op: str
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    reduction: str = ""
    root: int = -1
    number: int = 0
    splits: Splits = ((), ())


StreamEvent = Any
"""An event in a stream: it marks all work queued before it."""


class Stream(Protocol):
    """One rank's queue of kernels and its memory pool, for a backend that queues work (a GPU's stream)."""

    def use(self) -> AbstractContextManager[object]:
        """`with stream.use():` any thread works as that rank."""

    def record_event(self) -> StreamEvent:
        """Record an event after all work queued on this stream so far."""

    def wait_event(self, event: StreamEvent) -> None:
        """Make work that is queued from now on run after `event`, which may be another stream's. Return at once."""

    def memory(self) -> tuple[int, int]:
        """Return the bytes of this rank's memory pool: in use, and reserved."""

    def synchronize(self) -> None:
        """Wait on the host until the stream has finished all its work."""

    def download(self, array: Array) -> Any:
        """Copy an array's bytes to the host, bit for bit, as a flat NumPy array of uint8. Wait for the copy."""

    def upload(self, data: Any, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return a new array of this rank with these bytes. The caller may free the bytes at once."""

    def gpu_bytes(self) -> GpuBytes:
        """Wait for the stream, then return its GPU and the bytes in use there."""


class Backend(Protocol):
    """The kernels. One instance serves every rank; it holds no state of any run."""

    name: str

    def open_stream(self, rank: int) -> Stream | None:
        """Return the queue of one rank, or None if kernels run when they are called."""

    def native_collective(self, streams: Sequence[Stream], calls: Sequence[Native]) -> None:
        """Return each member's share of one collective of a vendor's library (NCCL), for all members of a group at
        once.

        Raises: InputError if the library or verb does not exist, or a member shares its GPU.
        """

    # -- arrays -------------------------------------------------------------------------------
    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return a new array with undefined contents; half types take 2 bytes an element."""

    def from_host(self, values: Any, out: Array) -> None:
        """Copy a NumPy array of out's shape into out, rounding to out's dtype."""

    def to_host(self, array: Array) -> Any:
        """Return the values as a new NumPy array (half types as float32). Wait for the copy."""

    def to_host_later(self, array: Array) -> Callable[[], Any]:
        """Start `to_host` for an array that will not change until then, and return a function.
        Only that function waits, and it returns the values."""

    def fill(self, out: Array, value: float) -> None:
        """out = value."""

    def copy(self, source: Array, out: Array) -> None:
        """out = source, rounded to out's dtype. Shapes are equal; either may be strided."""

    # -- primitive ops (teaching, gradient checks; operands broadcast as in NumPy) ---------------
    def add(self, a: Array, b: Array | float, out: Array) -> None:
        """out = a + b. out may be a (in place)."""

    def subtract(self, a: Array, b: Array | float, out: Array) -> None: ...
    def multiply(self, a: Array, b: Array | float, out: Array) -> None: ...
    def divide(self, a: Array, b: Array | float, out: Array) -> None: ...
    def exp(self, a: Array, out: Array) -> None: ...
    def log(self, a: Array, out: Array) -> None: ...
    def sqrt(self, a: Array, out: Array) -> None: ...
    def tanh(self, a: Array, out: Array) -> None: ...

    def sum_to(self, a: Array, out: Array) -> None:
        """Sum `a` over the dims that `out` lacks (leading) or has as 1: the inverse of broadcasting."""

    def max_to(self, a: Array, out: Array) -> None:
        """As sum_to, with the maximum."""

    def mask_future(self, scores: Array, value: float, out: Array) -> None:
        """out = scores (..., T, T) with `value` where the column (key) is later than the row (query)."""

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """out = a @ b over the last two dims, leading dims broadcast; operands may be transposed views."""

    def matmul_add(self, a: Array, b: Array, out: Array) -> None:
        """out += a @ b, rounded once, for matrices; operands may be transposed views."""

    # -- fused ops ------------------------------------------------------------------------------
    def linear(self, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        """out (M, O) = x (M, I) @ weight (I, O) + bias (O). weight may be a transposed view."""

    def column_sum(self, grad: Array, out: Array) -> None:
        """out (O) = sum of grad (M, O) over rows: a bias's gradient."""

    def layer_norm(
        self, x: Array, weight: Array, bias: Array | None, eps: float, out: Array, mean: Array, rstd: Array
    ) -> None:
        """out (M, D) = (x - mean) * rstd * weight + bias; mean and rstd (M) in the compute dtype.

        The variance is the biased one (divided by D), rstd = 1 / sqrt(variance + eps).
        """

    def layer_norm_stats(self, x: Array, eps: float, mean: Array, rstd: Array) -> None:
        """mean and rstd (M) of x (M, D), the bits that `layer_norm` makes."""

    def layer_norm_backward(
        self,
        grad: Array,
        x: Array,
        weight: Array,
        mean: Array,
        rstd: Array,
        dx: Array | None,
        dweight: Array | None,
        dbias: Array | None,
    ) -> None:
        """dx (M, D), dweight (D), dbias (D). None: not wanted."""

    def gelu(self, x: Array, out: Array) -> None:
        """GELU, tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""

    def gelu_backward(self, grad: Array, x: Array, dx: Array) -> None: ...
    def gelu_erf(self, x: Array, out: Array) -> None:
        """GELU itself: x times the chance that a normal number is below x, 0.5 x (1 + erf(x / sqrt(2)))."""

    def gelu_erf_backward(self, grad: Array, x: Array, dx: Array) -> None: ...
    def relu(self, x: Array, out: Array) -> None:
        """out = max(x, 0)."""

    def relu_backward(self, grad: Array, x: Array, dx: Array) -> None:
        """dx = grad where x is more than 0 (or nan), else 0."""

    def attention(self, qkv: Array, heads: Heads, kept: Probs, out: Array, beside: Beside = ALONE) -> None:
        """Causal self-attention. Fills `kept.probs` and, if it is saved, `kept.dropped`.

        qkv (B, T, (H + 2K) d) with columns q|k|v; query head i reads head i // (H/K) of k and v; out
        (B, T, H d); scale 1/sqrt(d). `beside`: keys and values of another sequence, a bias of the scores, sinks.
        """

    def attention_backward(
        self,
        grad: Array,
        qkv: Array,
        heads: Heads,
        kept: Probs,
        workspace: Array,
        dqkv: Array,
        beside: Beside = ALONE,
        dbeside: Beside = ALONE,
    ) -> None:
        """dqkv, like qkv, from grad (B, T, H d). A key-value head's gradient is summed over its query heads in
        the compute dtype. A backend reads `kept.dropped` in place of probs * mask if it is saved. workspace has the
        shape of probs: room for the scores' gradient. A backend need not use it; its contents are undefined
        afterwards. dbeside: dkv; gradients of a bias and of sinks if they are wanted, summed over the sequences in the
        compute dtype."""

    def flash_attention(
        self, qkv: Array, heads: Heads, dropout: Dropout, out: Array, lse: Array, sinks: Array | None = None
    ) -> None:
        """`attention` that stores no probabilities: lse (B, H, T), in the compute dtype, is the log-sum-exp of each
        query's scores, its head's sink (`Beside`) among them. Where the chance is not 0 the mask is that of
        `dropout_mask(*dropout)` over (B, H, T, T)."""

    def flash_attention_backward(
        self, grad: Array, qkv: Array, heads: Heads, dropout: Dropout, out: Array, lse: Array, delta: Array, dqkv: Array
    ) -> None:
        """dqkv from grad. Recomputes the probabilities from lse, and the mask from its key.

        delta (B, H, T), in the compute dtype, receives the sum of grad * out of each query and head.
        """

    def attention_block(
        self, q: Array, kv: Array, heads: Heads, met: Met, dropout: Dropout, out: Array, lse: Array
    ) -> None:
        """Merge the attention of q (B, T, H d) to some keys and values, kv (B, U, 2K d), into out (B, T, H d) and lse
        (B, H, T), both in the compute dtype; in place. Before the first ones out is 0 and lse -inf.

        With L = log(e^lse + e^new) of each query, out = e^(lse - L) out + e^(new - L) times the new result. A query
        reads the keys that `heads.form` lets it, by the positions in `met`; where it reads none, nothing changes. q may
        be strided.
        """

    def add_sinks(self, out: Array, lse: Array, sinks: Array) -> None:
        """Add sinks (H) to a merged attention: lse (B, H, T) becomes both = log(e^lse + e^sink), and out (B, T, H d) is
        multiplied by e^(lse - both). In place."""

    def sinks_backward(self, lse: Array, delta: Array, sinks: Array, dsinks: Array) -> None:
        """dsinks (H) = -sum of e^(sink - lse) * delta over sequences and queries, with lse and delta (B, H, T)."""

    def attention_delta(self, grad: Array, out: Array, heads: Heads, delta: Array) -> None:
        """delta (B, H, T), in the compute dtype: the sum of grad * out, both (B, T, H d), of each query and head."""

    def attention_block_backward(
        self,
        grad: Array,
        q: Array,
        kv: Array,
        heads: Heads,
        met: Met,
        dropout: Dropout,
        lse: Array,
        delta: Array,
        dq: Array,
        dkv: Array,
    ) -> None:
        """Add the part of these keys and values in the gradients to dq, like q, and to dkv, like kv, both in the
        compute dtype. lse is that of all keys, delta that of `attention_delta`. q may be strided."""

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, rstd: Array, offset: float = 0.0) -> None:
        """out (M, D) = x * rstd * (weight + offset); rstd (M), compute dtype, = 1 / sqrt(average of squares + eps)."""

    def rms_norm_stats(self, x: Array, eps: float, rstd: Array) -> None:
        """rstd (M) of x (M, D), the bits that `rms_norm` makes."""

    def rms_norm_backward(
        self,
        grad: Array,
        x: Array,
        weight: Array,
        rstd: Array,
        dx: Array | None,
        dweight: Array | None,
        offset: float = 0.0,
    ) -> None:
        """dx (M, D), dweight (D). None: not wanted."""

    def head_norm(self, x: Array, weight: Array, eps: float, out: Array, rstd: Array, offset: float = 0.0) -> None:
        """`rms_norm` of each E columns: x and out (M, H E), whose rows may be strided, weight (E), rstd (M, H)."""

    def head_norm_backward(
        self, grad: Array, x: Array, weight: Array, rstd: Array, dx: Array, dweight: Array | None, offset: float = 0.0
    ) -> None:
        """dx (M, H E), dweight (E). None: not wanted."""

    def rotary(self, x: Array, head_dim: int, heads: int, rope: Rope, inverse: bool, out: Array) -> None:
        """out (B, T, C) = x with its first `heads` heads of head_dim columns rotated by position, and the rest
        unchanged; unchanged too are a head's columns behind the R that `rope` turns.

        Columns i and i + R/2 of a head (or 2i and 2i + 1), a pair (a, b), become (a cos - b sin, b cos + a sin) of the
        angle t * base^(-2i/R), or t * frequencies[i], at position t, from rope.first on, cosine and sine times
        rope.factor, all in the compute dtype; inverse: of minus that angle.
        """

    def latent_heads(self, q: Array, kv: Array, turned: Array, heads: int, rope: Rope, out: Array) -> None:
        """Latent attention's q|k|v, out (B, T, H (2 (N + R) + V)), from q (B, T, H (N + R)), kv (B, T, H (N + V)) and
        turned (B, T, R). A head of kv has N columns of the key and V of the value. The last R columns of each head of
        q, and `turned`, which is the rest of every key, are rotated as by `rotary`."""

    def latent_heads_backward(self, grad: Array, heads: int, rope: Rope, dq: Array, dkv: Array, dturned: Array) -> None:
        """dq, dkv and dturned, the sum of all heads' in the compute dtype, from grad, like out."""

    def silu(self, x: Array, out: Array) -> None:
        """out = x / (1 + exp(-x)). Shapes (M, F); x may be strided."""

    def swiglu(self, x: Array, out: Array) -> None:
        """out (M, F) = gate / (1 + exp(-gate)) * up of x (M, 2F) with columns gate|up."""

    def swiglu_backward(self, grad: Array, x: Array, dx: Array) -> None:
        """dx (M, 2F) from grad (M, F)."""

    def geglu(self, x: Array, out: Array) -> None:
        """out (M, F) = gelu(gate) * up of x (M, 2F) with columns gate|up."""

    def geglu_backward(self, grad: Array, x: Array, dx: Array) -> None: ...

    def embedding(self, ids: Array, weight: Array, out: Array, first: int = 0) -> None:
        """out (..., D) = weight (V, D)[ids (...) - first]; zeros for an id outside these V rows."""

    def embedding_backward(self, grad: Array, ids: Array, dweight: Array, first: int = 0) -> None:
        """dweight (V, D): zero, then each row of grad (..., D) added to its id's row, a fixed order of adds."""

    # -- experts: M tokens, E experts, k for each token; R rows, sorted by expert --------------------
    def route(self, logits: Array, bias: Array | None, how: Choice, weights: Array, ids: Array) -> None:
        """Choose a token's k experts by the scores of its logits (M, E) + bias (E): ids (M, k), the best first, of
        equal ones the first. weights (M, k) = their scores, without the bias."""

    def route_backward(self, grad: Array, logits: Array, ids: Array, how: Choice, dlogits: Array) -> None:
        """dlogits (M, E) from the weights' gradient (M, k). The bias has none."""

    def sort_rows(self, ids: Array, order: Array, counts: Array) -> None:
        """order (R) = the choices t k + c, sorted by their expert, stably; counts (E) = each expert's rows."""

    def keep_rows(
        self, order: Array, counts: Array, weights: Array | None, most: int, padded: bool, out: Array
    ) -> None:
        """out = the choices of `order` of which each expert keeps at most so many, in their order: the first ones or,
        with weights (M, k), those that weigh most, of equal ones the first. Padded, each expert has `most` rows, and R
        stands for a row of zeros."""

    def take_rows(self, x: Array, order: Array, each: int, out: Array) -> None:
        """out[r] = x[order[r] // each], a row; zeros for a choice of no token."""

    def sum_rows(self, rows: Array, order: Array, each: int, out: Array) -> None:
        """out[t] = the sum of all rows r with order[r] // each == t, in the order of their choices."""

    def count_choices(self, ids: Array, out: Array) -> None:
        """out (S, E) = how often each expert is chosen, for each of S runs of tokens of one length."""

    def router_losses_backward(
        self, logits: Array, loads: Array, scores: str, balance: float, size: float, dlogits: Array
    ) -> None:
        """dlogits (M, E) of balance * (sum of scores * loads) + size / 2 * (sum of lse²), with the loads (S, E) of a
        token's run, its softmax or, for 'sigmoid', its sigmoids divided by their sum, and the log-sum-exp of its
        logits."""

    def weigh_rows(self, rows: Array, weights: Array, out: Array) -> None:
        """out (R, D) = rows * weights (R, 1)."""

    def weigh_rows_backward(self, grad: Array, rows: Array, weights: Array, drows: Array, dweights: Array) -> None: ...
    def grouped(self, rows: Array, stack: Array, counts: Sequence[int], out: Array) -> None:
        """out (R, O) = each expert's rows, of which it has `counts`, (R, I) @ its matrix of the stack (E, I, O), which
        may be transposed."""

    def grouped_wgrad(self, left: Array, right: Array, counts: Sequence[int], scale: float, dstack: Array) -> None:
        """dstack (E, A, B) = scale * left (R, A)ᵀ @ right (R, B), of each expert's rows."""

    def move_rows(self, rows: Array, chunks: Sequence[int], order: Sequence[int], out: Array) -> None:
        """out = the runs of rows, of which each has so many, in this order."""

    def add_biases(self, rows: Array, bias: Array, counts: Sequence[int]) -> None:
        """rows (R, O) += the bias (E, O) of each expert, whose rows are `counts`. In place; rows may be strided."""

    def sum_biases(self, rows: Array, counts: Sequence[int], scale: float, dbias: Array) -> None:
        """dbias (E, O): scale times the sum of each expert's rows (R, O), which may be strided."""

    def clamped_swiglu(self, x: Array, alpha: float, limit: float, out: Array) -> None:
        """out (M, F) = gate / (1 + exp(-alpha gate)) * (up + 1) of x (M, 2F), whose columns are a gate, its up, and so
        on; gates are cut above `limit`, ups outside of -limit to limit."""

    def clamped_swiglu_backward(self, grad: Array, x: Array, alpha: float, limit: float, dx: Array) -> None: ...

    def cross_entropy(self, logits: Array, targets: Array, losses: Array, lse: Array, form: LogitForm = PLAIN) -> None:
        """losses (M) = lse - logits[target], lse (M) = log(sum(exp(logits))) of logits (M, V); both compute dtype.

        Here and below, logits are first multiplied and capped as `form` says, in the compute dtype. A row whose target
        is negative is not predicted: it has no loss and no gradient.
        """

    def cross_entropy_shares(
        self,
        logits: Array,
        targets: Array,
        first: int,
        top: Array,
        sums: Array,
        picked: Array,
        form: LogitForm = PLAIN,
    ) -> None:
        """For logits (M, V) that hold the columns from `first` on: sums (M) = sum(exp(logits - top)), picked (M) =
        logits[target - first], or 0 for a target in other columns. V may be 0. Of a row that is not predicted, the
        sums of all ranks add up to 1 and picked to top, so that its loss is 0."""

    def cross_entropy_backward(
        self,
        logits: Array,
        targets: Array,
        lse: Array,
        scale: float,
        count: float,
        dlogits: Array,
        first: int = 0,
        form: LogitForm = PLAIN,
    ) -> None:
        """dlogits (M, V) = (softmax(logits) - onehot(targets - first)) * scale / count: a true division by count. It is
        the gradient of the logits before `form`. dlogits may be the logits' own array."""

    def sample_labels(
        self, logits: Array, key: tuple[int, int], first: int, labels: Array, form: LogitForm = PLAIN
    ) -> None:
        """labels (M), int64: for each row of logits (M, V) a column, drawn from its softmax (inverse CDF).

        Row i gets the number of columns up to which the sum of exp(logits - top), in order and in fp64, is at most u
        times the sum of all, V - 1 at most. u in [0, 1) is 53 bits of 64-bit output first + i of the stream of
        `dropout_mask`: the upper ones, divided by 2**53.
        """

    def relative_buckets(self, of: Buckets, out: Array) -> None:
        """out (T, T), int64: the bucket of each query's distance to each key."""

    def dropout_mask(self, key: tuple[int, int], probability: float, out: Array, window: Window | None = None) -> None:
        """out, uint8: 1 with chance 1 - probability, a function of (key, position) alone.

        Element i (in row-major order) is kept if 32-bit word i of a stream, or word i of a window of it, is at
        least round(probability * 2**32). Words 8j to 8j + 7 are Philox-4x64-10 of `key` (two 64-bit words)
        and counter (j + 1, 0, 0, 0): four 64-bit outputs in their order, each cut into two words, low
        half first. The first counter is 1: NumPy's Philox(key=key, counter=0) counts before it draws.
        """

    def dropout(self, x: Array, mask: Array, keep: float, out: Array) -> None:
        """out = x * mask / keep. Its own backward, with grad as x."""

    # -- collectives, precision, optimizers --------------------------------------------------------
    def reduce(self, parts: Sequence[Array], op: str, out: Array) -> None:
        """out = parts added IN THE ORDER GIVEN in the compute dtype (fp64 for fp64), rounded once.

        op "sum"; "avg": the sum divided by len(parts), a true division; "max". Parts may be strided
        views of one shape; out may be any one of the parts (in place).
        """

    def sum_squares(self, a: Array, run: int, out: Array) -> None:
        """out (k), fp64: the sums of the squares of a's k consecutive runs of `run` elements, in fp64.

        a is 1-D; its last run may be shorter, and empty. The order of additions depends on a run's
        length alone. inf or nan in a run make its sum inf or nan.
        """

    def finite_probe(self, a: Array, out: Array) -> None:
        """out (1), fp64: 0 where every value of a (1-D) is finite, else nan. Probes may be summed."""

    def adam(self, param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, hyper: AdamStep) -> None:
        """One step of Adam (Kingma and Ba) on flat arrays of one length, in place; see optim/adam.py.

        g = grad * grad_scale; decoupled: param *= 1 - lr*weight_decay (AdamW), else g += weight_decay*param;
        m = m + (g - m)(1 - beta1); v = v*beta2 + g*g*(1 - beta2);
        param -= lr/(1 - beta1^step) * m / (sqrt(v)/sqrt(1 - beta2^step) + eps).
        grad may be a half type, the rest is in the compute dtype; elementwise, so a slice gets the same bits as the
        whole array.
        """

    def adam8bit(
        self, param: Array, grad: Array, exp_avg: Coded, exp_avg_sq: Coded, hyper: AdamStep,
        stored: tuple[Rule, Storing] | None = None,
    ) -> None:  # fmt: skip
        """`adam` on (n), n >= 1, whose states are in 8 bits. In place.

        A slice that begins at a quantisation block gets the same bits as the whole array. `stored`: weights are bf16;
        the same step as a rule, and how they are rounded (`elementwise`).
        """

    def dequantize_gptq(self, stored: Array, out: Array, scales: Array | None = None) -> None:
        """Fill `out` with the values of a map's weight in GPTQ's format, from its bytes (`numpy/gptq.py`), of which the
        scales and the blocks' numbers may be apart, in `scales`."""

    def dequantize_nf4(self, stored: Array, out: Array, scales: Array | None = None) -> None:
        """out = the values of a weight in NF4; `placement/formats.py` gives the layout of its bytes (uint8), of which
        those before the codes may be apart, in `scales`.

        Each value is an fp32 product, an entry of the table times its block's absmax, rounded to out's dtype.
        """

    def coded(self, rule: Callable[..., None], *arrays: Array) -> None:
        """Call rule(xp, *arrays), which fills some of the arrays in place; `xp` has NumPy's functions for them."""

    def elementwise(
        self, rule: Rule, grad: Array, param: Array, *states: Array, storing: Storing | None = None
    ) -> None:
        """Run a rule on flat arrays of one length, in place.

        `xp` has NumPy's functions for these arrays. Any of them may be a half type: the rule sees fp32 values, which
        are rounded once. With `storing` all are bf16, and `storing` says how the weights are rounded.
        """


def made_of(
    *modules: ModuleType, method: Callable[[Callable[..., None]], object] = staticmethod
) -> Callable[[type[T]], type[T]]:
    """Give a backend's class each kernel that it does not define itself, from the module that does.

    Raises: ValueError where a kernel is in none of the modules, or in several.
    """

    def complete(backend: type[T]) -> type[T]:
        for name in vars(Backend).keys() - vars(backend).keys():
            if not name.startswith("_"):
                found = [vars(module)[name] for module in modules if name in vars(module)]
                [kernel] = {run for run in found if run.__module__ in {module.__name__ for module in modules}}
                setattr(backend, name, method(kernel))
        return backend

    return complete
