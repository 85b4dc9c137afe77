"""How long until an open page says that the cluster's head is dead, or that it hangs. Not part of ``make bench``.

``python -m tests.bench.dead_head`` opens the list of jobs and the page of a job in Chromium, and ends the head's process
(SIGKILL) or stops it (SIGSTOP). Goal: two seconds from its death.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress

import psutil
from playwright.sync_api import Browser, sync_playwright

from api.client import Client
from api.installation.up import Installation
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CLUSTER_MARKER
from tests.bench.crowd import job_document
from tests.bench.service import service, wait

ISLANDS = 4
SIGNS = ("does not answer", "did not list its node groups")
"""What the page says of a head whose process has ended, and of one that hangs."""
PICTURE_S, TIMEOUT_S = 4.0, 30.0
"""Seconds that a page gets to be complete, and that it has to say it."""
FAULTS = {"died": signal.SIGKILL, "hung": signal.SIGSTOP}


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed: deploy/system-packages.sh installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for fault, number in FAULTS.items():
            for view in ("list of jobs", "job's page"):
                with service() as (client, installation):
                    after_s = seconds_until_told(browser, client, installation, view != "list of jobs", number)
                print(f"dead-head  the head {fault}: the {view} says so after {after_s:.2f} s", flush=True)


def seconds_until_told(
    browser: Browser, client: Client, installation: Installation, job_page: bool, number: signal.Signals
) -> float:
    """Return the seconds from the signal to the head's process until the page shows that the head does not answer."""
    job = client.submit(job_document(ISLANDS)).job
    wait(lambda: client.job(job).islands_training == ISLANDS and client.job(job).global_version, "the job trains")
    address = installation.home.address()
    assert address is not None
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto(address.url)
    page.get_by_label("Token").fill(str(installation.home.token()))
    page.keyboard.press("Enter")
    page.wait_for_timeout(PICTURE_S * 1e3)
    if job_page:
        page.goto(f"{address.url}/#{job}")
        page.wait_for_timeout(PICTURE_S * 1e3)
    head = _head(installation)
    began = time.monotonic()
    os.kill(head, number)
    try:
        wait(lambda: any(sign in page.inner_text("body") for sign in SIGNS), "the page says so", TIMEOUT_S)
        return time.monotonic() - began
    finally:
        page.close()
        if number is signal.SIGSTOP:
            os.kill(head, signal.SIGCONT)


def _head(installation: Installation) -> int:
    cluster = ClusterFile.find(installation.home.path)
    assert cluster is not None
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == "gcs_server" and process.environ().get(CLUSTER_MARKER) == cluster.id:
                return process.pid
    raise RuntimeError("the cluster has no head")


if __name__ == "__main__":
    main()
