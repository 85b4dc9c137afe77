"""The reliable outbox of an island: its reports to its synchronisers, one after another, each with its epoch.

    put ──▶ UnreadReports ──read──▶ NumberedReports ──acknowledged──▶ forgotten
            joined while unread      read again until then

Unread reports are few, however long nobody reads: the service may be away for long, and the island never waits for it.
Reports that were read are numbered, and kept until the reader acknowledges that they are on the tape: an answer
lost on the way, or a reader that dies, loses nothing. A new epoch means that everything the last synchroniser only held in
memory is gone, so what still stands is reported again, offers under the numbers they had. A synchroniser of an older epoch
is fenced: it was replaced, and must neither read reports nor command.

Nothing here knows threads or calls (``learners.outbox`` does).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.core.messages import Flushed, IslandReport, Offer, Progress
from orchestrator.core.vocabulary import Epoch
from orchestrator.errors import Fenced

Numbered = list[tuple[int, IslandReport]]


class ReliableOutbox:
    """Unread and numbered reports of one island."""

    def __init__(self) -> None:
        self._unread = UnreadReports()
        self._numbered = NumberedReports()

    @property
    def epoch(self) -> Epoch:
        """The newest epoch that has commanded; 0 before any."""
        return self._numbered.epoch

    def put(self, report: IslandReport) -> None:
        self._unread.put(report)

    def take(self) -> list[IslandReport]:
        """All unread reports, oldest first, for a reader who loses none. Each is given out once."""
        return self._unread.take()

    def check_epoch(self, epoch: Epoch) -> bool:
        """Note the epoch that commands: whether it is a newer one, so that ``restate`` must follow. Raises Fenced."""
        return self._numbered.check_epoch(epoch)

    def restate(self, standing: Iterable[IslandReport]) -> None:
        """Report again what still stands and is in no report that is kept."""
        for report in self._numbered.missing(standing):
            if isinstance(report, Offer):
                self._unread.put_again(report)
            else:
                self._unread.put(report)

    def acknowledge(self, number: int) -> None:
        """Reports up to this number are on the tape."""
        self._numbered.forget(number)

    def has_after(self, number: int) -> bool:
        return bool(self._unread) or bool(self._numbered.after(number))

    def read(self, after: int) -> Numbered:
        """The reports behind this number, oldest first; unread ones get their numbers."""
        self._numbered.write(self._unread.take())
        return self._numbered.after(after)

    def forget_all(self) -> None:
        """Forget all reports: the next reader is another incarnation's. Numbers go on."""
        self._unread.take()
        self._numbered.forget_all()


class UnreadReports:
    """Reports in the order things happened, joined so that they grow only with what the service itself sends.

    Progress is cumulative, so of two neighbouring reports the later one is enough; and an offer takes the place of an older
    offer of the same fragment, whose snapshot is gone.
    """

    def __init__(self) -> None:
        self._reports: list[IslandReport] = []

    def __bool__(self) -> bool:
        return bool(self._reports)

    def put(self, report: IslandReport) -> None:
        if isinstance(report, Offer):
            self._reports = _without_offer_of(report.fragment, self._reports)
        last = self._reports[-1] if self._reports else None
        if isinstance(report, Progress) and isinstance(last, Progress):
            self._reports[-1] = _joined(last, report)
        else:
            self._reports.append(report)

    def put_again(self, offer: Offer) -> None:
        """Queue an offer again for a reader that may not know it. An offer of the fragment that waits already is not older.

        ``Flushed`` stays behind the offer, because it says that all work was offered.
        """
        if any(isinstance(old, Offer) and old.fragment == offer.fragment for old in self._reports):
            return
        place = next((n for n, old in enumerate(self._reports) if isinstance(old, Flushed)), len(self._reports))
        self._reports.insert(place, offer)

    def take(self) -> list[IslandReport]:
        """All of them, oldest first; none is left."""
        reports, self._reports = self._reports, []
        return reports


class NumberedReports:
    """Reports that are kept until they are acknowledged. ``epoch`` is the newest synchroniser's; 0 before any."""

    def __init__(self) -> None:
        self.epoch = Epoch(0)
        self._unacknowledged: Numbered = []
        self._written = 0

    def check_epoch(self, epoch: Epoch) -> bool:
        """Note the epoch that commands: whether it is newer than the last. Raises Fenced when it is older.

        A ``Flushed`` that was reported is forgotten then: the new synchroniser asks for it anew, and gets it behind the
        offers.
        """
        if epoch < self.epoch:
            raise Fenced(
                detail=f"A synchroniser of epoch {epoch} speaks, but one of epoch {self.epoch} took its place."
            )
        replaced = 0 < self.epoch < epoch
        self.epoch = epoch
        if replaced:
            self._unacknowledged = [
                (number, report) for number, report in self._unacknowledged if not isinstance(report, Flushed)
            ]
        return replaced

    def write(self, reports: Iterable[IslandReport]) -> None:
        for report in reports:
            self._written += 1
            self._unacknowledged.append((self._written, report))

    def forget(self, acknowledged: int) -> None:
        """Forget the reports up to this number: they are on the tape."""
        self._unacknowledged = [(number, report) for number, report in self._unacknowledged if number > acknowledged]

    def forget_all(self) -> None:
        """Forget all reports. Numbers go on."""
        self._unacknowledged = []

    def after(self, read: int) -> Numbered:
        """The reports behind this number, oldest first."""
        return [(number, report) for number, report in self._unacknowledged if number > read]

    def missing(self, standing: Iterable[IslandReport]) -> list[IslandReport]:
        """Return the reports that still hold and that no unacknowledged report contains; offers oldest first."""
        pending = [report for _, report in self._unacknowledged]
        return [report for report in sorted(standing, key=_age) if report not in pending]


def _age(report: IslandReport) -> tuple[int, int]:
    return (report.offer, report.fragment) if isinstance(report, Offer) else (0, 0)


def _without_offer_of(fragment: int, reports: list[IslandReport]) -> list[IslandReport]:
    others: list[IslandReport] = []
    for report in reports:
        if isinstance(report, Offer) and report.fragment == fragment:
            continue
        if isinstance(report, Progress) and others and isinstance(others[-1], Progress):
            others[-1] = _joined(others[-1], report)
        else:
            others.append(report)
    return others


def _joined(earlier: Progress, later: Progress) -> Progress:
    return replace(later, gap_max_seconds=max(earlier.gap_max_seconds, later.gap_max_seconds))
