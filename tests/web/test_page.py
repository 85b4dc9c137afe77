"""The page in a real browser, before a real service: what is seen, what can be done, and by whom."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from api.auth.permissions import Role
from tests.waiting import wait_until
from tests.web.audit import faults
from tests.web.live import HEAD_IS_DEAD
from tests.web.visit import STILL, Site, Visit, card, each_look, sideways

TRAINING = re.compile(r"\bgood\b")
RED = "rgb(196, 57, 47)"
AWAY = re.compile(r"\bbad\b")


def confirm(page: Page, verb: str) -> None:
    page.get_by_role("dialog").get_by_role("button", name=verb, exact=True).click()


def test_a_stranger_is_asked_for_a_token_and_a_wrong_one_does_not_do(visit: Visit) -> None:
    page = visit.enter()
    field = page.get_by_label("Token")
    field.fill("atoll_wrong")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("dialog")).to_contain_text("does not accept this token")
    expect(field).to_have_value("")
    expect(page.locator("#islands")).to_be_hidden()
    field.fill(visit.site.tokens["viewer"])
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(visit.site.job)
    assert visit.complaints.pop().endswith("401 (Unauthorized)")
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]

    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("dialog")).to_contain_text("Sign in")
    page.keyboard.press("Escape")
    expect(page.get_by_role("alert")).to_contain_text("Sign in to see the jobs")


def test_a_token_revoked_while_its_holder_looks_shows_nothing_more(visit: Visit) -> None:
    with visit.site.client() as client:
        visit.site.tokens["brief"] = client.create_token("brief", Role.VIEWER).token
        page = visit.open("brief")
        client.revoke_token("brief")
    expect(page.get_by_role("dialog")).to_contain_text("expired or revoked")
    expect(page.get_by_role("heading", level=1)).to_have_text("Training jobs")
    expect(page.locator("#islands")).to_be_hidden()
    page.close()  # several requests were on their way, and each is refused
    assert all("401" in complaint for complaint in visit.complaints)
    visit.complaints.clear()


def test_nothing_is_said_to_be_absent_before_it_was_looked_for(visit: Visit) -> None:
    page = visit.enter()
    held: list[Route] = []
    page.route("**/commands", lambda route: held.append(route), times=1)
    visit.give_token(page, "viewer")
    for panel in ("#chaos", "#merges", "#commands"):
        expect(page.locator(panel)).to_contain_text("Loading…")
    while not held:  # it is said before anything is asked
        page.wait_for_timeout(20)
    held.pop().continue_()
    for panel in ("#chaos", "#merges", "#commands"):
        expect(page.locator(f"{panel} > .nothing", has_text="Loading…")).to_have_count(0)  # closed merges say so too
    expect(page.locator("#merges details").first).to_be_visible()


def test_picking_the_job_that_is_shown_takes_nothing_away(visit: Visit) -> None:
    page = visit.open()
    expect(page.locator("#merges details").first).to_be_visible()
    expect(page.get_by_label("Job", exact=True)).to_have_value(visit.site.job)  # its list arrives apart from the job
    page.evaluate(
        "() => new MutationObserver(() => document.querySelector('#merges details') || (window.emptied = true))"
        ".observe(document.querySelector('#merges'), {childList: true, subtree: true})"
    )
    with page.expect_response(lambda answer: "/events" in answer.url):  # it is followed anew
        page.get_by_label("Job", exact=True).dispatch_event("change")
    expect(page.locator("#live")).to_have_text("live")
    assert not page.evaluate("window.emptied")


def test_islands_and_figures_are_live_without_a_storm_of_requests(visit: Visit) -> None:
    page = visit.open()
    expect(page.locator("#live")).to_have_text("live")
    assert page.locator(".region h3").all_inner_texts() == ["us-east 2/2", "us-west 1/1", "europe 2/2", "asia 1/1"]
    expect(page.locator(".card.good")).to_have_count(6)
    page.evaluate("performance.clearResourceTimings()")
    version = page.locator(".tile", has_text="Global version").locator(".figure")
    focused = page.get_by_role("button", name="Drain us-east-1")
    focused.focus()
    for _ in range(3):
        expect(version).not_to_have_text(version.inner_text())
    expect(focused).to_be_focused()
    entries = "performance.getEntriesByType('resource')"  # by the browser's clock: ours hears of requests late
    asked_ms = page.evaluate(
        f"job => {entries}.filter(e => e.name.endsWith(job)).map(e => e.startTime)", visit.site.job
    )
    pauses_ms = [later - before for before, later in pairwise(asked_ms)]
    assert pauses_ms
    assert min(pauses_ms) > 900
    for title in ("Loss", "Where island time went", "Islands over time"):
        panel = page.locator("section", has=page.get_by_role("heading", name=title, exact=True))
        assert len(panel.get_by_role("img").get_attribute("aria-label") or "") > 20


def test_lines_codecs_and_what_they_owe_are_shown(visit: Visit) -> None:
    page = visit.open()
    panel = page.locator("#lines")
    expect(panel.get_by_role("heading", name="Lines and codecs")).to_be_visible()
    expect(panel).to_contain_text("Contributions are sent in int4, updates in int4.")
    rows = panel.get_by_role("row")
    expect(rows.filter(has_text="us-west")).to_contain_text("kB")
    expect(rows.filter(has_text="us-west")).to_contain_text("1 fragment, 100 kB")
    expect(panel.get_by_role("row", name="0 2.00 25.0 %")).to_be_visible()


def test_losses_by_source_and_what_was_amiss_with_the_text_are_shown(visit: Visit, pictures: Path) -> None:
    """The job of these tests has no text: its answer is given some on its way to the page."""
    sources = [
        {"source": name, "loss": 1.25 + number / 10, "bits_per_byte": 2.0 + number / 10}
        for number, name in enumerate(("web", "code", "a-source-with-quite-a-long-name", "books"))
    ]
    remark = (
        "3 records or pieces of files could not be read and were skipped, "
        "1,204 sequences were drawn a second time in the same epoch"
    )

    def with_text(route: Route) -> None:
        answer = route.fetch()
        job = answer.json()
        job["statistics"]["evaluations"] |= {"bits_per_byte": 2.061, "sources": sources}
        job["statistics"]["data_flaws"] = {"remark": remark, "islands": {}, "total": {}}
        route.fulfill(response=answer, json=job)

    for width, scheme in ((1280, "light"), (390, "dark")):
        page = visit.enter(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.route(f"**/v1/jobs/{visit.site.job}", with_text)
        visit.give_token(page, "viewer")
        panel = page.locator("section", has=page.get_by_role("heading", name="Loss", exact=True))
        rows = panel.get_by_role("row")
        expect(rows.filter(has_text="a-source-with-quite-a-long-name")).to_contain_text("1.450")
        expect(panel).to_contain_text("2.061 bits per byte")
        expect(panel).to_contain_text(f"Of the text, {remark}.")
        assert panel.evaluate("panel => panel.scrollWidth <= panel.clientWidth")
        panel.screenshot(path=pictures / f"losses-by-source-{width}.png")
        page.unroute_all(behavior="wait")


def test_of_a_crowd_those_that_need_no_eye_are_a_line_each_and_the_others_are_whole(
    visit: Visit, pictures: Path
) -> None:
    """The job of these tests has six islands: on its way to the page each becomes eleven, and one of them is lost."""

    def crowded(route: Route) -> None:
        answer = route.fetch()
        job = answer.json()
        names = [f"{island['island']}-{n}" for island in job["islands"] for n in range(11)]
        job["islands"] = [dict(island) for island in job["islands"] for _ in range(11)]
        for island, name in zip(job["islands"], names, strict=True):
            island["island"] = name
        job["islands"][3] |= {"state": "lost", "reason": "its process is dead", "hosts": 4, "mesh": {"fsdp": 16}}
        spans = job["statistics"]["timeline"]
        job["statistics"]["timeline"] = [[f"{span[0]}-{n}", *span[1:]] for span in spans for n in range(11)]
        route.fulfill(response=answer, json=job)

    for width, scheme in ((1280, "light"), (390, "dark")):
        page = visit.enter(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
        page.route(f"**/v1/jobs/{visit.site.job}", crowded)
        visit.give_token(page, "operator")
        expect(page.locator(".card")).to_have_count(66)
        expect(card(page, "us-east-0-3").get_by_text("its process is dead")).to_be_visible()
        expect(card(page, "us-east-0-3").get_by_text("4: fsdp 16")).to_be_visible()
        calm = card(page, "us-east-0-4")
        expect(calm).to_be_hidden()
        region = page.get_by_role("group", name="us-east")
        expect(region.locator("summary").first).to_contain_text("us-east 21/22")
        expect(region.locator(".counts")).to_contain_text("1 lost")
        assert page.locator("#islands").bounding_box()["height"] < 900, "a line for each region"
        page.screenshot(path=pictures / f"crowd-{width}.png", full_page=True)
        region.locator("summary").first.click()
        expect(calm.get_by_role("button", name="Drain us-east-0-4")).to_be_hidden()
        calm.locator("summary").click()
        expect(calm.get_by_role("button", name="Drain us-east-0-4")).to_be_visible()
        expect(page.get_by_text("The other 60 lines")).to_be_visible()
        assert sideways(page) == 0
        assert faults(page) == []
        page.unroute_all(behavior="wait")


def test_where_jobs_cannot_be_listed_none_is_said_to_be_absent_until_they_can(visit: Visit) -> None:
    page = visit.enter("")
    problem = {"type": "urn:atoll:problem:store", "title": "Store", "status": 503, "detail": "The disk is full."}
    page.route("**/v1/jobs", lambda route: route.fulfill(status=503, json=problem))
    page.get_by_label("Token").fill(visit.site.tokens["operator"])
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The disk is full.")
    expect(page.get_by_label("Job", exact=True)).to_contain_text("loading jobs")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    page.unroute_all(behavior="wait")
    expect(page.get_by_role("row", name=visit.site.job)).to_be_visible()
    expect(page.get_by_role("alert")).to_be_empty()
    visit.complaints.clear()  # the console tells of the answer that was 503


def test_a_killed_island_turns_red_and_green_again(visit: Visit) -> None:
    page = visit.open()
    for island in ("asia", "us-west", "europe-0"):
        page.get_by_role("button", name=f"Kill {island}").click()
        expect(page.get_by_role("dialog")).to_contain_text("SIGKILL")
        confirm(page, "Kill")
        expect(card(page, island)).to_have_class(AWAY)
        expect(page.locator("#announcer")).to_contain_text(f"{island} is lost")
        expect(card(page, island)).to_have_css("border-top-color", RED)
        expect(page.locator("#toast")).to_contain_text("accepted")
        expect(page.locator("#commands tbody tr").first).to_contain_text("operator-rosa")
        expect(card(page, island)).to_have_class(TRAINING)
        expect(page.locator("#announcer")).to_contain_text(f"{island} is training")


def test_a_lost_island_stays_red_until_it_holds_a_state_again(visit: Visit) -> None:
    """A loss may be shorter than the time between two looks; what follows it must tell of it."""
    page = visit.enter()
    tones = page.evaluate(
        """async () => {
            const { looks } = await import(document.querySelector("script").src.replace("main.js", "words.js"));
            const tone = (state, incarnation) => looks({ state, incarnation }).tone;
            const states = ["lost", "placing", "starting", "catching_up", "training", "not known to this page"];
            return states.map((state) => [tone(state, 1), tone(state, 2)]);
        }"""
    )
    assert tones == [["bad", "bad"], ["busy", "bad"], ["busy", "bad"], ["busy"] * 2, ["good"] * 2, ["calm"] * 2]


def test_large_figures_have_no_exponent(visit: Visit) -> None:
    page = visit.enter()
    shown = page.evaluate(
        """async () => {
            const words = await import(document.querySelector("script").src.replace("main.js", "words.js"));
            return [words.rate, words.significant].map((show) => [0.0123456, 20.25, 999.9, 20712.4, null].map(show));
        }"""
    )
    assert shown == [["0.0123", "20.3", "1,000", "20,700", "–"], ["0.0123", "20.3", "1,000", "20,700", "–"]]


def test_islands_kept_away_or_drained_can_be_added_again(visit: Visit) -> None:
    page = visit.open()
    page.get_by_role("button", name="Kill us-west").click()
    page.get_by_label("Do not place it again").check()
    confirm(page, "Kill")
    page.get_by_role("button", name="Drain europe-0").click()
    confirm(page, "Drain")
    expect(card(page, "us-west")).to_contain_text("stopped")
    expect(card(page, "europe-0")).to_contain_text("drained")
    for island in ("us-west", "europe-0"):
        page.get_by_role("button", name=f"Re-add {island}").click()
        confirm(page, "Re-add")
        expect(card(page, island)).to_have_class(TRAINING)


def test_chaos_freezes_an_island_for_as_long_as_is_said(visit: Visit) -> None:
    page = visit.open()
    page.get_by_role("button", name="Freeze us-east-0").click()
    page.get_by_label("Seconds").fill("2")
    with page.expect_request("**/chaos/faults") as asked:
        confirm(page, "Freeze")
    assert asked.value.post_data_json == {"kind": "stop", "island": "us-east-0", "duration_s": 2}
    expect(page.locator("#toast")).to_contain_text("freeze us-east-0: accepted", ignore_case=True)


def test_a_merge_tells_its_story_and_stays_while_it_is_read(visit: Visit) -> None:
    page = visit.open("viewer")
    rows = page.locator("#merges details")
    expect(rows).to_have_count(8)
    row = rows.nth(2)
    version = page.locator(".tile", has_text="Global version").locator(".figure")
    row.hover()  # they stand still now, once a look that was under way is drawn
    for _ in range(2):
        expect(version).not_to_have_text(version.inner_text())
    name = row.get_attribute("data-merge")
    row.locator("summary").press("Enter")
    mine = page.locator(f"[data-merge='{name}']")
    expect(mine).to_contain_text("Quorum of 3")  # half of the six that train
    islands = mine.locator("tbody tr").count()
    assert 0 < islands <= 6
    expect(mine.locator("summary")).to_contain_text(f"{islands} of 6 islands")
    still = rows.evaluate_all("all => all.map(row => row.dataset.merge)")
    expect(version).not_to_have_text(version.inner_text())
    assert rows.evaluate_all("all => all.map(row => row.dataset.merge)") == still
    page.mouse.move(0, 0)
    page.get_by_label("Job", exact=True).focus()
    expect(rows.first).not_to_have_attribute("data-merge", rows.first.get_attribute("data-merge") or "")
    expect(mine).to_be_attached()
    expect(mine).to_have_attribute("open", "")
    assert page.locator("#merges details").count() >= 8


def test_a_question_that_is_not_confirmed_asks_nothing_of_the_job(visit: Visit) -> None:
    page = visit.open()
    changes: list[str] = []
    page.on("request", lambda request: request.method != "GET" and changes.append(request.url))
    button = page.get_by_role("button", name="Kill europe-0")
    button.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(button).to_be_focused()
    button.click()
    confirm(page, "Cancel")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert changes == []


def test_a_viewer_sees_everything_and_can_change_nothing(visit: Visit) -> None:
    page = visit.open("viewer")
    expect(page.locator(".card")).to_have_count(6)
    assert page.get_by_role("button").all_inner_texts() == ["Sign out"]


def test_a_broken_stream_is_taken_up_after_the_last_event_read(visit: Visit) -> None:
    asked: list[str | None] = []

    def break_off(route: Route) -> None:
        asked.append(route.request.headers.get("last-event-id"))
        if len(asked) > 1:
            route.continue_()
            return
        body = 'id: 7\r\nevent: record\r\ndata: {"n":7,"event":{"type":"TimerFired"},"effects":[]}\r\n\r\n: cut'
        route.fulfill(content_type="text/event-stream", body=body)

    page = visit.enter()
    page.route("**/events?*", break_off)
    page.evaluate(
        """() => {
            const live = document.querySelector("#live");
            window.shown = [];
            const look = () => window.shown.push(live.textContent);
            new MutationObserver(look).observe(live, { childList: true, characterData: true, subtree: true });
        }"""
    )
    visit.give_token(page, "viewer")
    page.wait_for_function("window.shown.includes('reconnecting')")
    expect(page.locator("#live")).to_have_text("live")
    assert asked == [None, "7"]


def test_it_goes_on_without_a_stream_and_says_so(visit: Visit) -> None:
    page = visit.enter()
    page.route("**/events?*", lambda route: route.fulfill(content_type="text/event-stream", body=""))
    visit.give_token(page, "viewer")
    expect(page.locator("#live")).to_have_text("reconnecting")
    version = page.locator(".tile", has_text="Global version").locator(".figure")
    expect(version).not_to_have_text(version.inner_text())


def test_another_job_can_be_picked_and_an_ended_one_is_shown_as_it_ended(visit: Visit, site: Site) -> None:
    with site.client() as client:
        ended = site.submit(client, name="short", steps=4)
    page = visit.open()
    picker = page.get_by_label("Job", exact=True)
    expect(picker.locator("option").nth(1)).to_contain_text(ended)
    picker.select_option(ended)
    expect(page.get_by_role("heading", level=1)).to_have_text(ended)
    expect(page.locator("#headline .badge")).to_have_text("completed")
    expect(page.locator("#live")).to_have_text("ended")
    expect(page.locator("#islands .card").first).to_contain_text(re.compile("at the end|before the end|never"))
    expect(page.locator("main")).not_to_contain_text(re.compile("just now| ago\\b"))
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download the report").click()
    assert ended in saved.value.path().read_text()
    expect(page.get_by_role("button")).to_have_count(2)
    picker.select_option(site.job)
    expect(page.get_by_role("heading", level=1)).to_have_text(site.job)
    expect(page).to_have_url(f"{site.url}/#{site.job}")
    compare(page, ended)


def test_jobs_of_one_name_are_a_table_of_settings_beside_results(visit: Visit, site: Site, pictures: Path) -> None:
    rates = {5e-4: "0.0005", 2e-3: "0.002", 1e-3: "0.001"}
    with site.client() as client:
        jobs = {
            site.submit(
                client, name="sweep", steps=4, training={"batch_size": 8, "inner_optimizer": {"lr": rate}}
            ): words
            for rate, words in rates.items()
        }
        table = {row["job"]: row for row in client.compare([client.wait(job) for job in jobs])}
    page = visit.open(address="", **STILL)
    panel = page.locator("#sweep")
    expect(panel.locator("table")).to_have_count(0)
    panel.get_by_label("Name").select_option("sweep")
    rows = panel.locator("tbody tr")
    expect(rows).to_have_count(3)
    assert panel.locator("thead th").all_inner_texts()[2] == "lr", "the only setting in which they differ"
    for job, words in jobs.items():
        row = panel.locator(f"tr[data-key='{job}']")
        expect(row.locator("[data-head=lr]")).to_have_text(words)
        expect(row.locator("[data-head=Loss]")).to_have_text(f"{table[job]['loss']:.3f}")
    expect(panel.get_by_role("columnheader", name="Loss")).to_have_attribute("aria-sort", "ascending")
    lr = panel.get_by_role("button", name="lr")
    lr.focus()
    for key, order in (("Enter", sorted(jobs, key=lambda job: float(jobs[job]))), ("Space", None)):
        page.keyboard.press(key)
        expect(rows.nth(0)).to_have_attribute("data-key", (order or [max(jobs, key=lambda job: float(jobs[job]))])[0])
    expect(panel.get_by_role("columnheader", name="lr")).to_have_attribute("aria-sort", "descending")
    expect(lr).to_be_focused()
    for look in each_look(page):
        panel.screenshot(path=pictures / f"sweep-{look}.png")
        assert faults(page) == [], look
        assert sideways(page) == 0, look
    panel.get_by_role("link").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(max(jobs, key=lambda job: float(jobs[job])))


def test_the_page_opens_on_all_jobs_and_each_has_an_address(visit: Visit, site: Site) -> None:
    with site.client() as client:
        ended = site.submit(client, name="short", steps=4)
        waiting = client.submit(site.installation.spec(name="waits", islands=[{"node_group": "asia", "cpus": 4}])).job
        try:
            page = visit.open(address="", **STILL)
            running = page.get_by_role("row", name=site.job)
            expect(running).to_contain_text("running")
            expect(running).to_contain_text(re.compile(r"just now|\d+ s ago"))  # its last merge
            expect(running.locator("[data-head='Time left']")).to_contain_text(re.compile(r"\d (s|min|h)$"))
            expect(page.get_by_role("row", name=ended)).to_contain_text("completed")
            expect(page.locator("#problems")).to_contain_text("no problems")
            expect(page.get_by_role("row", name="us-east")).to_contain_text("accepts islands")
            expect(page.locator("#nodes")).to_contain_text("Free on the service's disks")
            queue = page.locator("#queue li")
            expect(queue).to_contain_text(f"1. {waiting}")
            queue.get_by_role("button", name="Priority").click()
            page.get_by_role("spinbutton", name="Priority").fill("7")
            confirm(page, "Change")
            expect(queue).to_contain_text("priority 7")
            queue.get_by_role("link", name=waiting).click()
            expect(page.get_by_role("heading", level=1)).to_have_text(waiting)
            expect(page).to_have_url(f"{site.url}/#{waiting}")
            expect(page.locator("#islands .card")).to_have_count(1)
            expect(page.get_by_role("button", name=re.compile("Kill|Scale"))).to_have_count(0)
            expect(page.locator("#lines")).to_be_hidden()
            page.go_back()
            expect(queue).to_be_visible()
            expect(page.locator("#islands")).to_be_hidden()
            queue.get_by_role("button", name="Cancel").click()
            confirm(page, "Cancel the job")
            expect(page.get_by_role("row", name=waiting)).to_contain_text("cancelled")
            expect(page.locator("#queue")).to_be_hidden()
            assert client.job(waiting).state == "cancelled"
        finally:
            if not client.job(waiting).state.final:
                client.cancel(waiting)


def test_with_a_dead_head_the_page_says_so_and_shows_what_is_known(visit: Visit, site: Site, pictures: Path) -> None:
    page = visit.open("viewer", "")
    version = page.get_by_role("row", name=site.job).locator("[data-head='Version']")
    assert re.search(r"\d", version.inner_text())
    assert page.get_by_role("button").all_inner_texts() == ["Sign out"]
    dead = site.installation.home.path / HEAD_IS_DEAD
    dead.touch()
    try:
        page.reload()  # nothing of the jobs is known to this page any more
        expect(page.locator("#cluster")).to_contain_text("did not list its node groups")
        expect(page.locator("#problems")).to_contain_text("The cluster")
        expect(page.get_by_role("row", name=site.job)).to_contain_text("silent")
        expect(version).to_contain_text(re.compile(r"\d"))
        expect(page.locator("#nodes")).to_contain_text("Unknown: the cluster does not answer.")
        page.screenshot(path=pictures / "dead-head.png", full_page=True)
        page.get_by_role("link", name=site.job).first.click()
        expect(page.locator("#headline")).to_contain_text("The figures below are the last known ones.")
    finally:
        dead.unlink()
    expect(page.locator("#cluster")).to_be_empty()
    expect(page.locator(".card.good")).to_have_count(6)
    visit.complaints.clear()  # the console tells of the answers that were 503


def test_a_failed_job_shows_what_it_reached_and_nothing_empty(visit: Visit, site: Site, pictures: Path) -> None:
    """A job that has ended is given the end of one that failed on its answer's way to the page."""
    with site.client() as client:
        ended = site.submit(client, name="short", steps=4)
        wait_until(lambda: client.job(ended).report_ready)

    def failed(route: Route) -> None:
        answer = route.fetch()
        job = answer.json()
        why = {"state": "failed", "reason": "its own code failed: no room", "pause_reason": "1 of 4 islands train"}
        job |= {**why, "statistics": {}, "goodput": {}, "loss_curve": [], "fragments": [], "last_known": True}
        for island in job["islands"]:
            island |= {"state": "lost", "reason": "", "line": None}
        job["islands"][0] |= {"state": "failed", "reason": "no room"}
        route.fulfill(response=answer, json=job)

    kept = {"number": 3, "url": "file:///3", "taken_at": 1.7e9, "after_s": 9.0, "global_version": 12}
    kept |= {"tokens_trained": 4096, "islands": ["asia"], "bytes": 1_200_000}
    page = visit.enter(ended, **STILL)
    page.route(f"**/v1/jobs/{ended}", failed)
    page.route("**/checkpoints", lambda route: route.fulfill(json={"checkpoints": [kept]}))
    for empty in ("merges?*", "commands"):
        page.route(f"**/{empty}", lambda route: route.fulfill(json={"merges": [], "commands": []}))
    visit.give_token(page, "operator")
    headline = page.locator("#headline")
    expect(headline).to_contain_text("What it reached")
    expect(headline.locator(".tile", has_text="Last checkpoint")).to_contain_text("version 12, 4.1 k tokens")
    expect(headline).not_to_contain_text("No fragment can merge")
    expect(page.locator(".card.bad")).to_have_count(1)
    expect(page.locator(".card", has_text="ended with the job")).to_have_count(5)
    expect(page.locator("main")).not_to_contain_text("no problem")
    assert page.locator("#job .panel:visible:not(.card, #diagnosis)").count() == 0
    expect(page.locator("#diagnosis")).to_contain_text("To do:")
    for look in each_look(page):
        page.screenshot(path=pictures / f"failed-{look}.png", full_page=True)
    assert faults(page) == []
    page.unroute_all(behavior="wait")


