from __future__ import annotations

import jax

# An interpreted kernel computes with jax arrays in callbacks, and a CPU client has 32 computations under way at most. A
# test that runs on meanwhile fills those places with computations that wait for the kernel, which waits for a place.
jax.config.update("jax_cpu_enable_async_dispatch", False)
