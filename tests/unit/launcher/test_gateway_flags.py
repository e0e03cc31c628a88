"""A gateway of somebody else's is started with the flags that make it a server of this engine."""

import importlib.util
from pathlib import Path

import pytest

from drumline.core.config import (
    ChatConfig,
    Config,
    FrontendConfig,
    Gateway,
    LoadBalance,
    ModelConfig,
    ParallelConfig,
    ReasoningParser,
    ServerConfig,
    ToolCallParser,
)
from drumline.core.errors import ConfigError
from drumline.core.model_files import find_model
from drumline.launcher.engine import Engine
from drumline.launcher.gateway import Gateway as Process
from drumline.launcher.gateway import _model_for, check_gateway


@pytest.fixture
def _installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def refusal(**sections):
    with pytest.raises(ConfigError) as caught:
        check_gateway(Config(**sections))
    return str(caught.value)


def test_a_gateway_that_is_not_installed_is_named_with_what_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal() == "--gateway: smg is not installed: pip install tokenspeed-smg"


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("sections", "flag"),
    [
        ({"server": ServerConfig(admin_api_key="x")}, "--admin-api-key"),
        ({"server": ServerConfig(unread_timeout=5.0)}, "--unread-timeout"),
        ({"server": ServerConfig(api_server_count=2)}, "--api-server-count"),
        ({"server": ServerConfig(api_key=("a", "b"))}, "--api-key"),
        ({"server": ServerConfig(api_key=("a",), api_key_file="f")}, "--api-key"),
        ({"chat": ChatConfig(tool_call_parser=ToolCallParser.NONE)}, "--tool-call-parser"),
        ({"chat": ChatConfig(reasoning_parser=ReasoningParser.NONE)}, "--reasoning-parser"),
        ({"chat": ChatConfig(chat_template="{{ messages }}")}, "--chat-template"),
        (
            {"parallel": ParallelConfig(load_balance_method=LoadBalance.PREFIX_AWARE)},
            "--load-balance-method",
        ),
    ],
)
def test_what_the_gateway_would_not_do_is_refused_by_its_flag(sections, flag):
    assert refusal(**sections).startswith(f"{flag}: ")


@pytest.mark.usefixtures("_installed")
def test_what_is_left_open_is_no_reason_to_refuse():
    check_gateway(Config())


def test_a_program_that_owns_an_engine_has_no_gateway():
    with pytest.raises(ConfigError, match="--gateway: leaves the ranks to another frontend"):
        Engine(Config(frontend=FrontendConfig(gateway=Gateway.SMG)), quiet=True)
    with pytest.raises(ConfigError, match="--headless: leaves the ranks to another frontend"):
        Engine(Config(frontend=FrontendConfig(headless=True)), quiet=True)


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def flags_of(model, **sections):
    config = Config(
        model=ModelConfig(model=str(model), served_model_name=("mine", "other")), **sections
    )
    process = Process(config, find_model(str(model)), 8123)
    try:
        return process, list(process._flags("mine"))
    finally:
        process._place.cleanup()


def after(flags, flag):
    return flags[flags.index(flag) + 1]


def test_aborts_are_not_retried_and_nothing_is_bound_beyond_what_was_named(model):
    process, flags = flags_of(model, parallel=ParallelConfig(data_parallel_size=3))
    assert {"--disable-retries", "--disable-circuit-breaker"} <= set(flags)
    assert after(flags, "--worker-urls") == process.handshake
    assert process.handshake.startswith("tcp://127.0.0.1:")
    assert after(flags, "--host") == after(flags, "--prometheus-host") == "127.0.0.1"
    assert after(flags, "--port") == "8123"
    assert after(flags, "--zmq-engine-count") == "3"
    assert after(flags, "--model-alias") == "other=mine"


def test_what_an_operator_chose_of_the_server_is_the_gateways(model, tmp_path):
    server = ServerConfig(
        host="0.0.0.0",
        ssl_certfile="cert.pem",
        max_body_bytes=77,
        max_concurrent_streams=5,
        request_timeout=1.5,
        allowed_origins=("https://a.example", "https://b.example"),
        api_key=("secret",),
    )
    process, flags = flags_of(model, server=server)
    assert after(flags, "--host") == "0.0.0.0"
    assert after(flags, "--tls-cert-path") == str(Path("cert.pem").absolute())
    assert after(flags, "--max-payload-size") == "77"
    assert after(flags, "--max-concurrent-requests") == "5"
    assert after(flags, "--request-timeout-secs") == "2"
    assert after(flags, "--cors-allowed-origins") == "https://a.example"
    assert "secret" not in flags
    assert process.url == "https://0.0.0.0:8123"


def test_a_model_is_served_under_its_name_wherever_it_lies(model, tmp_path):
    (tmp_path / "there").mkdir()
    place = tmp_path / "place"
    place.symlink_to("there")  # as directories for temporary files may be

    def placed(name):
        config = Config(model=ModelConfig(model=str(model), served_model_name=(name,)))
        return _model_for(config, find_model(str(model)), place)

    assert placed("owner/name") == "owner/name"
    assert (place / "owner/name/config.json").is_file()
    assert placed(str(model)) == str(model)
    with pytest.raises(ConfigError, match="is no name that --gateway can serve"):
        placed("../out")


def test_of_a_gguf_file_the_gateway_gets_tokenizer_and_template_as_files(tmp_path):
    files = find_model(None)
    config = Config(model=ModelConfig(served_model_name=(files.name,)))
    name = _model_for(config, files, tmp_path)
    assert name == files.name
    written = {path.name for path in (tmp_path / name).iterdir()}
    assert written == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    assert "im_start" in (tmp_path / name / "tokenizer_config.json").read_text()
