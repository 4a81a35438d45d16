"""Small models, and plans that fit them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from foretrace.generate import ParallelPlan, Transformer

SMALL = Transformer(layers=8, hidden=64, heads=8, kv_heads=4, ffn_hidden=96, vocabulary=256, sequence=32)


@st.composite
def models(draw: st.DrawFn) -> Transformer:
    return Transformer(
        layers=8,
        hidden=64,
        heads=8,
        kv_heads=draw(st.sampled_from((4, 8))),
        ffn_hidden=96,
        vocabulary=256,
        sequence=32,
        is_gated=draw(st.booleans()),
        norm=draw(st.sampled_from(("rms", "layer"))),
        is_tied=draw(st.booleans()),
    )


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    virtual = draw(st.sampled_from((1, 1, 2)))
    pp = draw(st.sampled_from((2, 4) if virtual > 1 else (1, 2, 4)))
    times = draw(st.integers(1, 3))
    options: dict[str, Any] = {
        "schedule": "interleaved" if virtual > 1 else draw(st.sampled_from(("1f1b", "gpipe"))),
        "micro_batches": pp * times if virtual > 1 else draw(st.integers(1, 6)),
        "zero": draw(st.integers(0, 3)),
        "recompute": draw(st.sampled_from(("none", "selective", "full"))),
        "order": draw(st.sampled_from(("tp-pp-dp", "tp-dp-pp"))),
    }
    return ParallelPlan(
        tp=draw(st.sampled_from((1, 2, 4))),
        pp=pp,
        dp=draw(st.integers(1, 3)),
        virtual_stages=virtual,
        micro_batch_size=draw(st.integers(1, 2)),
        sequence_parallel=draw(st.booleans()),
        flash_attention=draw(st.booleans()),
        bucket_bytes=draw(st.sampled_from((5_000, 30_000, 1 << 30))),
        **options,
    )
