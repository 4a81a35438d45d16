"""The operators of a transformer on one rank, and where tensor-parallel ranks exchange data between them.

A part of the model (embedding, layer, output head) is a list of `Operator` and `Boundary` in the order of the forward
pass; the backward pass goes through it in reverse. All sizes are those of one rank for one micro-batch: of `b`
sequences of `s` tokens, with `t` tensor-parallel ranks. Matrices are split as in Megatron-LM (Shoeybi et al. 2019,
arXiv 1909.08053, section 3): the first one of attention and FFN by columns, the second by rows, embedding and output
head by tokens of the vocabulary. FLOPs and bytes are those of `foretrace.machine.operator_cost`.

Not counted: rotary embeddings, dropout, copies and casts.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from foretrace.generate.costs import Cost, cost, elementwise, product, products, tensor
from foretrace.generate.model import Transformer
from foretrace.generate.plan import ParallelPlan
from foretrace.machine import Operand

_NONE = Operand()
_OPTIMIZER_FLOPS = 14  # of a parameter in AdamW's fused step, see foretrace.machine.formulas.optimizer


class Boundary(enum.Enum):
    """Where data pass between the tensor-parallel ranks.

    The conjugate operators f and g of Megatron-LM (arXiv 1909.08053, section 3), and with sequence parallelism their
    forms g and g-bar (arXiv 2205.05198, section 4.2.2).
    """

    ENTER = "enter"  # nothing, and backward an all-reduce; or all-gather, and backward a reduce-scatter
    LEAVE = "leave"  # all-reduce, and backward nothing; or reduce-scatter, and backward an all-gather
    LOSS = "loss"  # two small all-reduces of the cross entropy over a split vocabulary


@dataclass(frozen=True)
class Operator:
    """An operator on one rank.

    Attributes:
        name: for nodes and tables.
        forward: cost of the forward pass.
        input_gradient: cost of the gradient of its input.
        weight_gradient: cost of the gradient of its weights, where that is work of its own.
        parameters: weights that the rank holds.
        is_attention: what selective recomputation repeats.
    """

    name: str
    forward: Cost
    input_gradient: Cost
    weight_gradient: Cost = field(default_factory=Cost)
    parameters: int = 0
    is_attention: bool = False

    @property
    def backward(self) -> Cost:
        """Cost of the backward pass."""
        return self.input_gradient + self.weight_gradient


Part = list[Operator | Boundary]


def operators(part: Part) -> list[Operator]:
    """The operators of a part, without the boundaries."""
    return [item for item in part if isinstance(item, Operator)]


@dataclass(frozen=True)
class Shapes:
    """The parts of a model on a rank.

    Attributes:
        model: the whole model.
        plan: fits the model.
    """

    model: Transformer
    plan: ParallelPlan

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch: b s."""
        return self.plan.micro_batch_size * self.model.sequence

    @property
    def own_tokens(self) -> int:
        """Tokens whose norms and residuals this rank computes: b s, or b s / t with sequence parallelism."""
        return self.tokens // (self.plan.tp if self.plan.sequence_parallel else 1)

    @property
    def activation_bytes(self) -> int:
        """Bytes of the residual stream of a micro-batch."""
        return self.tokens * self.model.hidden * self.model.dtype_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank passes to the next pipeline stage: its tokens of the residual stream."""
        return self.own_tokens * self.model.hidden * self.model.dtype_bytes

    def _matrix(self, name: str, inner: int, columns: int, tokens: int | None = None) -> Operator:
        """Product with a weight matrix: three products of equal FLOPs, one forward and two backward."""
        rows, dtype = tokens or self.tokens, self.model.dtype
        forward, input_gradient = product(rows, inner, columns, dtype), product(rows, columns, inner, dtype)
        return Operator(name, forward, input_gradient, product(inner, rows, columns, dtype), inner * columns)

    def norm(self, name: str) -> Operator:
        """RMS or layer normalization of the rank's tokens; 4 and 9, or 5 and 13 operations for each element."""
        model, rows = self.model, self.own_tokens
        x, weight = tensor(rows, model.hidden, dtype=model.dtype), tensor(model.hidden, dtype=model.dtype)
        size, epsilon, row = Operand.of([model.hidden]), Operand.of(1e-5), tensor(rows, 1, dtype="float32")
        if model.norm == "rms":
            forward = cost("rms_norm", x, size, weight, epsilon)
            backward = cost("_fused_rms_norm_backward", x, x, size, row, weight, Operand.of([True, True]))
        else:
            all_three = Operand.of([True, True, True])
            forward = cost("layer_norm", x, size, weight, weight, epsilon, Operand.of(True))
            backward = cost("native_layer_norm_backward", x, x, size, row, row, weight, weight, all_three)
        return Operator(name, forward, backward, parameters=model.norm_parameters)

    def residual(self, name: str) -> Operator:
        """Sum of the residual stream and what a block adds; backward the sum of two gradients."""
        total = elementwise("add", 2, self.own_tokens * self.model.hidden, self.model.dtype)
        return Operator(name, total, total)

    def attention_core(self) -> list[Operator]:
        """Attention between the matrices, on ``heads / t`` heads of size d.

        In one kernel: scores and values are 4 s^2 d operations a head, half of them with a causal mask, and backward
        2.5 times as many, since scores are computed again (Dao 2023, arXiv 2307.08691, section 4.1). One by one:
        all pairs whatever the mask, scores and probabilities go through memory (arXiv 2205.05198, section 4.1).
        """
        model, batch = self.model, self.plan.micro_batch_size
        heads, length, size, dtype = model.heads // self.plan.tp, model.sequence, model.head_size, model.dtype
        if self.plan.flash_attention:
            return [self._flash(batch, heads, model.kv_heads // self.plan.tp)]
        each = batch * heads
        scores = products(each, length, size, length, dtype)
        values = products(each, length, length, size, dtype)
        pairs, last = tensor(each, length, length, dtype=dtype), Operand.of(-1)
        softmax = cost("_softmax", pairs, last, Operand.of(False))
        softmax_backward = cost("_softmax_backward_data", pairs, pairs, last, _NONE)
        toward_scores = products(each, length, length, size, dtype) + products(each, size, length, length, dtype)
        toward_values = products(each, length, size, length, dtype) + products(each, length, length, size, dtype)
        return [
            Operator("scores", scores, toward_scores, is_attention=True),
            Operator("softmax", softmax, softmax_backward, is_attention=True),
            Operator("values", values, toward_values, is_attention=True),
        ]

    def _flash(self, batch: int, heads: int, kv_heads: int) -> Operator:
        model = self.model
        query = tensor(batch, heads, model.sequence, model.head_size, dtype=model.dtype)
        key = tensor(batch, kv_heads, model.sequence, model.head_size, dtype=model.dtype)
        statistics = tensor(batch, heads, model.sequence, dtype="float32")
        rest = (Operand.of(0.0), Operand.of(model.is_causal))
        length = Operand.of(model.sequence)
        forward = cost("_scaled_dot_product_flash_attention", query, key, key, *rest)
        saved = (query, query, key, key, query, statistics, _NONE, _NONE, length, length)
        backward = cost("_scaled_dot_product_flash_attention_backward", *saved, *rest)
        return Operator("attention", forward, backward, is_attention=True)

    def activation(self) -> Operator:
        """SwiGLU (SiLU and a product) or GELU on ``ffn_hidden / t`` channels, one operation each for an element."""
        elements, dtype = self.tokens * self.model.ffn_hidden // self.plan.tp, self.model.dtype
        if self.model.is_gated:
            gate = elementwise("mul", 2, elements, dtype)
            forward = elementwise("silu", 1, elements, dtype) + gate
            return Operator("activation", forward, elementwise("silu_backward", 2, elements, dtype) + gate + gate)
        kind, x = Operand.of("none"), tensor(elements, dtype=dtype)
        return Operator("activation", cost("gelu", x, kind), cost("gelu_backward", x, x, kind))

    def layer(self) -> Part:
        """One layer: attention, then FFN, each with a norm before and a sum after it."""
        model, tp = self.model, self.plan.tp
        inner = model.ffn_hidden // tp
        first = self._matrix("gate_up", model.hidden, 2 * inner) if model.is_gated else self._matrix(
            "up", model.hidden, inner)  # fmt: skip
        return [
            self.norm("attention_norm"),
            Boundary.ENTER,
            self._matrix("qkv", model.hidden, model.qkv_size // tp),
            *self.attention_core(),
            self._matrix("output", model.hidden // tp, model.hidden),
            Boundary.LEAVE,
            self.residual("attention_residual"),
            self.norm("ffn_norm"),
            Boundary.ENTER,
            first,
            self.activation(),
            self._matrix("down", inner, model.hidden),
            Boundary.LEAVE,
            self.residual("ffn_residual"),
        ]

    def embedding(self) -> Part:
        """Look-up of all tokens in the rank's part of the vocabulary; backward adds up into a full gradient."""
        model, rows = self.model, self.model.vocabulary // self.plan.tp
        ids = tensor(self.plan.micro_batch_size, model.sequence, dtype="int64")
        table = tensor(rows, model.hidden, dtype=model.dtype)
        rest = (Operand.of(-1), Operand.of(False))
        forward = cost("embedding", table, ids, *rest, Operand.of(False))
        gradient = tensor(self.plan.micro_batch_size, model.sequence, model.hidden, dtype=model.dtype)
        backward = cost("embedding_dense_backward", gradient, ids, Operand.of(rows), *rest)
        return [Operator("embedding", forward, Cost(), backward, rows * model.hidden), Boundary.LEAVE]

    def head(self) -> Part:
        """Final norm, logits and cross entropy over the rank's part of the vocabulary.

        A tied matrix is counted at the embedding if both are on one rank.
        """
        model, rows = self.model, self.model.vocabulary // self.plan.tp
        logits = self._matrix("logits", model.hidden, rows)
        if model.is_tied and self.plan.pp == 1:
            logits = Operator("logits", logits.forward, logits.input_gradient, logits.weight_gradient)
        x, target = tensor(self.tokens, rows, dtype=model.dtype), tensor(self.tokens, dtype="int64")
        ignored = (Operand.of(1), Operand.of(-100), Operand.of(0.0))
        loss = cost("cross_entropy_loss", x, target, _NONE, *ignored)
        backward = cost("_softmax_backward_data", x, x, Operand.of(-1), _NONE)
        entropy = Operator("cross_entropy", loss, backward)
        return [self.norm("final_norm"), Boundary.ENTER, logits, Boundary.LOSS, entropy]

    def parts(self, has_embedding: bool, has_head: bool) -> list[tuple[str, Part]]:
        """The parts of a chunk of layers, with names, in forward order."""
        layer = self.layer()
        found = [(f"l{at} ", layer) for at in range(self.model.layers // self.plan.chunks)]
        return [*([("", self.embedding())] if has_embedding else []), *found,
                *([("", self.head())] if has_head else [])]  # fmt: skip

    def chunk_parameters(self, has_embedding: bool, has_head: bool) -> int:
        """Parameters that a rank holds of a chunk of layers (before data-parallel ranks share them out)."""
        parts = self.parts(has_embedding, has_head)
        return sum(operator.parameters for _, part in parts for operator in operators(part))

    def buckets(self, has_embedding: bool, has_head: bool) -> tuple[int, ...]:
        """Parameters of the buckets in which a chunk's gradients are reduced, in the order of the backward pass.

        A bucket is closed when it has ``bucket_bytes`` or more; gradients of an operator are not torn apart.
        """
        found, waiting = [], 0
        enough = self.plan.bucket_bytes / self.plan.gradient_bytes(self.model)
        for _, part in reversed(self.parts(has_embedding, has_head)):
            for operator in reversed(operators(part)):
                waiting += operator.parameters
                if waiting >= enough:
                    found.append(waiting)
                    waiting = 0
        return (*found, waiting) if waiting else tuple(found)

    def optimizer(self, parameters: int) -> Cost:
        """AdamW in mixed precision (Micikevicius et al. 2017, arXiv 1710.03740).

        For each parameter 14 operations; master weight and both moments (4 bytes each) are read and written, the
        gradient is read and the weight in the type of the model written.
        """
        moved = 2 * 3 * 4 + self.plan.gradient_bytes(self.model) + self.model.dtype_bytes
        return Cost(_OPTIMIZER_FLOPS * parameters, moved * parameters)
