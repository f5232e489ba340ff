"""What to do about a missed fusion: an option of XLA's, another way to write the model, or a kernel of one's own.

The words are in the modules named texts, the choice by what stands on both ends in the others: by why XLA left them
apart and by devices (`vertical.py`), where one end is a convolution (`convolutions.py`), changes no value (`places.py`)
or is a matrix product (`products.py`), and of element-wise work and reductions (`rows.py`).
"""

from hlo_analysis.remedies.products import shared_input_remedy
from hlo_analysis.remedies.rows import rows_remedy
from hlo_analysis.remedies.table import Table
from hlo_analysis.remedies.texts import Remedy
from hlo_analysis.remedies.vertical import vertical_remedy

__all__ = ["Remedy", "Table", "rows_remedy", "shared_input_remedy", "vertical_remedy"]
