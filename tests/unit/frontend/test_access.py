"""Keys: which routes they open, where they are read from, and what they never show."""

import pytest
from openai import AsyncOpenAI, AuthenticationError
from tests.fakes.http import routes_of, run, served

from drumline.cli.env import show_environment
from drumline.core.config import ServerConfig
from drumline.core.errors import ConfigError
from drumline.frontend.access import Access, Keys
from drumline.frontend.serve import check

OPEN = ["/health", "/metrics", "/version"]
GUARDED = ["/v1/models", "/v1/models/tiny"]


def local(**settings) -> ServerConfig:
    return ServerConfig(host="127.0.0.1", port=0, **settings)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@run
async def test_without_keys_everybody_is_served(embedded):
    async with served(embedded, server=local()) as it:
        for path in OPEN + GUARDED:
            assert (await it.http.get(path)).status_code == 200
        assert (await it.chat(headers=bearer("any"))).status_code == 200


@run
async def test_a_key_opens_the_routes_of_clients_and_probes_need_none(embedded):
    async with served(embedded, server=local(api_key=("one", "two"))) as it:
        for path in OPEN:
            assert (await it.http.get(path)).status_code == 200
        for path in GUARDED:
            for key, status in (("one", 200), ("two", 200), ("-", 401), ("one2", 401)):
                assert (await it.http.get(path, headers=bearer(key))).status_code == status
        assert (await it.chat()).status_code == 401
        assert (await it.chat(headers={"X-Api-Key": "two"})).status_code == 200
        assert not it.fake.requests[1:]


@run
async def test_a_refusal_says_what_is_missing_and_has_the_requests_id(embedded):
    async with served(embedded, server=local(api_key=("one",))) as it:
        for headers, code in (({}, "missing_api_key"), (bearer("x"), "invalid_api_key")):
            refused = await it.chat(headers=headers | {"X-Request-Id": "mine"})
            error = refused.json()["error"]
            assert (refused.status_code, error["type"]) == (401, "authentication_error")
            assert error["code"] == code
            assert refused.headers["x-request-id"] == "mine"
            assert refused.headers["www-authenticate"] == "Bearer"


@run
async def test_the_official_client_is_told_in_its_own_words(embedded):
    async with served(embedded, server=local(api_key=("one",))) as it:
        for key, opens in (("one", True), ("two", False)):
            async with AsyncOpenAI(base_url=f"{it.url}/v1", api_key=key) as client:
                if opens:
                    assert [model.id async for model in client.models.list()] == ["tiny"]
                else:
                    with pytest.raises(AuthenticationError):
                        await client.models.list()


@pytest.mark.parametrize(
    ("clients", "operators", "opened"),
    [
        ((), (), {Access.OPEN: "-co", Access.CLIENT: "-co", Access.CONTROL: "-co"}),
        (("c",), (), {Access.OPEN: "-co", Access.CLIENT: "c", Access.CONTROL: "c"}),
        ((), ("o",), {Access.OPEN: "-co", Access.CLIENT: "-co", Access.CONTROL: "o"}),
        (("c",), ("o",), {Access.OPEN: "-co", Access.CLIENT: "co", Access.CONTROL: "o"}),
    ],
)
@run
async def test_each_class_of_route_is_opened_by_its_keys(clients, operators, opened):
    keys = Keys(clients, operators)

    async def app(scope, receive, send):
        passed.append(scope)

    async def send(message):
        if message["type"] == "http.response.start":
            refused.append(message["status"])

    for access, opening in opened.items():
        for key in "-co":
            passed, refused = [], []
            headers = [] if key == "-" else [(b"authorization", f"bearer {key}".encode())]
            scope = {"type": "http", "path": "/x", "headers": headers}
            await keys.guarded(access, app)(scope, None, send)
            assert bool(passed) == (key in opening), (access, key)
            assert bool(refused) != bool(passed)
            if access is Access.CONTROL and key == "c" and operators and clients:
                assert refused == [403]


@run
async def test_keys_come_from_a_file_too(embedded, tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the team\none\n\n  two  \n")
    async with served(embedded, server=local(api_key=("zero",), api_key_file=str(path))) as it:
        for key, status in (("zero", 200), ("one", 200), ("two", 200), ("# of the team", 401)):
            assert (await it.http.get("/v1/models", headers=bearer(key))).status_code == status


@pytest.mark.parametrize(
    ("text", "complaint"), [(None, "No such file"), ("#\n\n", "no key"), ("a b\n", "ASCII")]
)
def test_a_file_without_usable_keys_is_refused_at_once(tmp_path, text, complaint):
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        check(local(api_key_file=str(path)))


def test_a_bug_report_shows_no_keys(monkeypatch, capsys):
    monkeypatch.setenv("DRUMLINE_API_KEY", "hush")
    monkeypatch.setenv("DRUMLINE_ADMIN_API_KEY", "hush")
    show_environment()
    said = capsys.readouterr().out
    assert "DRUMLINE_API_KEY=" in said
    assert "hush" not in said


def test_only_probes_and_the_document_are_open_and_what_changes_the_engine_is_the_operators(
    embedded,
):
    by_class = {access: set() for access in Access}
    for entry in routes_of(embedded):
        by_class[entry.access].add(entry.path)
    assert by_class[Access.OPEN] == {
        "/health", "/health_generate", "/liveness", "/ping", "/readiness", "/ready", "/metrics",
        "/version", "/openapi.json", "/docs",
    }  # fmt: skip
    assert by_class[Access.CONTROL] >= {"/abort_request", "/pause", "/resume", "/flush_cache"}
