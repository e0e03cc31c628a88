"""Flags are read off the structs; what is wrong is named, and what would be right too."""

import re

import pytest

from drumline.cli.flags import assemble, read_arguments, variable_of
from drumline.cli.help import usage
from drumline.cli.peers import EQUIVALENTS, IGNORED
from drumline.cli.verbs import Bench, Chat, Generate, Serve
from drumline.core.config import Config, Dtype
from drumline.core.errors import ConfigError
from drumline.core.settings import converted, settings_of

FLAGS = settings_of(Serve)


def parse(*argv: str, env: dict[str, str] | None = None) -> Config:
    return assemble(Serve, FLAGS, read_arguments(FLAGS, argv), env or {}).config


def refusal(*argv: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv, env=env)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_words_every_default_is_the_structs_own():
    assert parse() == Config()


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--max-model-len", "4096"], "model.max_model_len", 4096),
        (["--max-model-len=4096"], "model.max_model_len", 4096),
        (["--context-length", "4096"], "model.max_model_len", 4096),
        (["--model-path", "x"], "model.model", "x"),
        (["-m", "x"], "model.model", "x"),
        (["--dtype", "float32"], "model.dtype", Dtype.FLOAT32),
        (["--dtype", "float"], "model.dtype", Dtype.FLOAT32),
        (["--dtype", "half"], "model.dtype", Dtype.FLOAT16),
        (["--dtype", "bf16"], "model.dtype", Dtype.BFLOAT16),
        (["--reasoning-parser", "deepseek-r1"], "chat.reasoning_parser", "deepseek_r1"),
        (["--alias", "a"], "model.served_model_name", ("a",)),
        (["--seed", "-1"], "model.seed", -1),
        (["--random-seed", "7"], "model.seed", 7),
        (["--served-model-name", "a", "b"], "model.served_model_name", ("a", "b")),
        (["--block-size", "32"], "cache.prefix_granularity", 32),
        (["--page-size", "32"], "cache.prefix_granularity", 32),
        (["--prefix-granularity", "32"], "cache.prefix_granularity", 32),
        (["--kv-cache-size", "1GiB"], "cache.kv_cache_size", "1GiB"),
        (["--gpu-memory-utilization", "0.5"], "cache.gpu_memory_utilization", 0.5),
        (["--mem-fraction-static", "0.5"], "cache.gpu_memory_utilization", 0.5),
        (["--max-total-tokens", "9"], "cache.max_total_tokens", 9),
        (["--disable-prefix-caching"], "cache.prefix_caching", False),
        (["--no-enable-prefix-caching"], "cache.prefix_caching", False),
        (["--disable-radix-cache"], "cache.prefix_caching", False),
        (["--no-prefix-caching"], "cache.prefix_caching", False),
        (["--prefix-caching=false"], "cache.prefix_caching", False),
        (["--disable-radix-cache", "--prefix-caching"], "cache.prefix_caching", True),
        (["--disable-cuda-graph"], "graph.cuda_graph", False),
        (["--enforce-eager"], "graph.cuda_graph", False),
        (["--cuda-graph-bs", "1", "8"], "graph.cuda_graph_bs", (1, 8)),
        (["--cudagraph-capture-sizes", "2", "4"], "graph.cuda_graph_bs", (2, 4)),
        (["--max-cudagraph-capture-size", "64"], "graph.cuda_graph_max_bs", 64),
        (["--disable-overlap-schedule"], "schedule.overlap_schedule", False),
        (["--no-async-scheduling"], "schedule.overlap_schedule", False),
        (["--disable-mixed-batch"], "schedule.mixed_batch", False),
        (["--enable-mixed-batch"], "schedule.mixed_batch", True),
        (["--mixed-prefill-tokens", "64"], "schedule.mixed_prefill_tokens", 64),
        (["--no-share-prefix-in-flight"], "cache.share_prefix_in_flight", False),
        (["--no-promote-window-prefixes"], "cache.promote_window_prefixes", False),
        (["--scheduling-policy", "priority"], "schedule.scheduling_policy", "priority"),
        (["--schedule-policy", "fcfs"], "schedule.scheduling_policy", "fcfs"),
        (["--scheduling-patience", "8"], "schedule.scheduling_patience", 8),
        (["--max-num-queued-reqs", "8"], "schedule.max_num_queued_reqs", 8),
        (["--max-queued-requests", "8"], "schedule.max_num_queued_reqs", 8),
        (["--max-num-queued-tokens", "8"], "schedule.max_num_queued_tokens", 8),
        (["--max-num-seqs", "8"], "schedule.max_num_seqs", 8),
        (["--max-running-requests", "8"], "schedule.max_num_seqs", 8),
        (["--max-num-batched-tokens", "64"], "schedule.chunked_prefill_size", 64),
        (["--enable-kvstore", "--hicache-ratio", "3"], "cache.kvstore_ratio", 3.0),
        (
            ["--enable-kvstore", "--kvstore-write-policy", "write_back"],
            "cache.kvstore_write_policy",
            "write_back",
        ),
        (["--max-model-len", "8", "--context-length", "9"], "model.max_model_len", 9),
        (["-tp", "2"], "parallel.tensor_parallel_size", 2),
        (["--tp=2"], "parallel.tensor_parallel_size", 2),
        (["-dp", "2"], "parallel.data_parallel_size", 2),
        (["-pp", "2"], "parallel.pipeline_parallel_size", 2),
        (["--pp-size=2"], "parallel.pipeline_parallel_size", 2),
        (["--enable-prefix-caching"], "cache.prefix_caching", True),
        (["--port", "1", "--port", "2"], "server.port", 2),
        (["--shutdown-timeout", "1.5"], "process.drain_timeout", 1.5),
        (["--log_level", "debug"], "process.log_level", "debug"),
    ],
)
def test_a_flag_sets_its_field(argv, field, value):
    section, name = field.split(".")
    assert getattr(getattr(parse(*argv), section), name) == value


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--max-model-lne", "1"], "--max-model-lne: unknown flag; did you mean --max-model-len?"),
        (["--zzzz"], "--zzzz: unknown flag; see --help"),
        (["--disable-metal"], "--disable-metal: unknown flag; see --help"),
        (["--kv-cache-size", "lots"], "--kv-cache-size: 'lots' is no size; write it as 2GiB"),
        (
            ["--enforce-eager", "--cuda-graph-max-bs", "8"],
            "--cuda-graph-max-bs: has no effect beside --disable-cuda-graph",
        ),
        (
            ["--disable-cuda-graph", "--cudagraph-capture-sizes", "8"],
            "--cuda-graph-bs: has no effect beside --disable-cuda-graph",
        ),
        (
            ["--cuda-graph-bs", "1", "8", "--cuda-graph-max-bs", "8"],
            "--cuda-graph-max-bs: has no effect beside --cuda-graph-bs",
        ),
        (["--kvstore-size", "4GiB"], "--kvstore-size: has no effect without --enable-kvstore"),
        (
            ["--kvstore-ratio", "2", "--disable-kvstore"],
            "--kvstore-ratio: has no effect without --enable-kvstore",
        ),
        (
            ["--kvstore-write-policy", "write_through"],
            "--kvstore-write-policy: has no effect without --enable-kvstore",
        ),
        (["--enable-kvstore", "--kvstore-size", "big"], "--kvstore-size: 'big' is no size"),
        (
            ["--retraction-snapshot-max-requests", "4", "--retraction-snapshot-host-gb", "0"],
            "--retraction-snapshot-max-requests: has no effect beside "
            "--retraction-snapshot-host-gb 0",
        ),
        (
            ["--retraction-snapshot-max-requests", "0", "--retraction-snapshot-host-gb", "4"],
            "--retraction-snapshot-host-gb: has no effect beside "
            "--retraction-snapshot-max-requests 0",
        ),
        (
            ["--debug-force-retraction-interval", "3", "--retraction-snapshot-host-gb", "0"],
            "--debug-force-retraction-interval: has no effect beside "
            "--retraction-snapshot-host-gb 0",
        ),
        (
            ["--enable-kvstore", "--disable-prefix-caching"],
            "--enable-kvstore: keeps the pages of prefixes, which --disable-prefix-caching forbids",
        ),
        (["--port", "99999"], "--port: '99999' will not do: expected `int` <= 65535"),
        (["--port", "http"], "--port: 'http' is no whole number"),
        (["--max-model-len", "32k"], "--max-model-len: '32k' is no whole number, written out in"),
        (["--drain-timeout", "long"], "--drain-timeout: 'long' is no number"),
        (["--port"], "--port: it needs a value"),
        (["--port", "--host"], "--port: it needs a value"),
        (["--max-model-len", "x"], "--max-model-len: 'x' is no whole number, written out"),
        (["--max-num-seqs", "0"], "--max-num-seqs: '0' will not do: expected `int` >= 1"),
        (["--max-num-seqs", "99999999"], "--max-num-seqs: '99999999' will not do"),
        (["--chunked-prefill-size", "9" * 20], "will not do: expected `int` <= 2147483647"),
        (["--max-model-len", "1"], "--max-model-len: '1' will not do: expected `int` >= 2"),
        (["--drain-timeout", "inf"], "--drain-timeout: 'inf' will not do"),
        (["--startup-timeout", "inf"], "--startup-timeout: 'inf' will not do"),
        (["--served-model-name", ""], "will not do: expected `str` of length >= 1"),
        (["--device", "rocm"], "--device: 'rocm' is no device; say auto, cpu, cuda or cuda:N"),
        (["--dtype", "int8"], "--dtype: 'int8' is none of auto, bfloat16, float16, float32"),
        (
            ["--kv-cache-dtype", "fp8_e4m3"],
            "--kv-cache-dtype: 'fp8_e4m3' is none of auto, bfloat16, float32, int8",
        ),
        (["--overlap-schedule=maybe"], "--overlap-schedule: 'maybe' is neither true nor false"),
        (["--disable-mixed-batch=1"], "--disable-mixed-batch: it takes no value"),
        (["--zmq-engine-index", "3"], "--zmq-engine-index: has no effect without --headless"),
        (["--data-parallel-rpc-port", "0"], "--data-parallel-rpc-port: '0' will not do"),
        (
            ["--headless", "--zmq-engine-index", "65535", "--dp", "2"],
            "--zmq-engine-index: 2 data-parallel ranks from 65535 on pass the last number, 65535",
        ),
    ],
)
def test_a_wrong_flag_is_named_with_what_would_be_right(argv, told):
    assert told in refusal(*argv)


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--num-gpu-blocks-override", "--max-total-tokens"),
        ("--max-prefill-tokens", "--chunked-prefill-size"),
        ("--ctx-size", "--max-model-len"),
        ("-ngl", "follows from the device"),
        ("--chat-template-file", "--chat-template"),
        ("--http-port", "--port"),
        ("--uvicorn-log-level", "--log-level"),
        ("--disable-log-requests", "--log-level warning"),
        ("--disable-log-stats", "--log-level warning"),
        ("--enable-lora", "merge them into the checkpoint"),
        ("--is-embedding", "not served"),
        ("--root-path", "proxy"),
        ("--expert-parallel-size", "no expert-parallel ranks"),
        ("--cache-type-k", "--kv-cache-dtype"),
        ("-ctv", "--kv-cache-dtype"),
        ("--attention-backend", "follows from the device"),
        ("--revision", "hf download"),
    ],
)
def test_a_flag_of_another_engine_names_ours(flag, told):
    assert told in refusal(flag, "1")


