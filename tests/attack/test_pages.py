"""What a browser is shown and told: nothing of others, nothing to keep, nothing to run."""

from __future__ import annotations

import re

import httpx
import pytest

from api.auth.permissions import OPEN
from tests.api.installation import Installation
from tests.web.test_files import static_paths

OURS = {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", sorted(OPEN))
def test_no_open_page_loads_or_names_anything_of_another_host(service: Installation, path: str) -> None:
    with service.http("") as http:
        pages = [http.get(path)]
        pages += [http.get(file) for file in static_paths(pages[0].text)]
    for page in pages:
        assert page.status_code == 200
        assert set(re.findall(r"https?://[^\s\"'<>)]+", page.text)) <= OURS
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy


def test_the_reference_runs_no_script_and_says_every_operation(service: Installation) -> None:
    with service.http("") as http:
        page, document = http.get("/docs").text, http.get("/openapi.json").json()
        assert http.get("/redoc").status_code == 401
        assert http.get("/docs/oauth2-redirect").status_code == 401
    assert "<script" not in page
    assert " on" not in re.sub(r">[^<]*<", "><", page), "no attribute that runs anything"
    for path, operations in document["paths"].items():
        assert f"<code>{path}</code>" in page
        for operation in operations.values():
            assert operation["summary"] in page
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in page
    assert len(static_paths(page)) == 3


def test_every_answer_has_the_headers_and_what_a_token_was_shown_for_is_not_kept(service: Installation) -> None:
    with service.client() as client:
        job = client.submit(service.spec(steps=1)).job
        client.wait(job)
    with service.http() as http:
        answers: list[httpx.Response] = [
            http.get(path) for path in ("/v1/jobs", f"/v1/jobs/{job}", "/v1/nothing", "/metrics")
        ]
        tag = answers[1].headers["etag"]
        answers.append(http.get(f"/v1/jobs/{job}", headers={"If-None-Match": tag}))
        answers += [
            http.get(f"/v1/jobs/{job}/{name}") for name in ("events", "tape", "report", "report.html", "parameters")
        ]
        answers.append(http.post("/v1/tokens", json={"name": "seen", "role": "viewer"}))
        answers.append(http.delete("/v1/jobs"))
        for answer in answers:
            assert answer.headers["cache-control"] == "no-store", answer.url
        report = answers[8].headers["content-security-policy"]
        assert "sandbox" in report
        assert "script-src" not in report, "default-src 'none' holds for scripts"
        answers += [http.get("/healthz"), http.get("/v1/jobs", headers={"Authorization": "none"})]
        answers.append(http.get("/", headers={"Host": "elsewhere.example"}))
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "server" not in answer.headers
        assert "strict-transport-security" not in answer.headers, "only over TLS"
