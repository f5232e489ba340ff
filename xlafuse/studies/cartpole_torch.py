"""The cart-pole simulation in PyTorch: eager, compiled, and compiled with CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from xlafuse.bench.peers.tensors import to_torch
from xlafuse.studies.cartpole_simulation import (
    FALLEN,
    FORCE,
    GRAVITY,
    HALF_LENGTH,
    POLE_MASS,
    POLE_MOMENT,
    SECONDS,
    TOTAL_MASS,
    TRACK,
)
from xlafuse.studies.variants import wall_times


def _steps(state: Any, actions: Any, resets: Any) -> Any:
    for i in range(actions.shape[0]):
        state = _step(state, actions[i], tuple(each[i] for each in resets))
    return state


def _step(state: Any, action: Any, reset: Any) -> Any:
    position, velocity, angle, spin = state
    force = torch.where(action == 1, FORCE, -FORCE)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    push = (force + POLE_MOMENT * spin * spin * sine) / TOTAL_MASS
    turning = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cosine * cosine / TOTAL_MASS))
    pulling = push - POLE_MOMENT * turning * cosine / TOTAL_MASS
    after = (
        position + SECONDS * velocity,
        velocity + SECONDS * pulling,
        angle + SECONDS * spin,
        spin + SECONDS * turning,
    )
    over = (after[0].abs() > TRACK) | (after[2].abs() > FALLEN)
    return tuple(torch.where(over, new, old) for new, old in zip(reset, after, strict=True))


def times(states: Any, actions: Any, resets: Any) -> dict[str, dict[str, float]]:
    """Returns host times of the simulation, as `wall_times` gives them."""
    state = tuple(to_torch(each) for each in states)
    rows = to_torch(actions)
    begins = tuple(to_torch(each) for each in resets)
    compiled = torch.compile(_steps, dynamic=False, fullgraph=True)

    def simulate(step: Any, stride: int) -> None:
        now = state
        with torch.no_grad():
            for i in range(0, rows.shape[0], stride):
                now = step(now, rows[i : i + stride], tuple(each[i : i + stride] for each in begins))
        torch.cuda.synchronize()

    calls = {
        "PyTorch eager": lambda: simulate(_steps, 1),
        "torch.compile": lambda: simulate(compiled, 1),
        "torch.compile, unroll 10": lambda: simulate(compiled, 10),
    }
    return wall_times(calls, rounds=3)
