import msgspec
from benchmarks import round as benchmark


def test_the_round_benchmark_measures_and_writes_its_figures(tmp_path, capsys):
    path = tmp_path / "figures" / "round.json"
    benchmark.main(["--batch", "2", "--rounds", "20", "--json", str(path)])
    (row,) = msgspec.json.decode(path.read_bytes())["results"]
    assert row["batch"] == 2
    assert all(row[name]["best"] > 0 for name in benchmark.FIGURES)
    assert "scheduler" in capsys.readouterr().out


def test_the_soak_accounts_for_every_request(capsys):
    report = benchmark.soak(600, size=2)
    assert report["requests"] > 2
    assert len(report["memory"]) == 11
