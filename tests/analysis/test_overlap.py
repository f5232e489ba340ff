"""What of a collective's time the launches beside it leave."""

from __future__ import annotations

import pytest

from hlo_analysis.costs.overlap import with_exposed
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.program.launch_sites import _waits
from hlo_analysis.program.thunks import parse_thunk_sequence

THUNKS = """\
001: kAsyncStart   [source | next=006 (4)] stream=communication_stream[0], async_id=1
    002: kAllGather [source | sink] kAllGather
003: kCustomCall   [source | next=006 (2)] kCustomCall
004: kAsyncStart   [source | next=006 (4)] stream=communication_stream[0], async_id=2
    005: kAllGather [source | sink] kAllGather
006: kAsyncDone    [source | sink] async_id=1
007: kCustomCall   [source | next=008 (2)] kCustomCall
008: kAsyncDone    [source | sink] async_id=2
"""


def rows(*times: tuple[str, float]) -> list[LaunchRow]:
    return [
        LaunchRow(index=i, thunk_id=i, name=f"l{i}", kind=kind, computation="main", estimated_us=us)  # type: ignore[arg-type]
        for i, (kind, us) in enumerate(times)
    ]


def test_a_start_is_paired_with_its_wait():
    places = {2: 0, 3: 1, 5: 2, 7: 3}
    assert _waits(parse_thunk_sequence(THUNKS), places) == {0: 3, 2: 4}


@pytest.mark.parametrize(
    ("times", "waits", "exposed"),
    [
        ([("collective", 10), ("loop", 4)], {0: 2}, [6, None]),
        ([("collective", 10), ("loop", 4)], {0: 1}, [10, None]),
        ([("collective", 10), ("loop", 14)], {0: 2}, [0, None]),
        # One link: the second begins when the first has ended, and the work beside both hides once.
        ([("collective", 10), ("collective", 10), ("loop", 12)], {0: 3, 1: 3}, [0, 8, None]),
        ([("loop", 5), ("collective", 10), ("loop", 4), ("loop", 9)], {1: 3}, [None, 6, None, None]),
        ([("collective", 10), ("loop", 4)], {}, [10, None]),
    ],
)
def test_what_other_launches_do_not_hide(times, waits, exposed):
    made = with_exposed(rows(*times), waits)
    assert [launch.exposed_us for launch in made] == exposed
    for launch, left in zip(made, exposed, strict=True):
        if left is not None:
            assert launch.needed_us == launch.estimated_us - left
