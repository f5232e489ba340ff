"""Chooses what to do about a missed fusion: an XLA option, another way to write the model, or a kernel.

The modules named `*texts.py` hold the texts. The others choose one by what the launches on both ends do:

- `vertical.py`: asks the modules below in turn, after the reasons why XLA left the launches apart
- `convolutions.py`: one end is a convolution
- `data_movement.py`: one end changes no value
- `products.py`, `low_rank.py`, `joined.py`, `grouped.py`, `tiny_products.py`: one end is a matrix product
- `rows.py`: element-wise work and reductions
"""

from hlo_analysis.remedies.data_movement import of_filled
from hlo_analysis.remedies.products import kept_value_remedy, shared_input_remedy
from hlo_analysis.remedies.rows import rows_remedy, takes_part
from hlo_analysis.remedies.table import Table
from hlo_analysis.remedies.texts import Remedy
from hlo_analysis.remedies.vertical import vertical_remedy

__all__ = [
    "Remedy",
    "Table",
    "kept_value_remedy",
    "of_filled",
    "rows_remedy",
    "shared_input_remedy",
    "takes_part",
    "vertical_remedy",
]