@pytest.mark.soak("a quarter of a minute of looks at four views")
def test_logs_checkpoints_events_and_settings_of_a_job_have_a_place_each(
    visit: Visit, site: Site, pictures: Path
) -> None:
    kept = {"number": 3, "url": "file:///3", "taken_at": 1.7e9, "after_s": 9.0, "global_version": 12}
    kept |= {"tokens_trained": 4096, "islands": ["asia"], "bytes": 1_200_000}
    page = visit.open(**STILL)
    with site.client() as client:
        client.kill(site.job, "asia")
    page.route("**/checkpoints", lambda route: route.fulfill(json={"checkpoints": [kept]}))
    part = page.locator("#inspection")
    for name, words in {
        "Logs": f"Follow it with atoll logs {site.job} synchroniser --follow",
        "Checkpoints": "4.1 k",
        "Events": "kill requested asia, caller local",
        "Settings": '"interval_steps": 8',
    }.items():
        page.get_by_role("link", name=name, exact=True).click()
        expect(page).to_have_url(f"{site.url}/#{site.job}/{name.lower()}")
        expect(part).to_contain_text(words)
        page.set_viewport_size({"width": 390, "height": 844})
        page.screenshot(path=pictures / f"{name.lower()}-phone.png", full_page=True)
        assert faults(page) == [], name
        assert sideways(page) == 0, name
        for value in part.locator(".facts dd").all():
            assert (value.bounding_box() or {})["height"] < 100, "a path is not cut into a column of pieces"
        page.set_viewport_size({"width": 1280, "height": 900})
        page.screenshot(path=pictures / f"{name.lower()}-desk.png", full_page=True)
    page.get_by_role("link", name="Logs", exact=True).click()
    part.get_by_label("Process").select_option("asia/1")
    expect(page).to_have_url(f"{site.url}/#{site.job}/logs/asia/1")
    expect(part.get_by_role("region", name="Log of asia")).to_contain_text("asia")
    page.get_by_role("link", name="Checkpoints", exact=True).click()
    with page.expect_request("**/rollback") as asked:
        part.get_by_role("button", name="Roll back to 3").click()
        confirm(page, "Roll back")
    assert asked.value.post_data_json == {"checkpoint": 3}
    page.unroute_all(behavior="wait")


def compare(page: Page, other: str) -> None:
    """By keyboard: the losses of another job are drawn beside those of the one that is shown, and taken away again."""
    panel = page.locator("#loss")
    expect(panel.locator("summary")).to_be_visible()  # the name of the job is there before its panels
    panel.locator("summary").focus()
    page.keyboard.press("Enter")
    panel.get_by_role("checkbox", name=other).focus()
    page.keyboard.press("Space")
    expect(panel.locator("path.beside-0")).to_have_count(1)
    expect(panel.locator(".legend")).to_contain_text(f"{other}: ")
    expect(panel.get_by_role("img")).to_have_attribute("aria-label", re.compile(re.escape(other)))
    page.keyboard.press("Space")
    expect(panel.locator("path.beside-0")).to_have_count(0)
