"""What surrounds a request: probes, keys, body limits, methods, ids, error objects."""

from __future__ import annotations

import base64
import gzip
from typing import Any

import aiohttp
import pytest

from rtp.io import http_auth
from rtp.io.http_server import KEEPALIVE_S, make_runner
from tests.support.scripted_frontend import ScriptedFrontend, an_api, fails, says


def no_workers() -> dict[str, Any]:
    return {"workers": [{"worker_id": "w", "state": "lost", "ranks": []}]}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients count as coming from another machine."""
    monkeypatch.setattr(http_auth, "_is_loopback", lambda host: False)


async def test_o12_health_is_open_cheap_and_has_a_head(outside: None):
    async with an_api(api_key="k") as api:
        assert await api.get("/health") == (200, {"status": "ready"})
        assert await api.get("/live") == (200, {"status": "alive"})
        async with api.session.head(api.url + "/health") as reply:
            assert (reply.status, await reply.read()) == (200, b"")


async def test_the_root_leads_browsers_to_the_dashboard_and_lists_the_routes_for_others():
    async with an_api(api_key="good") as api:
        browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
        async with api.session.get(api.url, headers=browser, allow_redirects=False) as reply:
            assert (reply.status, reply.headers["Location"]) == (302, "/dashboard")
        status, listed = await api.get("/")
    assert status == 200
    assert {"/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(listed["routes"])


async def test_o01_health_is_503_without_a_ready_worker_and_live_is_not():
    async with an_api(overview=no_workers) as api:
        async with api.session.get(api.url + "/health") as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
            assert (await reply.json())["error"]["code"] == "service_unavailable"
        assert (await api.get("/live"))[0] == 200


async def test_a04_no_worker_yet_is_503_and_bad_fields_are_still_400():
    frontend = ScriptedFrontend(says("x"))
    frontend.models = {}
    async with an_api(frontend=frontend) as api:
        error = await api.refused(status=503, prompt="a", model="toy")
        assert error["code"] == "service_unavailable"
        assert (await api.refused(prompt="a", n=0))["param"] == "n"
        assert await api.get("/v1/models") == (200, {"object": "list", "data": []})


async def test_keys_open_the_model_routes():
    async with an_api(says("x"), api_key="good", tenants={"other": "acme"}) as api:
        for headers in ({}, {"Authorization": "Bearer bad"}, {"Authorization": "good"}):
            status, reply = await api.post("/v1/completions", {"prompt": "a"}, **headers)
            assert status == 401
            assert reply["error"]["type"] == "authentication_error"
            assert reply["error"]["code"] == "invalid_api_key"
            assert (await api.get("/v1/models", **headers))[0] == 401
            assert (await api.post("/tokenize", {"prompt": "a"}, **headers))[0] == 401
        for key in ("good", "other"):
            bearer = {"Authorization": f"Bearer {key}"}
            assert (await api.post("/v1/completions", {"prompt": "a"}, **bearer))[0] == 200
            assert (await api.get("/v1/models", **bearer))[0] == 200
        one, other = api.frontend.begins
    assert (one.tenant, other.tenant) == ("", "acme")
    assert one.namespace != other.namespace
    assert one.namespace[0] == 1  # sha256 where tenants share the cache


ADMIN = ["/dashboard", "/dashboard/data.json", "/v1/requests/x/placement"]


async def test_admin_routes_are_open_on_loopback_only():
    options: dict[str, Any] = {"placement": lambda i: {"id": i}, "api_key": "k"}
    async with an_api(admin_key="root", **options) as api:
        for path in [*ADMIN, "/metrics"]:
            assert (await api.get(path))[0] == 200
            # A proxy on this machine speaks for others; a foreign name may be a rebound one.
            assert (await api.get(path, **{"X-Forwarded-For": "1.2.3.4"}))[0] == 401
            assert (await api.get(path, Host="evil.example"))[0] == 401


async def test_admin_routes_off_loopback_want_the_admin_key(outside: None):
    basic = "Basic " + base64.b64encode(b"me:root").decode()
    options: dict[str, Any] = {"placement": lambda i: {"id": i}, "api_key": "k"}
    async with an_api(admin_key="root", **options) as api:
        for path in ADMIN:
            for given in ("", "Bearer k", "Bearer x", "Basic !!"):
                assert (await api.get(path, Authorization=given))[0] == 401
            for given in ("Bearer root", basic):
                assert (await api.get(path, Authorization=given))[0] == 200
        assert (await api.get("/metrics"))[0] == 401
        for given in ("Bearer k", "Bearer root"):
            assert (await api.get("/metrics", Authorization=given))[0] == 200
    async with an_api() as api:
        for path in [*ADMIN, "/metrics"]:
            assert (await api.get(path, Authorization="Bearer root"))[0] == 401


async def test_o08_bodies_over_the_limit_are_refused_counted_and_named():
    async with an_api(says("x"), max_body_bytes=1000) as api:
        at_limit = b'{"prompt":"a"}'.ljust(1000)
        for body, status in ((at_limit, 200), (at_limit + b" ", 413)):
            kind = {"Content-Type": "application/json"}
            post = api.session.post(api.url + "/v1/completions", data=body, headers=kind)
            async with post as reply:
                assert reply.status == status
                answer = await reply.json()
        assert answer["error"]["code"] == "body_too_large"
        assert "1000" in answer["error"]["message"]

        async def unsized() -> Any:
            for _ in range(30):
                yield b" " * 100

        packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        for data, headers in ((unsized(), kind), (gzip.compress(b" " * 5000), packed)):
            post = api.session.post(api.url + "/v1/completions", data=data, headers=headers)
            async with post as reply:
                assert reply.status == 413
        assert "rtp_bodies_too_large_total 3.0" in api.metrics.text().decode()


async def test_v18_bodies_that_are_no_object():
    async with an_api(says("x")) as api:
        for data, kind, status in [
            (b"", "application/json", 400),
            (b"{", "application/json", 400),
            (b"[]", "application/json", 400),
            (b"null", "application/json", 400),
            (b'{"prompt":"a"}', "text/plain", 415),
            (b'{"prompt":"a"}', "application/x-www-form-urlencoded", 415),
            (b'{"prompt":"a"}', "application/json; charset=utf-8", 200),
        ]:
            headers = {"Content-Type": kind}
            post = api.session.post(api.url + "/v1/completions", data=data, headers=headers)
            async with post as reply:
                assert reply.status == status, (data, kind)
                assert ("error" in await reply.json()) == (status != 200)


async def test_unknown_routes_and_methods_have_error_objects():
    async with an_api() as api:
        assert set((await api.get("/nope"))[1]["error"]) == {"message", "type", "param", "code"}
        async with api.session.get(api.url + "/v1/completions") as reply:
            assert (reply.status, reply.headers["Allow"]) == (405, "POST")
            assert (await reply.json())["error"]["type"] == "invalid_request_error"


async def test_a_request_id_is_echoed_and_never_a_key():
    async with an_api(says("x")) as api:
        for given, same in (("abc-1", True), ("x" * 300, False), (None, False)):
            headers = {"X-Request-Id": given} if given else {}
            for stream in (False, True):
                body = {"prompt": "a", "stream": stream}
                url = api.url + "/v1/completions"
                async with api.session.post(url, json=body, headers=headers) as reply:
                    assert (reply.headers["X-Request-Id"] == given) == same
                    assert reply.headers["X-Request-Id"]
        assert len({begin.request_id for begin in api.frontend.begins}) == 6


async def test_deadlines_come_from_body_or_header_and_are_capped():
    async with an_api(says("x"), max_timeout_s=100) as api:
        for header, body in (("7", {}), ("7", {"timeout_s": 3}), ("1e9", {}), (None, {})):
            headers = {"X-Request-Timeout": header} if header else {}
            status, _ = await api.post("/v1/completions", {"prompt": "a"} | body, **headers)
            assert status == 200
        for bad in ("0", "-1", "nan", "inf", "soon"):
            headers = {"X-Request-Timeout": bad}
            status, reply = await api.post("/v1/completions", {"prompt": "a"}, **headers)
            assert (status, reply["error"]["param"]) == (400, "X-Request-Timeout")
        await api.complete(ttft_timeout_s=1.5)
        assert [b.timeout_s for b in api.frontend.begins] == [7, 3, 100, 100, 100]
        assert api.frontend.begins[-1].ttft_timeout_s == 1.5


@pytest.mark.parametrize(
    ("status", "code", "retry"), [(429, "rate_limit_exceeded", "2"), (504, "timeout", None)]
)
async def test_a_refusal_keeps_its_status_code_and_retry_after(status, code, retry):
    async with (
        an_api(fails(status, code, "because")) as api,
        api.session.post(api.url + "/v1/completions", json={"prompt": "a"}) as reply,
    ):
        assert (reply.status, reply.headers.get("Retry-After")) == (status, retry)
        assert (await reply.json())["error"]["code"] == code


async def test_o11_a_bug_shows_nothing_of_the_inside():
    def script(begin: object) -> Any:
        raise RuntimeError("peer 10.0.0.7:5000 rank 3 /srv/secret.py")

    async with an_api(script) as api:
        error = await api.refused(status=500, prompt="a")
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert not any(word in error["message"] for word in ("10.0", "secret", "rank", "Traceback"))


async def test_o07_connections_outlive_the_pools_of_clients():
    async with an_api(says("x")) as api:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            for path, status in (
                ("/v1/completions", 200),
                ("/nope", 404),
                ("/v1/completions", 200),
            ):
                async with session.post(api.url + path, json={"prompt": "a"}) as reply:
                    assert reply.status == status
                    assert reply.headers.get("Connection") != "close"
    runner = make_runner(aiohttp.web.Application())
    await runner.setup()
    assert runner.server is not None
    assert runner.server().keepalive_timeout == KEEPALIVE_S >= 600
    await runner.cleanup()


async def test_placement_is_found_by_reply_id():
    known = {"cmpl-1": {"chosen": {"worker_id": "w"}}}
    async with an_api(placement=known.get) as api:
        assert await api.get("/v1/requests/cmpl-1/placement") == (200, known["cmpl-1"])
        assert (await api.get("/v1/requests/cmpl-2/placement"))[0] == 404


async def test_the_dashboard_is_one_page_and_one_json():
    async with an_api(says("hey")) as api:
        await api.complete()
        status, page = await api.get("/dashboard")
        data = (await api.get("/dashboard/data.json"))[1]
    assert status == 200
    assert "<!doctype html>" in page.lower()
    assert data["overview"]["workers"][0]["worker_id"] == "w"
    assert data["recent"]["ttft_ms"]["p50"] is not None
