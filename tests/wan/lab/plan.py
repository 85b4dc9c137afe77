"""What the lab tries: sizes, lines and methods, at three settings. Refuses to know how it is run.

Everything here is the paper's main setting (P = H = 24, τ = 2, arXiv:2604.21428) made smaller. What decides about waiting is
a line's bits per second over N/T, parameters per second of step time: the lab's N/T is 9.6e6, so its lines stand for
lines 506 times as wide in ``simulation.bandwidth``'s 5B at 1.03 s. 1.7 Mbit/s is the paper's 0.84 Gbps; 6.4 Mbit/s is
what 12B with 16 bits take, the paper's 2 to 5 Gbps over four regions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.parameters.codec.registry import CODEC_NAMES
from orchestrator.simulation.bandwidth import Traffic
from orchestrator.simulation.line_advice import bits_of
from tests.wan.lab.collective import METHODS

MEGA = 1e6
CODEC_BITS = {name: bits_of(name) for name in CODEC_NAMES}
WINDOW_BYTES = 64 << 20
"""What each buffer of a connection may hold: people who train over long lines set that, and it is equal for every method."""
OURS = "atoll "
"""Before a codec: the method's name in tables."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``megabits`` are the lines' rates, the same for every region; a round trip between two regions is ``round_trip_s``.
    Of frames between two regions ``frame_loss_ratios`` are lost; these and ``round_trips_s`` are tried at one rate.

    Losses are nano's, which trains in earnest: over ``loss_steps`` inner steps of each region, 0 for none at all.

    A rate at which one window of a method would take longer than ``window_max_s`` by the formulas is left out for it.
    """

    regions: int = 4
    parameters: int = 2_400_000
    step_s: float = 0.25
    fragments: int = 24
    interval_steps: int = 24
    overlap_steps: int = 2
    batch_size: int = 8
    sequence_length: int = 128
    megabits: tuple[float, ...] = (1.7, 6.4, 20, 60, 200, 1_000, 10_000)
    round_trip_s: float = 0.02
    round_trips_s: tuple[float, ...] = (0.002, 0.05, 0.15)
    aside_megabits: float = 200
    """The rate at which distance, losses and a struck line are tried."""
    frame_loss_ratios: tuple[float, ...] = (0.001, 0.01)
    narrow_ratio: float = 0.01
    collectives: tuple[str, ...] = METHODS
    codecs: tuple[str, ...] = ("float32", "int8", "int4", "int2")
    window_s: float = 8.0
    window_max_s: float = 60.0
    loss_steps: int = 180
    loss_interval_steps: int = 12
    loss_fragments: int = 6
    loss_megabits: float = 5.0
    loss_points: int = 10

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"region-{index}" for index in range(self.regions))

    @property
    def tokens_per_step(self) -> int:
        """Of one region."""
        return self.batch_size * self.sequence_length

    def traffic(self, method: str, round_trip_s: float) -> Traffic:
        """The formulas' terms for this method, with the bits that it really sends."""
        bits = CODEC_BITS.get(method.removeprefix(OURS), 32.0)
        return Traffic(
            parameters=self.parameters,
            step_s=self.step_s,
            learners=self.regions,
            fragments=self.fragments,
            interval_steps=self.interval_steps,
            overlap_steps=self.overlap_steps,
            gradient_bits=32.0,
            wire_bits=bits,
            round_trip_s=round_trip_s,
        )


QUICK = Plan()
FULL = replace(
    QUICK,
    megabits=(1, 1.7, 4, 6.4, 10, 20, 40, 60, 100, 200, 400, 1_000, 2_500, 10_000),
    round_trips_s=(0.002, 0.01, 0.03, 0.06, 0.1, 0.15),
    codecs=("float32", "bfloat16", "int8", "int4", "e3m0", "int2"),
    loss_steps=960,
    window_s=30.0,
    window_max_s=600.0,
)
SMALL = replace(
    QUICK,
    regions=2,
    parameters=240_000,
    step_s=0.1,
    fragments=8,
    interval_steps=8,
    megabits=(200,),
    round_trips_s=(),
    frame_loss_ratios=(0.01,),
    codecs=("int4",),
    collectives=METHODS[:1],
    loss_steps=0,
    window_s=3.0,
)
SETTINGS = {"quick": QUICK, "full": FULL, "small": SMALL}
