"""The benchmark beside peers, with drumline itself as the peer and a model of random weights."""

from benchmarks.peers import contest
from benchmarks.peers.bars import Bar, Contest
from benchmarks.peers.drumline import Drumline
from benchmarks.peers.engine import Side
from benchmarks.peers.place import Place
from benchmarks.peers.work import Sizes

SIZES = Sizes(vocabulary=(10, 500), share=0.05, requests=0.2, seconds=0.5)


def test_drumline_in_process_beside_itself_over_http(tmp_path, tiny_model):
    place = Place(tmp_path, tmp_path / "logs", 1)
    drumline = Drumline(place, model=str(tiny_model), max_total_tokens=4096)
    tried = Contest(
        "drumline",
        Side(),
        Side(http=True),
        {
            "W1": {"decode tok/s": Bar(0.0), "TTFT p50 ms": None},
            "W4": {"prompt tok/s": None},
            "W5 cold": {"req/s": None},
            "W5 warm": {"req/s": None},
            "W6": {"ITL p99 ms": None},
        },
    )
    rows = contest.run(
        tried, drumline.engine(tried.ours), drumline.engine(tried.theirs), 2, SIZES, lambda _: None
    )
    assert [row.verdict for row in rows] == ["holds", *["compared"] * 5], rows
    assert all(value > 0 for row in rows for side in row.runs for value in side)
    assert {len(side) for row in rows for side in row.runs} == {2}
