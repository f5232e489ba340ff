"""Sizes of the public models: "tiny" for numerics on a CPU, "page" for docs/public-models.md, "real" as published."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Size = Literal["tiny", "page", "real"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Sizes of a stack of equal layers and of its batch of sequences.

    length: tokens, steps, or pixels of an image's side. hidden: of the MLP. window: of local attention. targets:
    tokens of the decoder. experts, chosen: in all, and of each token. vocabulary: or the number of classes.
    """

    batch: int
    length: int
    width: int
    layers: int = 1
    heads: int = 0
    key_heads: int = 0
    head_width: int = 0
    hidden: int = 0
    window: int = 0
    targets: int = 0
    experts: int = 0
    chosen: int = 0
    vocabulary: int = 0

    def __str__(self) -> str:
        """Returns the sizes that the page shows."""
        layers = f"{self.layers} layer" if self.layers == 1 else f"{self.layers} layers"
        return f"{self.batch} x {self.length}, width {self.width}, {layers}"


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """Sizes of a batch of graphs, of all its graphs together, and of the network."""

    nodes: int
    edges: int
    graphs: int
    width: int
    steps: int = 1
    dropout: bool = True


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Sizes of a network of images at several resolutions, each of its own width.

    blocks: per level. context: width of the text's embeddings.
    """

    batch: int
    side: int
    widths: tuple[int, ...]
    blocks: int
    heads: int = 0
    context: int = 0


def resolve(table: dict[Size, Any], size: Size, layers: int | None = None) -> Any:
    """Returns the sizes of a table, with at most so many layers."""
    if size not in table:
        raise ValueError(f"size is {size!r}, expected one of {', '.join(table)}")
    if layers is not None and layers < 1:
        raise ValueError(f"layers is {layers}, expected at least 1")
    sizes = table[size]
    return replace(sizes, layers=min(layers, sizes.layers)) if layers and isinstance(sizes, Stack) else sizes


ROOM = 16
"""Tokens that a call generates after a prompt."""
WORDS = 77
"""Tokens of the text that the U-Net attends to."""


def decoding(stack: Stack) -> Stack:
    """Returns the sizes of generation: 8 sequences, and 1024 tokens with `ROOM` of them behind the prompt.

    GPT-2 has as many positions, and Bonsai's caches have room for a power of two.
    """
    return replace(stack, batch=8, length=1024)


_TINY = Stack(batch=2, length=32, width=64, heads=4, key_heads=2, head_width=16, hidden=256, vocabulary=128)
_PAGE = Stack(batch=8, length=512, width=1024, heads=16, key_heads=8, head_width=64, hidden=4096, vocabulary=32000)

LLAMA: dict[Size, Stack] = {  # Llama 3.2 1B
    "tiny": _TINY,
    "page": _PAGE,
    "real": replace(_PAGE, batch=4, length=2048, width=2048, layers=16, heads=32, hidden=8192, vocabulary=128256),
}
GPT2: dict[Size, Stack] = {  # medium
    "tiny": _TINY,
    "page": _PAGE,
    "real": replace(_PAGE, length=1024, layers=24, vocabulary=50257),
}
BERT: dict[Size, Stack] = {  # large
    "tiny": _TINY,
    "page": _PAGE,
    "real": replace(_PAGE, batch=16, layers=24, vocabulary=30522),
}
VIT: dict[Size, Stack] = {  # L/16
    "tiny": replace(_TINY, length=32, vocabulary=10),
    "page": replace(_PAGE, length=224, vocabulary=10),
    "real": replace(_PAGE, batch=64, length=224, layers=24, vocabulary=1000),
}
LM1B: dict[Size, Stack] = {  # configs/default.py
    "tiny": replace(_TINY, length=24, heads=8),
    "page": replace(_PAGE, width=512, heads=8, hidden=2048, vocabulary=30000),
    "real": replace(_PAGE, batch=32, length=128, width=512, layers=6, heads=8, hidden=2048, vocabulary=30000),
}
GEMMA: dict[Size, Stack] = {  # Gemma 3 1B
    "tiny": replace(_TINY, length=24, window=12),
    "page": replace(_PAGE, heads=8, key_heads=4, head_width=128, window=256),
    "real": Stack(
        batch=4,
        length=2048,
        width=1152,
        layers=26,
        heads=4,
        key_heads=1,
        head_width=256,
        hidden=6912,
        window=512,
        vocabulary=262144,
    ),
}
QWEN3: dict[Size, Stack] = {  # 0.6B
    "tiny": replace(_TINY, length=16, hidden=192),
    "page": replace(_PAGE, heads=8, key_heads=4, head_width=128, hidden=3072),
    "real": replace(_PAGE, batch=4, length=2048, layers=28, head_width=128, hidden=3072, vocabulary=151936),
}
MAMBA2: dict[Size, Stack] = {  # 780M
    "tiny": replace(_TINY, length=64, head_width=8),
    "page": Stack(batch=4, length=1024, width=768, head_width=64, vocabulary=32000),
    "real": Stack(batch=4, length=2048, width=1536, layers=48, head_width=64, vocabulary=50288),
}
HAIKU_LM: dict[Size, Stack] = {  # the example's 6 layers and 8 heads, of four times its width
    "tiny": replace(_TINY, length=24, heads=8),
    "page": replace(_PAGE, width=512, heads=8, vocabulary=128),
    "real": replace(_PAGE, width=512, layers=6, heads=8, vocabulary=128),
}
LSTM: dict[Size, Stack] = {  # the example's
    "tiny": Stack(batch=2, length=8, width=32, vocabulary=128),
    "page": Stack(batch=32, length=128, width=256, vocabulary=128),
    "real": Stack(batch=32, length=128, width=256, vocabulary=128),
}
GRU: dict[Size, Stack] = {
    "tiny": Stack(batch=2, length=8, width=32),
    "page": Stack(batch=64, length=128, width=256),
    "real": Stack(batch=64, length=128, width=256),
}
GRAPH_NET: dict[Size, Graphs] = {  # molecules of 26 atoms, and the edges of the example's: bonds both ways and loops
    "tiny": Graphs(nodes=24, edges=40, graphs=4, width=32, dropout=False),  # float64 would draw other masks
    "page": Graphs(nodes=16384, edges=32768, graphs=512, width=256),
    "real": Graphs(nodes=6656, edges=20736, graphs=256, width=256, steps=5),
}
UNET: dict[Size, Levels] = {  # Stable Diffusion 1.5
    "tiny": Levels(batch=1, side=8, widths=(32, 64), blocks=1, heads=4, context=64),
    "page": Levels(batch=4, side=64, widths=(320, 640), blocks=1, heads=8, context=640),
    "real": Levels(batch=4, side=64, widths=(320, 640, 1280, 1280), blocks=2, heads=8, context=768),
}
UMT5: dict[Size, Stack] = {  # base, and T5's targets of spans
    "tiny": replace(_TINY, targets=8),
    "page": replace(_PAGE, width=768, heads=12, hidden=2048, targets=114),
    "real": replace(_PAGE, batch=4, width=768, layers=12, heads=12, hidden=2048, targets=114, vocabulary=256384),
}
WHISPER: dict[Size, Stack] = {  # small
    "tiny": replace(_TINY, targets=8),
    "page": replace(_PAGE, width=768, heads=12, hidden=3072, targets=128, vocabulary=51865),
    "real": replace(
        _PAGE, batch=16, length=1500, width=768, layers=12, heads=12, hidden=3072, targets=448, vocabulary=51865
    ),
}
SIGLIP: dict[Size, Stack] = {  # B/16, and a text tower alike
    "tiny": replace(_TINY, targets=8),
    "page": replace(_PAGE, length=224, width=768, heads=12, hidden=3072, targets=64),
    "real": replace(
        _PAGE, batch=128, length=224, width=768, layers=12, heads=12, hidden=3072, targets=64, vocabulary=32000
    ),
}
RESNET: dict[Size, Levels] = {  # 50
    "tiny": Levels(batch=2, side=32, widths=(8, 16), blocks=1),
    "page": Levels(batch=64, side=224, widths=(64, 128, 256, 512), blocks=3),
    "real": Levels(batch=128, side=224, widths=(64, 128, 256, 512), blocks=3),
}
S5: dict[Size, Stack] = {  # run_lra_cifar.sh; heads: blocks of the state's matrix
    "tiny": Stack(batch=2, length=32, width=16, heads=3, hidden=24, vocabulary=10),
    "page": Stack(batch=50, length=1024, width=512, heads=3, hidden=384, vocabulary=10),
    "real": Stack(batch=50, length=1024, width=512, layers=6, heads=3, hidden=384, vocabulary=10),
}
GRIFFIN: dict[Size, Stack] = {  # RecurrentGemma 2B
    "tiny": replace(_TINY, layers=3, window=16),
    "page": replace(_PAGE, layers=3, heads=8, hidden=3072, window=256),
    "real": Stack(batch=2, length=2048, width=2560, layers=26, heads=10, hidden=7680, window=2048, vocabulary=256000),
}
GEMMA4_EXPERTS: dict[Size, Stack] = {  # 26B A4B; of its 30 layers 2, whose AdamW's state fits beside XLA's masks
    "tiny": Stack(batch=2, length=16, width=32, hidden=16, experts=8, chosen=2),
    "page": Stack(batch=2, length=512, width=1024, hidden=704, experts=32, chosen=4),
    "real": Stack(batch=1, length=2048, width=2816, layers=2, hidden=704, experts=128, chosen=8),
}
EVOFORMER: dict[Size, Stack] = {  # of the first training: crops of 256 residues, 128 sequences
    "tiny": Stack(batch=8, length=12, width=16),
    "page": Stack(batch=128, length=256, width=256),
    "real": Stack(batch=128, length=256, width=256, layers=48),
}
E3NN: dict[Size, Graphs] = {  # the example's network; QM9's molecules have 18 atoms, here with an edge a pair
    "tiny": Graphs(nodes=24, edges=40, graphs=4, width=32),
    "page": Graphs(nodes=1152, edges=19584, graphs=64, width=32),
    "real": Graphs(nodes=2304, edges=39168, graphs=128, width=32),
}
