"""Which layout stores which kind of layer in the model's own dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.types import LayerSpec
from stages.rows.attention import AttentionLayout
from stages.rows.chunked import ChunkedLayout
from stages.rows.recurrent import RecurrentLayout
from stages.rows.sinks import SinkLayout

LAYOUTS: Mapping[str, Callable[[LayerSpec, int], Any]] = {  # kind -> (spec, max_width) -> Layout
    "full": AttentionLayout,
    "sliding": AttentionLayout,
    "chunked": ChunkedLayout,
    "sinks": SinkLayout,
    "latent": AttentionLayout,  # the latent stands in for keys, the rotary part for values
    "recurrent": RecurrentLayout,
}