@pytest.mark.parametrize(
    "said",
    [
        ("--port", "8000"),
        ("--host", "127.0.0.1"),
        ("--api-key", "x"),
        ("--admin-api-key", "x"),
        ("--ssl-certfile", "x"),
        ("--chat-template", "x"),
        ("--tool-call-parser", "none"),
        ("--drain-timeout", "1"),
        ("--load-balance-method", "round_robin"),
    ],
)
def test_what_only_a_server_of_ours_would_do_is_refused_of_headless_ranks(said):
    told = refusal("--headless", *said)
    assert told.startswith(f"{said[0]}: has no effect with --headless")
    assert parse("--headless", "--no-headless", *said)


def test_a_server_setting_from_a_variable_is_refused_of_headless_ranks_too():
    assert "--api-key: has no effect" in refusal("--headless", env={"DRUMLINE_API_KEY": "x"})


def test_headless_ranks_dial_where_the_original_would():
    assert parse("--headless").frontend.handshake == "tcp://127.0.0.1:30500"
    said = ("--data-parallel-address", "fd00::1", "--data-parallel-rpc-port", "7")
    assert parse("--headless", *said).frontend.handshake == "tcp://[fd00::1]:7"


def test_what_is_said_of_other_engines_names_real_flags_and_shadows_none():
    known = {
        n
        for verb in (Serve, Generate, Chat, Bench)
        for f in settings_of(verb)
        for n in f.names + f.off
    }
    assert not known & (set(EQUIVALENTS) | set(IGNORED))
    for text in (*EQUIVALENTS.values(), *IGNORED.values()):
        assert set(re.findall(r"--[a-z-]+", text)) <= known | {"--config"}


