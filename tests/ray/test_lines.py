"""The lines between node groups, measured over real connections: of two threads, and of a live cluster."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from orchestrator.errors import ConfigurationError
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.runtime.line_measurement import KEY_BYTES, Answerer, Bounds, measured, reach
from tests.api.installation import environment
from tests.waiting import PATIENCE_S

KEY = bytes(range(KEY_BYTES))
BOUNDS = Bounds(bytes_max=1 << 20, seconds_max=1.0)
GROUPS = ["asia", "europe", "us-east", "us-west"]
DELAY_S = 0.02


@pytest.fixture
def answerer() -> Iterator[Answerer]:
    with closing(Answerer("127.0.0.1", KEY, BOUNDS)) as made:
        yield made


@contextmanager
def long_line(port: int) -> Iterator[int]:
    """A port from which everything reaches that other one DELAY_S later, as does what comes back."""

    def carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                time.sleep(DELAY_S)
                target.sendall(content)

    with socket.create_server(("127.0.0.1", 0)) as entry:

        def accept() -> None:
            with suppress(OSError):
                near, _ = entry.accept()
                far = socket.create_connection(("127.0.0.1", port))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield entry.getsockname()[1]


def test_a_line_has_a_round_trip_and_a_speed_each_way(answerer: Answerer) -> None:
    line = measured("127.0.0.1", answerer.port, KEY, BOUNDS)
    assert line.round_trip_s > 0
    assert min(line.forth_bits_per_second, line.back_bits_per_second) > 0


def test_a_long_lines_round_trip_is_seen_and_no_speed_is_above_what_it_lets_through(answerer: Answerer) -> None:
    with long_line(answerer.port) as port:
        line = measured("127.0.0.1", port, KEY, BOUNDS)
    assert line.round_trip_s >= 2 * DELAY_S
    most = 8 * (1 << 16) / DELAY_S  # it lets no more through at a time than one read
    assert line.forth_bits_per_second <= 1.5 * most
    assert line.back_bits_per_second <= 1.5 * most


def test_a_caller_with_another_key_is_sent_away_and_the_next_is_answered(answerer: Answerer) -> None:
    with pytest.raises(OSError, match=r"ended|reset"):
        measured("127.0.0.1", answerer.port, bytes(KEY_BYTES), BOUNDS)
    assert measured("127.0.0.1", answerer.port, KEY, BOUNDS).round_trip_s > 0


def test_a_caller_that_sends_more_than_agreed_is_cut_off(answerer: Answerer) -> None:
    with pytest.raises(OSError, match=r"ended|reset|[Pp]ipe"):
        measured("127.0.0.1", answerer.port, KEY, Bounds(bytes_max=64 << 20, seconds_max=60.0))


def test_where_nobody_listens_nothing_is_measured(answerer: Answerer) -> None:
    answerer.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        measured("127.0.0.1", port, KEY, BOUNDS)


def test_who_only_wants_to_know_whether_it_gets_there_is_answered_and_the_next_measured(answerer: Answerer) -> None:
    reach("127.0.0.1", answerer.port, KEY)
    assert measured("127.0.0.1", answerer.port, KEY, BOUNDS).round_trip_s > 0
    with pytest.raises(OSError, match=r"ended|reset"):
        reach("127.0.0.1", answerer.port, bytes(KEY_BYTES))


def test_an_answerer_takes_a_port_of_its_range_or_says_that_none_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"{port} to {port}"):
            Answerer("127.0.0.1", KEY, BOUNDS, (port, port))
    with closing(Answerer("127.0.0.1", KEY, BOUNDS, (port, port))) as made:
        assert made.port == port


@pytest.mark.ray
def test_every_line_of_a_live_cluster_is_measured_each_way_and_nothing_of_it_stays(
    home: Path, port: RayControlPort
) -> None:
    command = [sys.executable, "-m", "api.cli", "doctor", "--lines", "--home", str(home), "--json"]
    command += ["--parameters", "1e6", "--step-s", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment())
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    names = ["control", *GROUPS]
    assert [(line["one"], line["other"]) for line in answer["lines"]] == [
        (one, other) for n, one in enumerate(names) for other in names[n + 1 :]
    ]
    for line in answer["lines"]:
        assert line["problem"] is None, line
        assert line["round_trip_s"] > 0
        assert line["forth_bits_per_second"] > 0
        assert line["back_bits_per_second"] > 0
    assert answer["advice"]["settings"] is not None
    assert [row["line"] for row in answer["utilisation"]] == GROUPS
    assert all(group["cpus_free"] == group["cpus"] for group in port.node_groups())
