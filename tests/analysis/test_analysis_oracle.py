"""Our counts beside those of XLA's own cost analysis, where both count the same thing.

They differ by design on loops (XLA counts one iteration), conditionals, library calls (XLA knows nothing of them),
scatters (ours are in place) and conversions (ours are free).
"""

from __future__ import annotations

import jax
import pytest
from jax._src.lib import _jax
from jaxlib import _hlo

pytestmark = pytest.mark.slow  # of the corpus

BYTES = (
    "column_sums",
    "concatenate",
    "copies",
    "int4",
    "int8_product",
    "many_results",
    "mlp_gradient",
    "random_normal",
    "read_slice",
    "softmax",
    "update_slice",
)
FLOPS = ("concatenate", "copies", "gather_scatter", "int8_product", "many_results", "mlp_gradient", "softmax")


@pytest.fixture(scope="module")
def xla_costs(corpus):
    client = jax.devices("cpu")[0].client

    def costs(name: str) -> dict[str, float]:
        module = _hlo.hlo_module_from_text(corpus[name].require("final_hlo"))
        return _jax.hlo_module_cost_analysis(client, module)

    return costs


@pytest.mark.parametrize("name", BYTES)
def test_bytes(analyses, xla_costs, name):
    # XLA also counts a few bytes that are no traffic, such as a multi-output fusion's tuple.
    assert analyses[name].traffic.bytes == pytest.approx(xla_costs(name)["bytes accessed"], abs=64)


@pytest.mark.parametrize("name", FLOPS)
def test_flops(analyses, xla_costs, name):
    costs = xla_costs(name)
    theirs = costs.get("flops", 0.0) + costs.get("transcendentals", 0.0)
    assert analyses[name].traffic.flops == pytest.approx(theirs, rel=0.005)