@pytest.mark.parametrize("flag", IGNORED)
def test_a_switch_that_asks_for_what_is_so_is_taken_with_its_reason(flag):
    found = read_arguments(FLAGS, [flag, "model"])
    assert found.notes == [f"{flag}: {IGNORED[flag]}"]
    assert found.positionals == ["model"]


def test_a_switch_that_changes_nothing_is_taken_with_a_note():
    found = read_arguments(FLAGS, ["--enable-metrics"])
    assert found.notes == ["--enable-metrics: metrics are always on, see /metrics"]


@pytest.mark.parametrize("verb", [Serve, Generate, Chat])
def test_no_two_fields_of_a_verb_share_a_spelling_or_a_variable(verb):
    flags = settings_of(verb)
    names = [name for flag in flags for name in flag.names + flag.off]
    assert len(names) == len(set(names))
    assert len({variable_of(flag) for flag in flags}) == len(flags)


def test_every_flag_can_be_set_by_a_variable_and_wins_over_it():
    env = {"DRUMLINE_PORT": "1234", "DRUMLINE_PREFIX_CACHING": "false", "HOME": "/"}
    assert parse(env=env).server.port == 1234
    assert not parse(env=env).cache.prefix_caching
    assert parse("--port", "1", env=env).server.port == 1
    names = {"DRUMLINE_SERVED_MODEL_NAME": "a,b"}
    assert parse(env=names).model.served_model_name == ("a", "b")


def test_a_bad_variable_is_named_and_an_unknown_one_refused():
    assert "DRUMLINE_PORT: 'x' is no whole number" in refusal(env={"DRUMLINE_PORT": "x"})
    told = refusal(env={"DRUMLINE_PROT": "1"})
    assert told == "DRUMLINE_PROT: unknown environment variable; did you mean DRUMLINE_PORT?"


def test_variables_of_other_verbs_are_passed_over():
    found = read_arguments(FLAGS, [])
    env = {"DRUMLINE_MAX_TOKENS": "3"}
    assemble(Serve, FLAGS, found, env, [variable_of(flag) for flag in settings_of(Generate)])


def test_a_file_is_read_flat_or_in_sections_and_flags_win_over_it(tmp_path):
    file = tmp_path / "drumline.toml"
    file.write_text('max-model-len = 512\nserved-model-name = ["m"]\n[server]\nport = 1\n')
    config = parse("--config", str(file), "--port", "2")
    assert config.model.max_model_len == 512
    assert config.model.served_model_name == ("m",)
    assert config.server.port == 2
    assert parse(env={"DRUMLINE_CONFIG": str(file)}).server.port == 1
    assert parse(f"--config={file}", env={"DRUMLINE_PORT": "3"}).server.port == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("port = [", "is not TOML"),
        ("prot = 1", "prot: unknown setting; did you mean port?"),
        ("[sever]\nport = 1", "[sever]: unknown section"),
        ("port = -1", "port: -1 will not do: expected `int` >= 0"),
    ],
)
def test_a_wrong_file_is_named_with_its_entry(tmp_path, text, told):
    file = tmp_path / "drumline.toml"
    file.write_text(text)
    message = refusal("--config", str(file))
    assert told in message
    assert str(file) in message


def test_a_missing_file_is_named():
    assert "cannot read /nowhere.toml" in refusal("--config", "/nowhere.toml")


def test_words_behind_two_dashes_and_a_lone_dash_are_positional():
    flags = settings_of(Generate)
    assert read_arguments(flags, ["-"]).positionals == ["-"]
    assert read_arguments(flags, ["--top-k", "-1", "--", "--port"]).positionals == ["--port"]


def test_every_setting_of_every_verb_can_be_converted():
    for verb in (Serve, Generate, Chat):
        for flag in settings_of(verb):
            with pytest.raises(ConfigError, match=flag.name):
                converted(flag.name, flag, object())


def test_help_names_every_flag_with_its_aliases_and_default():
    text = usage("serve", "Serve.", "[MODEL]", FLAGS)
    flowed = " ".join(text.split())
    for flag in FLAGS:
        assert flag.help, f"{flag.name} does not say what it does"
        for name in flag.names + flag.off:
            assert name in flowed
    assert "(default: 8000)" in flowed
    assert max(map(len, text.splitlines())) <= 100
